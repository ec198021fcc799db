"""The preview shows what training sees."""

import numpy as np
import pytest
import torch
from PIL import Image

import fastsuncet.commands.preview as module
from fastsuncet import versions
from fastsuncet.commands.preview import COLUMNS, preview, sheet
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed.place import Place
from fastsuncet.errors import CheckpointError, ConfigError
from tests.support.runs import small_config
from tests.support.trackers import tensorboard

pytestmark = pytest.mark.slow


def pictures(row: list) -> np.ndarray:
    return np.stack([picture for picture, _ in row])


def test_sheet_shows_the_runs_own_batch_by_both_back_ends_and_decodes_no_more(tmp_path, monkeypatch):
    step = 6  # in the second epoch of the run; with batches of 8 it would be in the first
    # Six of ten classes: a batch of another size would hold other classes.
    config = small_config(tmp_path, "criterion.classes_per_batch=6", "data.backend=torchvision")
    decoded, loader = [], module.Loader

    def watched(plan, *arguments, **options):
        decoded.append(plan.batch)
        return loader(plan, *arguments, **options)

    monkeypatch.setattr(module, "Loader", watched)
    rows = dict(sheet(config, step))
    for number in (1, 2):
        ours, theirs = (pictures(rows[f"view {number}\n{who}"]) for who in ("DALI", "torchvision"))
        assert np.abs(ours - theirs).mean() < 2 / 255
    place = Place(0, 1, torch.device("cpu"))
    images = open_images(config, place, validation=False)
    arithmetic = config.resolve(1, *images.counts()[:2])
    stream = PairedStream(config, images.train, images.split.indices, arithmetic, place)
    batch = stream(step)
    names = [name[-22:] for name in stream.files(step, 0, "unlabeled")[:COLUMNS]]
    assert [caption for _, caption in rows["images"]] == names
    view = stream.labeled_view
    for title, tensor, order in (
        ("view 1\ntorchvision", batch.views[0], range(COLUMNS)),
        ("view 2\ntorchvision", batch.views[1], range(COLUMNS)),
        ("labeled", batch.labeled, [0, 6, 1, 7, 2, 8, 3, 9]),  # row i is of class i % 6
    ):
        theirs = tensor[list(order)].permute(0, 2, 3, 1).numpy() * np.array(view.std) + np.array(view.mean)
        np.testing.assert_allclose(pictures(rows[title]), np.clip(theirs, 0, 1), atol=1e-6)
    captions = [caption for _, caption in rows["labeled"]]
    assert captions == [images.train.classes[label] for label in batch.labels[order]], "pairs of one class"
    stream.close()
    assert max(decoded) <= COLUMNS


def test_sheet_shows_labeled_images_only_at_steps_that_use_them(tmp_path):
    config = small_config(tmp_path, "criterion.supervised_epochs=1")  # 4 steps
    assert "labeled" in dict(sheet(config, step=3))
    assert "labeled" not in dict(sheet(config, step=4))


def test_preview_writes_a_picture_or_says_why_not(tmp_path, monkeypatch):
    """tests/commands/test_demo.py draws a real sheet."""
    monkeypatch.setattr(module, "sheet", lambda *_: [("a row", [(np.zeros((8, 8, 3)), "$\\udcff\\frac$")])])
    config = small_config(tmp_path, "logging.tensorboard=true")
    assert Image.open(preview(config, tmp_path / "new folder" / "views.png")).format == "PNG"
    assert tensorboard(config.run_folder)["pictures"] == ["views"]
    for name in ("", "views", "views.xyz"):
        with pytest.raises(ConfigError, match=r"png"):
            preview(config, tmp_path / name)
    (tmp_path / "views.png").mkdir()  # refused to any user, root too
    with pytest.raises(ConfigError, match=r"views\.png exists\. Choose another name, or add --force"):
        preview(config, tmp_path / "views.png")
    with pytest.raises(CheckpointError, match=r"views\.png cannot be written: .*Is a directory"):
        preview(config, tmp_path / "views.png", force=True)
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:  # before the views are made
        patch.setattr(module, "sheet", None)
        with pytest.raises(CheckpointError, match=r"views\.png cannot be written: .*Not a directory"):
            preview(config, tmp_path / "file" / "views.png")
    assert not list(tmp_path.glob("views.x*")) and not list(tmp_path.parent.glob(f"{tmp_path.name}.*"))
    monkeypatch.setattr(versions, "installed", lambda package: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        preview(config, tmp_path / "views.png")
