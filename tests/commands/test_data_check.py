"""`fastsuncet data check` finds the images that would end a run, before the run, and keeps its index for it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsuncet import cli
from fastsuncet.config import load_config
from fastsuncet.data.image_files import index_path
from pipelines.datasets import image_headers
from pipelines.datasets.index import load_index
from tests.support.pictures import cut_short

CONFIG = """\
data: {kind: image_folder, root: images, backend: torchvision}
criterion: {temperature: 0.1, unsupervised_batch_size: 2}
optimization: {epochs: 1, lr: 1.0}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, _empty_folder) -> Path:
    """Six images of two classes to train on, two to validate on, below the working directory."""
    draw = np.random.default_rng(0)
    for place, number in (("train/cat", 3), ("train/dog", 3), ("val/cat", 1), ("val/dog", 1)):
        Path("images", place).mkdir(parents=True)
        for i in range(number):
            Image.fromarray(draw.integers(0, 255, (40, 60, 3), np.uint8)).save(f"images/{place}/{i}.jpg")
    Path("run.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def run(folder, run_cli):
    """A function that checks the images of run.yaml and returns the lines that are printed."""
    return lambda *words: run_cli("data check run.yaml", *words).replace(f"{folder}/", "").splitlines()


def test_data_check_counts_good_images_and_keeps_the_index_of_a_run(folder, run):
    lines = run()
    config = load_config("run.yaml")
    kept = [index_path(config, folder / "images" / name, name == "train") for name in ("train", "val")]
    assert lines[0] == "images/train: 6 images decoded with PIL, all good"
    assert lines[2] == "images/val: 2 images decoded with PIL, all good"
    assert [len(load_index(path)) for path in kept] == [6, 2]
    assert load_index(kept[0]).classes == ("cat", "dog")
    assert (load_index(kept[0]).sizes == [40, 60]).all()
    Image.new("RGB", (60, 40)).save(folder / "images/train/cat/new.png")
    assert run()[0] == "images/train: 7 images decoded with PIL, all good"


def test_data_check_names_truncated_files_unless_the_config_allows_them(folder, run, capsys):
    cut_short(folder / "images/train/dog/1.jpg")
    cut_short(folder / "images/val/cat/0.jpg")
    assert cli.main(["data", "check", "run.yaml"]) == 3
    output = capsys.readouterr()
    assert "images/train: 6 images decoded with PIL, 1 bad" in output.out
    assert output.err.startswith(f"error: 2 images cannot be decoded:\n  {folder}/images/train/dog/1.jpg: ")
    assert f"\n  {folder}/images/val/cat/0.jpg: " in output.err
    kept = load_index(index_path(load_config("run.yaml"), folder / "images/train", True))
    assert list(kept.bad) == [4]  # a run refuses it, or replaces it
    *_, train, val = run("data.bad_images=2")
    assert train.startswith("images/train/dog/1.jpg: ") and val.startswith("images/val/cat/0.jpg: ")
    assert train.endswith("(data.bad_images allows 2)")
    assert "6 images decoded with PIL, 6 bad" in run("data.bad_images=8", "data.max_megapixels=0.001")[0]


def test_data_check_needs_a_validation_folder_only_for_an_evaluation(folder, run, capsys):
    (folder / "images/val").rename(folder / "held_out")
    assert run()[0] == "images/val: skipped, the folder does not exist and no evaluation needs it"
    assert cli.main(["data", "check", "run.yaml", "evaluation.knn_every_epochs=1"]) == 3
    output = capsys.readouterr()
    assert "images/val" in output.err and not output.out  # before hours of decoding
    assert len(run("data.validation=null")) == 2


def test_data_check_names_labeled_copies_of_an_image(folder, run, monkeypatch):
    """An unlabeled copy and a bad one are none."""
    shown = []
    monkeypatch.setattr(image_headers, "show_progress", lambda *progress: shown.append(progress))
    train = folder / "images/train"
    for copy in ("cat/9.jpg", "dog/7.jpg"):
        (train / copy).write_bytes((train / "cat/0.jpg").read_bytes())
    for name in ("cat/8.jpg", "dog/8.jpg"):
        (train / name).write_bytes(b"")
    (folder / "labels.csv").write_text("file,label\ncat/0.jpg,tabby\ncat/9.jpg,lion\n")
    overrides = ("data.kind=csv", "data.csv=labels.csv", "data.train=train", "data.validation=null")
    text = "note: 1 labeled image is a copy: cat/9.jpg (lion) of cat/0.jpg (tabby). "
    (said,) = (line for line in run(*overrides, "data.bad_images=2") if line.startswith(text))
    assert said.endswith("and two labels contradict: keep one of each")
    assert shown[-1] == (f"{train}, looking for copies", 2, 2)


def test_data_check_of_a_folder_ignores_its_layout(folder, run_cli):
    assert run_cli("data check images").startswith("images: 8 images decoded with ")
    cut_short(folder / "images/train/dog/1.jpg")
    assert "images/train/dog/1.jpg" in run_cli("data check images", code=3)


def test_data_commands_escape_control_characters_in_names(folder, run_cli):
    evil = (folder / "images").rename(folder / "\x1b[2J")
    pack = ["data pack run.yaml --output", evil / "pack", f"data.root={folder / 'link'}"]
    (folder / "link").symlink_to(evil)
    for words in (["data check", evil], pack, pack):
        printed = run_cli(*words)
        assert rf"{folder}/\x1b[2J" in printed and "\x1b" not in printed


@pytest.mark.slow
def test_data_check_reads_images_in_memory_whole(run):
    pytest.importorskip("sklearn")
    Path("run.yaml").write_text(CONFIG.replace("image_folder, root: images, backend: torchvision", "digits"))
    assert run() == ["digits: 1,442 training and 355 test images, decoded and held in memory"]
