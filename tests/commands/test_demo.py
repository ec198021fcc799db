"""The demo says what its numbers say, and no more; the preview shows what training sees."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import fastsuncet.commands.preview as preview_module
from fastsuncet.commands.demo import METHODS, Curve, demo, table, verdict
from fastsuncet.commands.preview import COLUMNS, preview, sheet
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import CheckpointError, ConfigError
from tests.support.runs import CONFIGS, small_config


def curves(baseline: list[float], ours: list[float]) -> dict[str, Curve]:
    updates = [60 * (i + 1) for i in range(len(baseline))]
    spent = [1e-6 * u for u in updates]
    return {name: Curve(updates, spent, accuracy) for name, accuracy in zip(METHODS, (baseline, ours))}


def test_the_verdict_names_the_gain_and_the_compute_at_which_the_baselines_best_was_reached():
    text = verdict(curves([0.80, 0.90, 0.92, 0.91], [0.85, 0.93, 0.94, 0.95]))
    assert "95.0 % of the test digits with SuNCEt and on 91.0 % without: 4.0 points more." in text
    assert "SimCLR's best (92.0 %) after 120 of 240 updates, 50% of the compute" in text


def test_the_verdict_admits_a_loss_and_a_draw():
    worse = verdict(curves([0.80, 0.95], [0.85, 0.90]))
    assert "5.0 points less." in worse
    assert "never reached SimCLR's best (95.0 %)" in worse
    assert "no difference." in verdict(curves([0.9], [0.9]))


def test_the_table_has_a_line_a_checkpoint_with_both_methods():
    head, *lines = table(curves([0.8, 0.9], [0.85, 0.95]))
    assert all(name in head for name in METHODS)
    assert lines[1].split() == ["120", "120.0", "90.0%", "95.0%"]


def test_the_demo_spends_the_same_compute_on_both_methods_and_draws_both_pictures(tmp_path, capsys):
    seen = demo(CONFIGS, tmp_path, seed=3, overrides=("optimization.steps=120", "meta.threads=1"))
    simclr, suncet = (seen[name] for name in METHODS)
    assert simclr.updates == suncet.updates == [60, 120]
    assert simclr.petaflops == suncet.petaflops
    assert min(simclr.best, suncet.best) > 0.6  # chance is 0.1
    kept = json.loads((tmp_path / "demo_seed3.json").read_text())
    assert kept["SimCLR"]["accuracy"] == simclr.accuracy
    said = capsys.readouterr().out
    assert verdict(seen) in said
    for name in ("demo_seed3.png", "views.png"):
        pixels = np.asarray(Image.open(tmp_path / name).convert("L"))
        assert pixels.std() > 10, f"{name} is blank"


def test_the_preview_shows_the_views_of_its_step_by_both_back_ends_alike(tmp_path):
    config = small_config(tmp_path)
    rows = dict(sheet(config, step=2))
    for number in (1, 2):
        ours, theirs = (
            np.stack([p for p, _ in rows[f"view {number}\n{who}"]]) for who in ("DALI", "torchvision")
        )
        assert np.abs(ours - theirs).mean() < 2 / 255
    assert not np.allclose(rows["view 1\nDALI"][0][0], rows["view 2\nDALI"][0][0])
    classes = [caption for _, caption in rows["labeled"]]
    assert classes[0::2] == classes[1::2], "a person reads pairs of one class"


@pytest.mark.parametrize(
    "step", [0, 6]
)  # 6: in the second epoch of the run, where batches of 8 would be in the first
def test_the_preview_shows_the_first_rows_of_the_runs_own_batch_and_decodes_no_others(
    tmp_path, monkeypatch, step
):
    # Six of ten classes: a batch of another size would hold others.
    config = small_config(tmp_path, "criterion.classes_per_batch=6", "data.backend=torchvision")
    decoded = []
    real = preview_module.open_loader
    monkeypatch.setattr(
        preview_module,
        "open_loader",
        lambda index, plan, *a, **k: (decoded.append(plan.batch), real(index, plan, *a, **k))[1],
    )
    rows = dict(sheet(config, step))

    place = Place(0, 1, 0, torch.device("cpu"))
    images = open_images(config, place, validation=False)
    arithmetic = config.resolve(1, len(images.train), images.labeled_classes)
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
        np.testing.assert_allclose(
            np.stack([picture for picture, _ in rows[title]]), np.clip(theirs, 0, 1), atol=1e-6
        )
    stream.close()
    assert max(decoded) <= COLUMNS


def test_the_preview_shows_labeled_images_only_at_steps_that_learn_from_them(tmp_path):
    config = small_config(tmp_path, "criterion.supervised_epochs=1")  # 4 steps
    assert "labeled" in dict(sheet(config, step=3))
    assert "labeled" not in dict(sheet(config, step=4))


@pytest.mark.parametrize("name", ["", "views", "views.xyz"])
def test_a_preview_is_not_said_to_be_written_under_a_name_that_is_no_pictures(name, tmp_path):
    with pytest.raises(ConfigError, match=r"is no picture's name: it must end in one of .*png"):
        preview(small_config(tmp_path), tmp_path / name)
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}.*"))


def test_a_name_too_long_for_its_picture_is_seen_to_be_cut():
    assert preview_module.caption("c01/n02012849_crane.JPEG") == "...02012849_crane.JPEG"
    assert preview_module.caption("cat/22_characters.JPEG") == "cat/22_characters.JPEG"


def test_a_preview_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "views.png").mkdir()  # refused to any user, root too
    with pytest.raises(CheckpointError, match=r"the picture .*views.png cannot be written: Is a directory"):
        preview(small_config(tmp_path), tmp_path / "views.png")


def test_a_preview_is_a_picture_file(tmp_path):
    path = preview(small_config(tmp_path), tmp_path / "new folder" / "views.png")
    assert Image.open(path).format == "PNG"


@pytest.mark.parametrize("name", METHODS.values())
def test_both_methods_of_the_demo_show_256_views_an_update(name):
    from fastsuncet.config import load_config

    assert load_config(CONFIGS / name).resolve(1, 1442, 10).samples(0) == 256
