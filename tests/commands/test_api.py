"""The public names of `import fastsuncet`: they exist and work together."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import PIL.Image
import pytest
import torch

import fastsuncet
from fastsuncet.checkpoint import manager
from fastsuncet.commands import train as train_command
from fastsuncet.commands.api import in_a_callers_process
from fastsuncet.commands.init import survey
from fastsuncet.errors import CheckpointError, ConfigError, Preempted
from fastsuncet.losses.suncet import suncet
from pipelines.data_errors import DataError
from pipelines.sampling.augmentation import Center
from tests.support.pictures import write_images
from tests.support.runs import small_config

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# For a dozen images, all labeled.
FEW = ("data.validation=null", "data.split.kind=all", "data.split.fraction=null", "optimization.warmup=0")
FEW += ("criterion.unsupervised_batch_size=4", "criterion.classes_per_batch=2", "optimization.steps=2")
FEW += ("criterion.supervised_imgs_per_class=2", "checkpoint.export=[]")


def test_every_public_name_exists():
    assert all(getattr(fastsuncet, name) is not None for name in fastsuncet.__all__)
    assert fastsuncet.suncet is suncet and set(fastsuncet.__all__) <= set(dir(fastsuncet))
    assert {name for names in fastsuncet._MODULES.values() for name in names} == set(fastsuncet.__all__)
    with pytest.raises(AttributeError, match="no attribute 'sunset'"):
        fastsuncet.sunset  # noqa: B018


@pytest.mark.slow
def test_train_interrupted_at_its_start_saves_nothing_and_restores_the_handlers(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        signal.raise_signal(signal.SIGINT)
        return opened(*_, **__)

    handlers, opened = [signal.getsignal(each) for each in SIGNALS], train_command.open_images
    monkeypatch.setattr(train_command, "open_images", interrupted)
    with pytest.raises(Preempted, match="SIGINT: stopped before the first step"):
        fastsuncet.train(config := small_config(tmp_path))
    assert [signal.getsignal(each) for each in SIGNALS] == handlers
    assert json.loads((config.run_folder / "status.json").read_text())["state"] == "preempted"
    assert not (config.run_folder / "checkpoints").exists()


@pytest.mark.slow
def test_train_and_embed_take_files_dictionaries_and_arrays(tmp_path):
    """A run on pixels, one on their files with labels and one on a dictionary are the same run; it can be continued.

    A call with other images or labels is refused and changes no file.
    """
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 20, 3), np.uint8)
    labels = [("cat", "dog", float("nan"))[i % 3] for i in range(12)]
    files = [tmp_path / "photos" / f"{i:02}.png" for i in range(12)]
    files[0].parent.mkdir()
    for file, image in zip(files, pixels):
        PIL.Image.fromarray(image).save(file)
    weights, spaced = [], [f" {label} " if label == "cat" else label for label in labels]
    for name, images, given, other in (
        ("array", pixels, labels, pixels[::-1]),
        ("files", files, spaced, [*files[:10], *files[:-3:-1]]),
        ("mapping", dict(zip(map(str, files), labels)), None, dict(zip(files, labels[::-1]))),
    ):
        config = small_config(tmp_path / name, *FEW)
        write_images(config.run_folder / "images", "00000000.png")  # as a call left it that began no run
        run = fastsuncet.train(config, images, given)
        weights.append(fastsuncet.load_encoder(run).state_dict())
        if name == "array":  # one is lost, one is damaged, one is as another version of the library writes it
            lost, damaged, larger = (run / "images" / f"0000000{i}.png" for i in range(3))
            lost.unlink()
            damaged.write_bytes(damaged.read_bytes()[:99])
            PIL.Image.fromarray(pixels[2]).save(larger, compress_level=0)
        assert fastsuncet.train(config, images, given) == run
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises((CheckpointError, DataError), match=r"logging\.write_tag"):
            fastsuncet.train(config, other, given)
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for other in weights[1:]:
        assert all(torch.equal(value, other[key]) for key, value in weights[0].items())
    encoder = fastsuncet.load_encoder(str(run))
    assert not encoder.training and encoder.view and encoder.view.size == 16
    names, rows = fastsuncet.embed(encoder, files)
    assert names == [str(file) for file in files]
    assert fastsuncet.embed(encoder, pixels)[0] == [str(i) for i in range(12)]
    with torch.autocast("cpu", torch.bfloat16):  # of the caller's own training
        assert np.array_equal(rows, fastsuncet.embed(encoder, pixels)[1])
    assert np.array_equal(rows, fastsuncet.embed(encoder, tmp_path / "photos")[1])
    again, found = fastsuncet.embed(run, iter(files))
    assert again == names and np.array_equal(rows, found)
    found = [
        fastsuncet.predict(run, images)
        for images in (tmp_path / "photos", files, dict.fromkeys(files), pixels)
    ]
    assert (run / "learned.csv").read_text().count("\n") == 1 + 8 and len(found[0]) == 12
    assert all([each[1:] for each in other] == [each[1:] for each in found[0]] for other in found)
    assert [each.file for each in found[1]] == names and found[3][11].file == "11"


@pytest.mark.slow
def test_calls_from_a_program_with_its_own_defaults_and_a_relative_folder(tmp_path, monkeypatch):
    """Later calls from another folder find the images. What the caller has of a network stays as it is."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 20, 3), np.uint8)
    labels = np.array([*[0, 1] * 5, np.nan, np.nan], np.float32)  # as pandas has numbers of classes, and none
    monkeypatch.chdir(tmp_path)
    with torch.device("meta"), torch.inference_mode():
        torch.set_default_dtype(torch.float64)
        try:
            run = fastsuncet.train(small_config(Path("runs"), *FEW), pixels, labels)
            encoder = fastsuncet.load_encoder(run)
        finally:
            torch.set_default_dtype(torch.float32)
    monkeypatch.chdir("/")
    assert {each.label for each in fastsuncet.predict(tmp_path / run, pixels)} <= {"0", "1"}
    rows = fastsuncet.embed(encoder, pixels)[1]
    encoder.train().get_submodule("bn1").eval()
    modes = [module.training for module in encoder.modules()]
    again = fastsuncet.embed(encoder.bfloat16(), pixels)[1]
    assert [module.training for module in encoder.modules()] == modes and len({*modes}) == 2
    assert again.dtype == np.float32 and np.allclose(rows, again, rtol=0.1, atol=0.1)
    flat = fastsuncet.embed(torch.nn.Flatten(), pixels, view=encoder.view)[1]
    assert flat.shape == (12, 3 * 16 * 16)
    with pytest.raises(ConfigError, match=r"\(images, width\), not 12 of them to a tensor \(12, 3, 16, 16\)"):
        fastsuncet.embed(torch.nn.Identity(), pixels, view=encoder.view)
    one_row = torch.nn.Sequential(torch.nn.Flatten(0), torch.nn.Unflatten(0, (1, -1)))
    with pytest.raises(ConfigError, match=r"not 12 of them to a tensor \(1, 9216\)"):
        fastsuncet.embed(one_row, pixels, view=encoder.view)


def test_embed_in_threads_keeps_a_network_that_trains_in_evaluation_mode():
    seen = []

    class Slow(torch.nn.Flatten):
        def forward(self, x):
            seen.append(self.training)
            time.sleep(0.02)
            seen.append(self.training)
            return super().forward(x)

    network, pixels = Slow(), np.zeros((10, 4, 4, 3), np.uint8)
    with ThreadPoolExecutor(2) as threads:
        for part in (pixels, pixels[:3]):
            threads.submit(fastsuncet.embed, network, part, view=Center(4, 4), batch=1)
    assert seen == [False] * 26 and network.training


def test_calls_in_two_threads_restore_what_was_before_both():
    first, second = in_a_callers_process(), in_a_callers_process()
    torch.set_default_dtype(torch.float64)
    try:
        with ThreadPoolExecutor(1) as other:
            with first:
                other.submit(second.__enter__).result()
            assert torch.get_default_dtype() == torch.float32, "the other call is still computing"
            other.submit(second.__exit__, None, None, None).result()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_train_refuses_images_that_are_none(tmp_path):
    config = small_config(tmp_path)
    cases: Any = (
        ([], None, "no images were given"),
        (np.zeros((2, 8, 8), np.uint8), None, r"\(N, H, W, 3\) uint8, not \(2, 8, 8\) uint8"),
        (np.zeros((2, 8, 8, 3), np.float32), None, "not .* float32"),
        (np.zeros((2, 8, 8, 3), np.uint8), ["cat"], "1 labels were given for 2 images"),
        (np.zeros((1, 8, 8, 3), np.uint8), torch.ones(1, 10), r"a label is the name .* not tensor"),
        (np.zeros((1, 8, 8, 3), np.uint8), [" "], "a label is empty: .* None for an image without"),
        (["a.jpg"], {"a.jpg": "cat"}, "one dictionary of files and their classes"),
        ({"a.jpg": "cat"}, ["cat"], "one dictionary of files and their classes"),
        (["a.jpg", "a.jpg"], None, "given more than once"),
        (PIL.Image.new("RGB", (8, 8)), None, "paths, not Image: give pixels as one array"),
        ([np.zeros((8, 8, 3), np.uint8)], None, "paths, not ndarray: give pixels as one array"),
    )
    for images, labels, said in cases:
        with pytest.raises(DataError, match=said):
            fastsuncet.train(config, images, labels)


def test_public_functions_refuse_wrong_arguments(tmp_path):
    config, file = small_config(tmp_path), tmp_path / "mine.yaml"
    file.write_text("data: {kind: nothing}\n")
    line, number = "mine.yaml:1: data.kind", "must be a whole number of 1 or more, not"
    pool = ThreadPoolExecutor()
    cases: Any = (
        ("pass both", lambda: fastsuncet.train(config, labels=["cat"])),
        ("in the main thread", lambda: pool.submit(fastsuncet.train, config).result()),
        (f"batch {number} 0", lambda: fastsuncet.embed(tmp_path, tmp_path, batch=0)),
        (f"batch {number} True", lambda: fastsuncet.predict(tmp_path, tmp_path, batch=True)),
        (f"count {number} 1.5", lambda: fastsuncet.suggest(tmp_path, cast("int", 1.5))),
        ("pass view=Center", lambda: fastsuncet.embed(torch.nn.Conv2d(3, 3, 1), tmp_path)),
        (line, lambda: fastsuncet.train(str(file))),
        (line, lambda: fastsuncet.suggest(file)),
        (line, lambda: fastsuncet.predict(file, tmp_path)),
    )
    for said, call in cases:
        with pytest.raises(ConfigError, match=said):
            call()


def test_train_on_an_array_leaves_no_files_in_a_run_on_other_images(tmp_path):
    config = small_config(tmp_path)
    manager.save(config.run_folder / manager.FOLDER, 1, model={}, state={}, meta={}, keep=1)
    with pytest.raises(CheckpointError, match=r"Give the new run another logging\.write_tag"):
        fastsuncet.train(config, np.zeros((2, 8, 8, 3), np.uint8))
    assert [path.name for path in config.run_folder.iterdir()] == [manager.FOLDER]


def test_init_config_returns_or_writes_a_config(tmp_path, monkeypatch):
    monkeypatch.setattr(survey, "_timed_step", lambda *_: 1e11)
    write_images(tmp_path / "photos", *(f"{i}.jpg" for i in range(8)))
    monkeypatch.setenv("HOME", str(tmp_path))
    made = fastsuncet.init_config("~/photos", hours=0.1, weights="none")
    assert made.data.kind == "images" and made.data.root == str(tmp_path / "photos")
    written = fastsuncet.init_config("~/photos", hours=0.1, weights="none", output="~/mine.yaml")
    assert written.data == made.data and written.logging.write_tag == "mine"
