"""Every data.kind from the config to its images, and errors that name the key, its line and the fix."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastsuncet import cli
from fastsuncet.commands.data_check import check_config
from fastsuncet.config import ConfigErrors, load_config
from fastsuncet.data.dataset import Images, open_images
from fastsuncet.data.paired_stream import views
from pipelines.data_errors import BadImage, DataError
from pipelines.datasets.index import load_index
from pipelines.output import say_once
from tests.support.archives import tar_of
from tests.support.colors import ALONE
from tests.support.pictures import write_image, write_images


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("""\
data:
  kind: images
  root: tree
  validation: null
  backend: torchvision
criterion: {temperature: 0.1, unsupervised_batch_size: 2}
optimization: {steps: 1, lr: 1.0}
""")
    write_images(tmp_path / "tree", "1.jpg", "x/2.png", "x/y/3.jpg")
    return tmp_path


def opened(*overrides: str, validation: bool = False) -> Images:
    return open_images(load_config("run.yaml", overrides), ALONE, validation=validation)


def test_images_are_any_tree_without_labels(here, capsys):
    train = opened().train
    assert list(train.files) == ["1.jpg", "x/2.png", "x/y/3.jpg"] and train.classes == ()
    assert train.labels.tolist() == [-1] * 3 and train.root == here / "tree"
    assert list(opened("data.train=x", "data.index=i.npz").train.files) == ["2.png", "y/3.jpg"]
    with pytest.raises(DataError, match=r"i\.npz was made with data\.exif_orientation=true: set that, or"):
        opened("data.train=x", "data.index=i.npz", "data.exif_orientation=false")
    with pytest.raises(ConfigErrors, match="an evaluation needs labels, and images reads none"):
        opened(validation=True)
    check_config(load_config("run.yaml"))  # the same kept index
    assert cli.main(["train", "run.yaml", "--dry-run", "--show-config"]) == 0
    out = capsys.readouterr().out
    assert out.index("run  ") < out.index("steps  ") < out.index("\n  temperature: 0.1\n")


def labeled_tree(here: Path) -> list[str]:
    """Write ten cats and five dogs, ten and five of them in labels.csv, and three without a label."""
    names = [f"{name}{i}.jpg" for name, count in (("cat", 10), ("dog", 5), ("none", 3)) for i in range(count)]
    write_images(here / "flat", *names)
    (here / "labels.csv").write_text("file,label\n" + "".join(f"{n},{n[:3]}\n" for n in names[:15]))
    return ["data.kind=csv", "data.root=flat", "data.csv=labels.csv", "data.split.kind=csv"]


def test_validation_is_held_out_of_the_labels_by_class(here):
    """It is the same for a command that evaluates and one that trains, and its images are trained on nowhere."""
    csv = labeled_tree(here)
    images = opened(*csv, "data.validation=0.2", validation=True)
    assert np.bincount(images.validation.labels).tolist() == [2, 1]
    names = {*images.train.files, *images.validation.files}
    assert (len(images.train), len(images.split.indices), len(names)) == (15, 12, 18)
    assert all(images.train.labels[images.split.indices] >= 0) and images.split.per_class.tolist() == [8, 4]
    assert images.fingerprint() == opened(*csv, "data.validation=0.2").fingerprint()
    other = opened(*csv, "data.validation=0.2", "data.split.kind=bernoulli", "data.split.fraction=0.5")
    assert len(other.train) > 15 and "validation images" in other.split.source


def test_validation_by_a_table_and_by_a_folder_elsewhere(here, capsys):
    csv = labeled_tree(here)
    (here / "check.csv").write_text("file,label\ndog4.jpg,dog\nnone1.jpg,cat\n")
    images = opened(*csv, "data.validation=check.csv", validation=True)
    assert list(images.validation.files) == ["dog4.jpg", "none1.jpg"]
    assert images.validation.labels.tolist() == [1, 0]
    assert len(images.train) == 16 and len(images.split.indices) == 14
    (here / "flat" / "none1.jpg").write_bytes(b"")
    bad = (*csv, "data.validation=check.csv", "data.bad_images=1")
    assert len(opened(*bad).train) == 16  # a command that measures nothing goes on
    assert "an evaluation will refuse validation images" in capsys.readouterr().out
    with pytest.raises(BadImage, match=r"none1\.jpg: an empty file"):
        opened(*bad, validation=True)
    write_images(here / "flat", "none1.jpg")
    write_images(here / "elsewhere", "dog/1.jpg", "cat/2.jpg", "cat/3.jpg")
    images = opened(*csv, f"data.validation={here}/elsewhere", validation=True)
    assert images.validation.labels.tolist() == [0, 0, 1] and len(images.train) == 18


@pytest.mark.parametrize(
    ("validation", "said"),
    [
        ("check.csv", "label 'cow' is not one of the 2 classes"),
        (
            "held_out.csv",
            "fits to NAME-held_out.csv. To evaluate the run of this config, set data.validation to",
        ),
        ("0.6", "dog: no labeled image would be left to train on"),
        ("gone.csv", "cannot read the labels"),
    ],
)
def test_validation_that_is_refused_names_its_key(here, validation, said):
    csv = [*labeled_tree(here), "data.bad_images=4"]
    for name in ("dog0", "dog1", "dog2", "dog3"):
        (here / "flat" / f"{name}.jpg").write_bytes(b"")
    (here / "config.yaml").touch()  # HERE is a run's folder
    for name in ("check.csv", "held_out.csv"):
        (here / name).write_text("file,label\ncat0.jpg,cow\n")
    with pytest.raises(DataError) as caught:
        opened(*csv, f"data.validation={validation}", validation=True)
    error = str(caught.value).replace(str(here), "HERE")
    assert said in error and f"data.validation={validation}" in error


def test_shards_need_no_root(here):
    content = write_image(here / "one.jpg").read_bytes()
    for i in range(2):
        members = [(f"{i}{j}.jpg", content) for j in range(2)]
        tar_of(here / "shards" / f"a-{i}.tar", *members, *((f"{i}{j}.cls", b"%d" % j) for j in range(2)))
    pack = ("data.root=null", "data.pack=shards/a-{0..1}.tar")
    assert opened(*pack, "data.kind=image_folder").train.labels.tolist() == [0, 1] * 2
    train = opened(*pack).train
    assert list(train.files) == ["a-0.tar/00.jpg", "a-0.tar/01.jpg", "a-1.tar/10.jpg", "a-1.tar/11.jpg"]
    assert train.labels.tolist() == [-1] * 4 and train.classes == ()
    (here / "labels.csv").write_text("file,label\na-1.tar/10.jpg,cat\n")
    images = opened(*pack, "data.kind=csv", "data.csv=labels.csv", "data.split.kind=csv")
    assert images.split.indices.tolist() == [2] and images.train.classes == ("cat",)
    kept = images.train.take(np.array([1, 3]))
    assert list(kept.files) == ["a-0.tar/01.jpg", "a-1.tar/11.jpg"] and kept.content(0) == content


def test_synthetic_images_depend_on_the_seed_alone():
    keys = ("data.kind=synthetic", "data.root=null", "data.validation=val", "data.synthetic.images=40")
    one, again = (opened(*keys, "data.split.kind=all", validation=True) for _ in range(2))
    assert one.train.pixels.shape == (40, 32, 32, 3) and len(one.validation) == 4
    assert one.fingerprint() == again.fingerprint() and np.bincount(one.train.labels).tolist() == [4] * 10
    assert not np.array_equal(one.train.pixels[:4], one.validation.pixels)
    # A change here is a change of every such run.
    assert one.train.pixels[3, 1, 2].tolist() == [155, 133, 79]
    assert opened(*keys, "data.split.kind=all", "meta.seed=1").fingerprint() != one.fingerprint()


@pytest.mark.parametrize(
    "method",
    [
        ("criterion.instance=swav", "swav.prototypes=10"),
        ("criterion.instance=paws", "criterion.supervised_epochs=all", "data.kind=image_folder",
         "data.split.kind=all", "criterion.classes_per_batch=2", "criterion.supervised_imgs_per_class=1"),
    ],
    ids=["swav", "paws"],
)  # fmt: skip
def test_views_with_multi_crop_are_two_large_and_several_small_crops(method):
    sizes = ("data.augmentation.size=28", "data.augmentation.crop_scale=[0.14, 1.0]", "swav.small_size=12")
    crops = (*method, "swav.small_crops=6", "data.augmentation.blur=0")
    large, other, *small = views(load_config("run.yaml", [*sizes, *crops]))
    assert large == other and (large.size, large.crop_scale) == (28, (0.14, 1.0))
    assert small == [replace(large, size=12, crop_scale=(0.05, 0.14))] * 6


@pytest.mark.slow
def test_a_run_is_not_continued_on_changed_images_unaware(here, capsys):
    def train(*overrides: str) -> tuple[int, str]:
        tiny = ("model.name=resnet_tiny", "data.augmentation.size=16", "meta.device=cpu")
        two = ("optimization.epochs=2", "optimization.steps=null", "checkpoint.every=1")
        say_once.cache_clear()  # as in a new process
        code = cli.main(["train", "run.yaml", *tiny, *two, *overrides])
        output = capsys.readouterr()
        return code, output.out + output.err

    assert train()[0] == 0
    for name in ("1.jpg", "x/y/3.jpg"):
        write_image(here / "tree" / name, quality=30)
    write_images(here / "tree", "new.jpg")
    code, output = train()
    assert code == 5 and "2 of 3 training images (1.jpg, x/y/3.jpg) were written again" in output
    assert f"{here}/tree has 1 new image, left out: `fastsuncet data check CONFIG` adds them" in output
    assert "data.changed_images=true" in output
    (kept,) = (here / "runs" / "indices").iterdir()
    assert len(load_index(kept, root=here / "tree").changed) == 2  # the other ranks read it
    code, output = train("data.changed_images=true")
    assert code == 0 and "note: 2 of 3 images changed since their index was made" in output


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda kept: kept.chmod(0o664), "other users can write it (mode 664)"),
        (lambda kept: os.chown(kept, 12345, -1), "it belongs to user 12345"),
        (lambda kept: os.truncate(kept, 10**6), "it has 1,000,000 bytes; at most 50,000 bytes were written"),
    ],
)
def test_kept_index_that_others_can_write_or_that_is_too_large_is_made_anew(
    here, monkeypatch, capsys, damage, why
):
    opened()
    (kept,) = (here / "runs" / "indices").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o644
    if "user" in why and os.geteuid():
        pytest.skip("only root can give a file away")
    damage(kept)
    monkeypatch.setattr("pipelines.datasets.index.MOST_BYTES", 50_000)
    for said in (f"note: the index runs/indices/{kept.name} is made anew, because {why}\n", ""):
        assert len(opened().train) == 3 and capsys.readouterr().out == said


@pytest.mark.parametrize("command", ["train run.yaml --dry-run", "data check run.yaml"])
@pytest.mark.parametrize(
    "make", [Path.touch, lambda path: (path.touch(), path.chmod(0o664)), lambda path: path.symlink_to(path)]
)
def test_file_that_is_no_index_is_never_replaced(here, capsys, command, make):
    make(here / "mine.csv")
    before = (here / "mine.csv").lstat().st_ino
    assert cli.main([*command.split(), "data.index=mine.csv"]) == 3
    out, error = capsys.readouterr()
    assert (here / "mine.csv").lstat().st_ino == before and "give data.index another name" in error
    assert "made anew" not in out and "decoded" not in out and "data.root" not in error


@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        ("data.root=gone", 3, "no data folder HERE/gone | command line: data.root=gone | data.train"),
        ("data.root=~nobody-here/x", 3, "no data folder ~nobody-here/x | command line: data.root=~nobody-here/x"),
        ("data.train=gone", 3, "no data folder HERE/tree/gone | run.yaml:3: data.root: tree"),
        ("data.validation=x", 3, "HERE/tree/x lie in the folder of the training images | validation=null"),
        ("data.kind=image_folder data.train=x/y", 3, "no class folders | data.kind: images"),
        ("data.kind=csv data.csv=no.csv", 3, "labels HERE/no.csv: No such | command line: data.csv=no.csv"),
        ("data.pack=no.tar", 3, "no pack or shard HERE/no.tar | command line: data.pack=no.tar"),
        ("data.index=tree", 2, "data.index | is a folder: give HERE/tree/index.npz | command line: data.index=tree"),
        (f"data.index={'x' * 256}", 5, "File name too long. A file cannot have this name there: set data.index"),
        ("data.max_megapixels=4e-5", 3, "3 images | 1.jpg: 8 x 6 pixels, more than data.max_megapixels"),
        ("criterion.supervised_epochs=all data.split.kind=all", 2,
         "supervised_epochs=all | must be 0 with data.kind: images, which reads no labels; use csv | be none with"),
        ("data.kind=digits data.root=null data.split.kind=stratified data.split.images=9999", 3,
         "to the 1442 images with a label, not 9999 | command line: data.split.images=9999"),
        ("data.kind=synthetic data.root=null data.synthetic.size=2048", 3,
         "too many to hold in memory | command line: data.synthetic.size=2048"),
    ],
)  # fmt: skip
def test_data_errors_name_the_key_its_place_and_the_fix(here, capsys, overrides, code, said):
    assert cli.main(["train", "run.yaml", "--dry-run", *overrides.split()]) == code
    error = capsys.readouterr().err.replace("\n      ", " ").replace(str(here), "HERE")
    assert all(words in error for words in said.split(" | ")), error


@pytest.mark.parametrize("option", ["--dry-run", "--dry-run=step"])
def test_dry_run_without_data_prints_the_plan_and_ends_with_the_error(here, option, capsys):
    assert cli.main(["train", "in1k_10pct", option, "data.root=gone"]) == 3
    out, error = capsys.readouterr()
    assert "steps    454 an epoch, 227,000 in all" in out and "nothing was trained" in out
    assert out.startswith("run  ") and "  temperature:" not in out
    assert "all checks passed" not in out and "Nothing was saved" not in out
    assert "The data were not checked. This is the plan for 1,281,167 images." in out
    assert error.startswith(f"error: no data folder {here}/gone/train")
    assert cli.main(["train", "run.yaml", option, "data.root=gone"]) == 3
    assert capsys.readouterr().out == ""  # nobody knows the number of these images
