"""`fastsuncet data check` finds the images that would end a run, before the run, and keeps its index for it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsuncet import cli
from fastsuncet.commands.data_check import check_config, check_folder
from fastsuncet.config import load_config
from fastsuncet.data.dataset import index_path
from pipelines.data_errors import BadImage, DataError
from pipelines.datasets.index_io import load_index

CONFIG = """\
data: {kind: image_folder, root: images, backend: torchvision}
criterion: {temperature: 0.1, unsupervised_batch_size: 2}
optimization: {epochs: 1, lr: 1.0}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Six images of two classes to train on, two to validate on; the working directory is theirs."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for split, number in (("train", 3), ("val", 1)):
        for name in ("cat", "dog"):
            place = tmp_path / "images" / split / name
            place.mkdir(parents=True)
            for i in range(number):
                Image.fromarray(draw.integers(0, 255, (40, 60, 3), np.uint8)).save(place / f"{i}.jpg")
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-400])


def run(*overrides) -> list[str]:
    lines: list[str] = []
    check_config(load_config("run.yaml", overrides), lines.append)
    return lines


def test_good_images_are_counted_and_their_index_is_the_one_a_run_opens(folder):
    lines = run()
    config = load_config("run.yaml")
    kept = [index_path(config, folder / "images" / name, name == "train") for name in ("train", "val")]
    assert lines[0] == "images/train: 6 images decoded with PIL, all good"
    assert lines[2] == "images/val: 2 images decoded with PIL, all good"
    assert [len(load_index(path)) for path in kept] == [6, 2]
    assert load_index(kept[0]).classes == ("cat", "dog")
    assert (load_index(kept[0]).sizes == [40, 60]).all()


def test_a_file_cut_short_is_named_on_stderr_and_ends_with_3(folder, capsys):
    cut_short(folder / "images/train/dog/1.jpg")
    cut_short(folder / "images/val/cat/0.jpg")
    assert cli.main(["data", "check", "run.yaml"]) == 3
    said = capsys.readouterr()
    assert "images/train: 6 images decoded with PIL, 1 bad" in said.out
    assert said.err.startswith("error: 2 images cannot be decoded:\n  images/train/dog/1.jpg: ")
    assert "\n  images/val/cat/0.jpg: " in said.err
    kept = load_index(index_path(load_config("run.yaml"), folder / "images/train", True))
    assert list(kept.bad) == [4]  # and a run is refused by it, or replaces it


def test_as_many_bad_images_as_the_config_allows_are_listed_and_end_with_0(folder):
    cut_short(folder / "images/train/dog/1.jpg")
    lines = run("data.bad_images=1")
    assert lines[-1].startswith("images/train/dog/1.jpg: ")
    assert lines[-1].endswith("(data.bad_images allows 1)")
    with pytest.raises(BadImage):
        run("data.bad_images=0")


def test_new_files_are_found_by_checking_again(folder):
    run()
    Image.new("RGB", (60, 40)).save(folder / "images/train/cat/new.png")
    assert run()[0] == "images/train: 7 images decoded with PIL, all good"


def test_a_missing_validation_folder_matters_only_if_an_evaluation_asks_for_it(folder):
    (folder / "images/val").rename(folder / "held_out")
    assert run()[-1] == "images/val: skipped, the folder does not exist and no evaluation needs it"
    with pytest.raises(DataError, match="no data folder images/val"):
        run("evaluation.knn_every_epochs=1")
    assert len(run("data.validation=null")) == 2


def test_the_labels_of_a_csv_are_checked_with_its_images(folder):
    (folder / "labels.csv").write_text("file,label\ncat/0.jpg,tabby\ndog/9.jpg,husky\n")
    overrides = ("data.kind=csv", "data.csv=labels.csv", "data.validation=null")
    with pytest.raises(DataError, match=r"line 3: no image dog/9\.jpg"):
        run(*overrides)
    (folder / "labels.csv").write_text("file,label\ncat/0.jpg,tabby\n")
    assert run(*overrides)[0] == "images/train: 6 images decoded with PIL, all good"


def test_a_folder_is_checked_whatever_its_layout(folder, capsys):
    assert cli.main(["data", "check", "images"]) == 0
    assert capsys.readouterr().out.startswith("images: 8 images decoded with ")
    cut_short(folder / "images/train/dog/1.jpg")
    with pytest.raises(BadImage, match=r"images/train/dog/1\.jpg"):
        check_folder(folder / "images")


def test_images_held_in_memory_are_read_whole():
    pytest.importorskip("sklearn")
    config = CONFIG.replace("image_folder, root: images, backend: torchvision", "digits")
    Path("run.yaml").write_text(config)
    assert run() == ["digits: 1,442 training and 355 test images, decoded and held in memory"]
