"""The labels that a run has learned from are kept in its folder, and model.init carries them on."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastsuncet.config import load_config
from fastsuncet.data import learned_labels
from fastsuncet.data.dataset import Images, open_images
from fastsuncet.data.learned_labels import learned, left_to_judge, write_learned_labels
from pipelines.datasets.folders import image_tree
from pipelines.datasets.label_splits import labeled_split
from tests.support.colors import ALONE
from tests.support.pictures import write_images

NAMES = [f" {i:02}.jpg" for i in range(20)]  # with spaces, which a table has to quote


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A function that returns the config of a run on 20 images, and those images."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "photos", *NAMES)
    (tmp_path / "run.yaml").write_text("""\
data: {kind: csv, root: photos, csv: labels.csv, split: {kind: csv}, validation: 0.2, backend: torchvision}
criterion: {supervision: cross_entropy, temperature: 0.1, unsupervised_batch_size: 2, supervised_epochs: all,
  classes_per_batch: 2, supervised_imgs_per_class: 2}
optimization: {steps: 1, lr: 1.0}
""")

    def write(labels: int, *overrides: str):
        lines = [f'"{name}",{"cat" if i % 2 else "dog"}' for i, name in enumerate(NAMES[:labels])]
        Path("labels.csv").write_text("\n".join(["file,label", *lines]))
        config = load_config("run.yaml", [*overrides])
        return config, open_images(config, ALONE, validation=True)

    return write


def test_learned_labels_are_those_of_the_run_and_of_where_it_starts(config, monkeypatch):
    first, images = config(10)
    Path("first/checkpoints").mkdir(parents=True)
    assert write_learned_labels(Path("first"), images, first) == []
    held_out = Path("first/held_out.csv").read_text().splitlines()[1:]
    ours = Path("first/learned.csv").read_text().splitlines()[1:]
    assert len(held_out) == 2 and len(ours) == 8 and f'"{NAMES[0]}","dog"' in held_out + ours
    with open("first/learned.csv", "a") as table:
        table.write("\nanother,table,here\n")
    # Ten more labels: another draw of validation images takes some that the first run had learned from.
    second, images = config(20, "model.init=first/checkpoints")
    Path("second").mkdir()
    (warning,) = write_learned_labels(Path("second"), images, second)
    assert "validation images are labels that model.init has learned from" in warning
    assert "Write data.validation=" in warning and warning.endswith("/first/held_out.csv")
    both = Path("second/learned.csv").read_text().splitlines()[1:]
    assert len(both) == 16 + int(warning.split()[0]) and set(ours) < set(both)
    assert learned(Path("second"), images.train, True).sum() == 16
    # These are no judges, also where their class has another name by now.
    renamed = replace(images, held_out=replace(images.validation, classes=("hound", "kitten")))
    for each in (images, renamed):
        left, _ = left_to_judge(each, Path("first"), True, ALONE)
        assert len(left.validation) == 4 - int(warning.split()[0]) > 0
    # A run of few labels holds none out, so there is no table to name.
    table = Path("first/held_out.csv").rename("kept.csv")
    (warning,) = write_learned_labels(Path("second"), images, second)
    assert warning.endswith("Write data.validation=FILE.csv, with labels that it has not learned from")
    table.rename("first/held_out.csv")
    # Of more labels than a table holds there is none, also where model.init has one: all count as learned.
    Path("third").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(learned_labels, "MOST", len(images.split.indices) - 1)
        write_learned_labels(Path("third"), images, second)
    assert learned(Path("third"), images.train, True).all()
    # The table of the first run is a data.validation: then none was learned from.
    third, images = config(20, "model.init=first", "data.validation=first/held_out.csv")
    assert write_learned_labels(Path("second"), images, third) == []
    assert images.validation.fingerprint() == config(10)[1].validation.fingerprint()


def test_learned_labels_are_those_of_images_that_moved_since(config, tmp_path):
    """By their length in bytes."""
    for i, name in enumerate(NAMES):
        with open(tmp_path / "photos" / name, "ab") as photo:
            photo.write(bytes(i if i < 12 else 50))
    first, images = config(12)
    Path("first").mkdir()
    assert write_learned_labels(Path("first"), images, first) == []
    table = Path("first/learned.csv").read_text()
    # Two parts of the folder change names, and change them back.
    swapped = dict(zip([*NAMES[:8], *NAMES[12:]], [*NAMES[12:], *NAMES[:8]]))
    for was in (swapped, {}):
        for one, other in zip(NAMES[:8], NAMES[12:]):
            photo, its = tmp_path / "photos" / one, tmp_path / "photos" / other
            photo.rename("aside")
            its.rename(photo)
            Path("aside").rename(its)
        index = image_tree(tmp_path / "photos")
        known = learned(Path("first"), index, True).tolist()
        assert known == [f'"{was.get(name, name)}"' in table for name in index.files]
    # In another format they keep their paths without the ending, and no length.
    (tmp_path / "photos").rename("before")
    for name in NAMES:
        write_images(tmp_path / "photos", name.replace(".jpg", ".png"))
    index = image_tree(tmp_path / "photos")
    known = learned(Path("first"), index, True).tolist()
    assert known == [f'"{name.replace(".png", ".jpg")}"' in table for name in index.files]
    assert sum(known) == 10
    shutil.rmtree("photos")
    Path("before").rename("photos")
    (tmp_path / "photos" / "moved").mkdir()
    for name in NAMES[:14]:
        (tmp_path / "photos" / name).rename(tmp_path / "photos" / "moved" / f"new{name}")
    index = image_tree(tmp_path / "photos")
    index = replace(index, labels=np.zeros(20, np.int64), classes=("dog",))
    known = learned(Path("first"), index, True)
    assert known.tolist() == [f'"{name.split("/new")[-1]}"' in table for name in index.files]
    assert known.sum() == 10
    there, held_out = learned_labels.held_out_of(Path("first"), index, 0)
    assert there is None and len(held_out) == 2 and all(name.startswith("moved/new") for name in held_out)
    # They are no judges by their new names either.
    one, other = (index.take(np.arange(start, 20, 2)) for start in (0, 1))
    both = Images(one, labeled_split(one, "all"), other)
    left, _ = left_to_judge(both, Path("first"), True, ALONE)
    learned_there = int(known[1::2].sum())
    assert len(left.validation) == 10 - learned_there and learned_there > 0
    Path("second").mkdir()
    (warning,) = write_learned_labels(Path("second"), both, load_config("run.yaml", ["model.init=first"]))
    assert warning.startswith(f"{learned_there} of 10 validation images")
    assert Path("second/learned.csv").read_text().count("\n") == 1 + 10 + learned_there
    # Of other photos a few have such a length by chance, but not the file name with it.
    few = index.take(np.flatnonzero(known)[:4])
    assert not learned(Path("first"), few, True).any()
    few = replace(few, files=[name.replace("/new", "/") for name in few.files])
    assert learned(Path("first"), few, True).all()


def test_learned_labels_are_those_of_images_in_a_validation_folder(config, tmp_path):
    first, images = config(10)
    ours = [images.train.name(i) for i in images.split.indices]
    for i, name in enumerate(NAMES):
        with open(tmp_path / "photos" / name, "ab") as photo:
            photo.write(bytes(i))
    photos = replace(open_images(first, ALONE, validation=False), held_out=None)
    Path("first").mkdir()
    assert write_learned_labels(Path("first"), photos, first) == []
    # Other photos have the lengths of these: the learned ones lie where they were, or one of them is lost.
    judges = Path(shutil.copytree("photos", "val"))
    for i, name in enumerate(NAMES):
        (judges / name).rename(judges / f"other {i}.jpg")
    (tmp_path / "photos" / ours[4]).unlink()
    # An image that was not learned has the length of one that was.
    shutil.copy(tmp_path / "photos" / ours[0], tmp_path / "photos" / "zzz.jpg")
    second, warned = load_config("run.yaml", ["model.init=first", "criterion.supervised_epochs=0"]), []
    Path("second").mkdir()
    for moved in ([], ours[:4]):
        for name in moved:
            (tmp_path / "photos" / name).rename(judges / name)
        index = image_tree(tmp_path / "photos")
        both = Images(index, photos.split, image_tree(judges))
        left, count = left_to_judge(both, Path("first"), True, ALONE)
        assert len(left.validation) == 20 and count == 0 and not {*left.validation.files} & {*moved}
        warned += write_learned_labels(Path("second"), both, second)
        assert not Path("second/held_out.csv").exists()
        assert left_to_judge(both, Path("none"), True, ALONE) == (both, 0)  # nothing is known
    assert len(warned) == 1 and warned[0].startswith("4 of 24 validation images are labels that model.init")


def test_learned_labels_of_a_run_without_a_table_are_all_or_none(config):
    _, images = config(10)
    assert learned(Path("none"), images.train, True).all()
    plain, _ = config(10, "criterion.supervised_epochs=0")
    assert not learned(Path("none"), images.train, False).any()
    Path("learned.csv").write_text("file,label\n")  # of an earlier start, with other settings
    assert write_learned_labels(Path(), images, plain) == [] and not Path("learned.csv").exists()
    # Published weights have learned from none, whatever lies in the working directory.
    published, _ = config(10, "model.init=timm", "criterion.supervised_epochs=0")
    Path("learned.csv").write_text(f"file,label\n{NAMES[0]},dog\n")
    Path("new").mkdir()
    assert write_learned_labels(Path("new"), images, published) == []
    assert not Path("new/learned.csv").exists()
