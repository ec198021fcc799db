"""`fastsuncet init`: its rules on many situations, folders of every kind, and bad input."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from fastsuncet.commands import init as command
from fastsuncet.commands.api import init_config
from fastsuncet.commands.init import rules, survey
from fastsuncet.commands.init.rules import Machine, Survey, Weights, choose
from fastsuncet.config import load_config
from fastsuncet.data.dataset import open_images
from fastsuncet.errors import ConfigError
from fastsuncet.models import timm_backbone
from fastsuncet.models.resnet import build_model
from tests.support.archives import tar_of
from tests.support.colors import ALONE
from tests.support.exports import save_run
from tests.support.pictures import write_image, write_images

TIMM = Weights("timm")
CPU = Machine("cpu", "CPU", 1, 16e9, 4, 1e11)
SLOW = Machine("cpu", "CPU", 1, 4e9, 1, 1e10)
GPU = Machine("cuda", "GPU of 24 GB", 1, 24e9, 16, 2e13)
H200, EIGHT = Machine("cuda", "H200", 1, 141e9, 16, 1e14), Machine("cuda", "H200", 8, 141e9, 128, 1e14)

# kind, images, labels, classes, shorter side | machine | hours | weights | method
SITUATIONS = [
    ("csv 12 4 2 800", CPU, 1, None, "alone"),
    ("csv 12 4 2 800", EIGHT, 1, TIMM, "alone"),
    ("images 12 0 0 800", SLOW, 0.1, None, "SimCLR, without"),
    ("image_folder 100 100 10 500", GPU, 1, TIMM, "alone"),
    ("csv 500 40 20 224", CPU, 1, TIMM, "alone"),
    ("csv 20000 260 10 224", H200, 4, None, "SimCLR + cross"),
    ("csv 20000 250 10 224", H200, 4, None, "SimCLR + SuNCEt"),
    ("csv 3068 300 10 224", SLOW, 0.2, None, "alone"),
    ("csv 3068 0 0 3000", CPU, 10, None, "SimCLR, without"),
    ("image_folder 5000 5000 5 64", CPU, 2, None, "alone"),
    ("csv 10000 30 30 300", GPU, 4, None, "SimCLR + SuNCEt"),
    ("csv 10000 900 30 300", GPU, 4, TIMM, "SimCLR + cross"),
    ("csv 50000 500 10 32", GPU, 4, None, "SimCLR + cross"),
    ("csv 50000 500 10 32", SLOW, 1, TIMM, "alone"),
    ("images 80000 0 0 500", EIGHT, 8, TIMM, "SimCLR, without"),
    ("csv 99999 1000 500 500", EIGHT, 8, TIMM, "SimCLR + SuNCEt"),
    ("image_folder 1281167 128116 1000 400", EIGHT, 24, None, "SimCLR + SuNCEt"),
    ("image_folder 1281167 1281167 1000 400", EIGHT, 24, None, "alone"),
    ("csv 1281167 12811 1000 400", H200, 72, None, "SimCLR + SuNCEt"),
    ("csv 1281167 12811 1000 400", CPU, 1, TIMM, "alone"),
    ("csv 1300000 8000 2000 400", EIGHT, 100, TIMM, "SimCLR + SuNCEt"),
]


def surveyed(words: str, **more) -> Survey:
    kind, *numbers = words.split()
    data = {"kind": kind, "root": "photos"} | ({"csv": "l.csv"} if kind == "csv" else {})
    return Survey(data, *map(int, numbers), read_seconds=0.01, **more)


@pytest.mark.parametrize(("words", "machine", "hours", "weights", "method"), SITUATIONS)
def test_init_rules_give_a_sound_config(words, machine, hours, weights, method):
    """The checks are those of `train --dry-run`, with as many processes as the machine has GPUs."""
    s = surveyed(words)
    plan = choose(s, machine, hours, weights)
    text = command.written(plan, s, hours)
    config = command.check(text, Path("mine.yaml"), s, machine.count)
    lines = text.splitlines()
    assert method in plan.method and len(lines) <= 40 and max(map(len, lines)) <= 120
    assert plan.hours <= 1.01 * hours or any("takes longer" in note for note in plan.notes)
    # Small data: AdamW unless the batch is one of a thousand images, crops from a fifth.
    assert config.data.augmentation.crop_scale == (0.2, 1.0)
    assert (config.data.augmentation.blur == 0) == (config.data.augmentation.size <= 64)
    unlabeled = config.criterion.unsupervised_batch_size
    assert (config.optimization.optimizer == "lars") == (unlabeled >= 1024 and weights is None)
    assert config.finetune.batch_size <= max(machine.count, s.labels or 4096)
    assert (config.evaluation.knn_every_epochs is None) == (config.data.validation is None)
    large = machine.device == "cuda" and (weights is not None or s.images >= 20_000)
    assert config.model.name == ("resnet50" if large else "resnet18")
    reasons = [line for line in lines if line.endswith(":") or " # " in line or line.startswith("#")]
    assert len(lines) - len(reasons) <= 8


def test_init_rules_hold_labels_out_where_there_are_enough():
    def validation(words: str, **more):
        choices = choose(surveyed(words, **more), CPU, 1, None).choices
        return next((c.value, c.reason.split()[0]) for c in choices if c.key == "data.validation")

    assert [validation(f"csv 2000 {n} 10 64") for n in (99, 100)] == [(None, "too"), (0.2, "a")]
    assert validation("csv 2000 500 10 64", validation="val") == ("val", "never")
    assert validation("csv 2000 400 90 64") == (None, "too")


def test_init_rules_take_fewer_updates_rather_than_more_hours():
    plans = [choose(surveyed("csv 2000 100 10 224"), SLOW, hours, None) for hours in (0.1, 0.01)]
    assert 100 < plans[0].updates < 300 and plans[0].hours <= 0.1 and plans[1].updates == 100
    assert [len(plan.notes) for plan in plans] == [1, 2] and "updates are few" in plans[0].notes[0]


@pytest.fixture
def photos(tmp_path, monkeypatch) -> Path:
    """Twelve photos in a flat folder, eight of them labeled; a machine whose speed is not measured."""
    monkeypatch.setattr(survey, "machine", lambda: CPU)
    names = [f"{i}.jpg" for i in range(12)]
    write_images(tmp_path / "photos", *names)
    rows = "".join(f"{name},{('cat', 'dog')[i % 2]}\n" for i, name in enumerate(names[:8]))
    (tmp_path / "labels.csv").write_text(f"file,label\n{rows}")
    return tmp_path / "photos"


@pytest.fixture
def init(photos, run_cli):
    """A function that runs `init` on the photos, which must end with `code`, and returns what it prints."""
    return lambda words, **code: run_cli(f"init photos {words} --weights none --hours 0.1", **code)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("flat", "kind: images"),
        ("csv", "kind: csv"),
        ("classes", "train: ."),
        ("split", "validation: val"),
        ("shards", "pack: ../photos"),
        ("labeled shards", "kind: image_folder"),
    ],
)
def test_init_writes_a_config_that_passes_a_dry_run(photos, init, run_cli, monkeypatch, layout, expected):
    """It lies in another folder than the one that the command is started in, and than the images.

    A run reads the index that init has kept; it scans no image again.
    """
    labels = "--labels labels.csv" if layout == "csv" else ""
    if layout == "csv":  # names files from `photos` on, whatever its folders are
        os.renames(photos / "11.jpg", photos / "train" / "x" / "11.jpg")
    if layout in ("classes", "split"):
        for i, path in enumerate(sorted(photos.glob("*.jpg"))):
            part = ("train", "train", "val")[i // 2 % 3] if layout == "split" else "."
            write_image(photos / part / ("cat", "dog")[i % 2] / path.name)
            path.unlink()
    if "shards" in layout:
        content = [(path.name, path.read_bytes()) for path in sorted(photos.glob("*.jpg"))]
        if layout != "shards":
            content += [(f"{name[:-4]}.cls", b"%d" % (i % 2)) for i, (name, _) in enumerate(content)]
        for path in photos.glob("*.jpg"):
            path.unlink()
        tar_of(photos / "a.tar", *sorted(content))
    said = init(f"{labels} --output configs/mine.yaml")
    assert "next     fastsuncet train configs/mine.yaml" in said and "machine  1 x CPU" in said
    labeled = "predict configs/mine.yaml " + ("FOLDER" if layout == "labeled shards" else "photos")
    then = "suggest configs/mine.yaml" if layout in ("flat", "shards") else labeled
    assert f"then     fastsuncet {then} --output " in said
    assert expected in Path("configs/mine.yaml").read_text()
    config = load_config("configs/mine.yaml")
    assert (config.data.split.kind == "none") == (layout in ("flat", "shards"))
    with monkeypatch.context() as patch:
        for scan in ("folders.with_headers", "pack.scan_shard"):
            patch.setattr(f"pipelines.datasets.{scan}", None)
        images = open_images(config, ALONE, validation=False)
        assert len(images.train) == (8 if layout == "split" else 12) and images.train.upright
    run_cli("train configs/mine.yaml --dry-run data.backend=torchvision")
    if "shards" in layout:  # which can change, and then have another index
        tar_of(photos / "a.tar", *sorted(content)[2:])
    init(f"{labels} --output configs/again.yaml")


def test_class_folders_are_several_and_no_split(tmp_path):
    for i, names in enumerate((["a/0.jpg"], ["train/0.jpg", "val/0.jpg"])):
        assert survey._class_folders(write_images(tmp_path / str(i), *names)) is None


def test_init_names_what_it_leaves_out(photos, init):
    (photos / "broken.jpg").write_bytes(b"nothing")
    (photos / "live.heic").write_text("")
    with open("labels.csv", "a") as table:
        table.write("8.jpg,Dog\n9.jpg,\u00e9\n10.jpg,e\u0301\n")
    said = init("--labels labels.csv")
    assert "note     10 labeled images are copies: 1.jpg (dog) of 0.jpg (cat), 10.jpg" in said
    assert "1 .heic files below photos are not read" in said
    assert "bad      1 file cannot be read: broken.jpg (not an image in a format that is read" in said
    text = "classes that differ only in upper and lower case, or in the Unicode form: "
    assert f"note     {text}Dog, dog, e\u0301, \u00e9. Are they one?" in said
    assert "fastsuncet predict mine.yaml photos --output predictions.csv --page --skip-bad" in said
    assert load_config("mine.yaml").data.bad_images == 1


def test_init_refuses_before_it_times_the_machine_and_writes_nothing(photos, run_cli, monkeypatch):
    """tests/commands/test_bad_inputs.py has wrong photos and labels."""
    monkeypatch.setattr(survey, "machine", None)
    Path("loop").symlink_to("loop")
    for words, code, said in (
        ("--output mine.txt", 2, "must end in .yaml"),
        ("--output loop/mine.yaml", 5, "loop/mine.yaml cannot be written: "),
        ("--hours 0", 2, "--hours must be a number above 0"),
        ("--hours nan", 2, "--hours must be a number above 0"),
        ("--weights resnet_tiny", 2, "no published weights of resnet_tiny"),
    ):
        assert said in run_cli(f"init photos --weights none {words}", code=code)
    for i in range(10):
        (photos / f"{i}.jpg").write_bytes(b"")
    assert "2 usable images are too few" in run_cli("init photos --weights none", code=2)
    assert not Path("mine.yaml").exists()


def test_init_weights(photos, monkeypatch, run_cli):
    """Published weights by default; from scratch, with the reason, where they cannot be had."""
    about = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}
    monkeypatch.setattr(timm_backbone, "published", lambda name: ({}, about))
    photo = write_image(photos / "0.jpg", 300, 200)
    for i in range(1, 12):
        (photos / f"{i}.jpg").write_bytes(photo.read_bytes())
    run_cli("init photos --labels labels.csv")
    config = load_config("mine.yaml")
    assert (config.model.name, config.model.init) == ("resnet18", "timm")
    run_cli("init photos --weights test_resnet --output b.yaml")
    config = load_config("b.yaml")
    assert (config.model.name, config.data.augmentation.std) == ("timm/test_resnet", (0.2, 0.2, 0.2))
    why = "timm's published weights of resnet18 cannot be downloaded"
    offline = ConfigError(f"model.init: {why}: OSError: x\nConnect")
    monkeypatch.setattr(timm_backbone, "published", mock.Mock(side_effect=offline))
    note = f"note     the network starts from scratch, which as a rule costs accuracy: {why}\n"
    assert note in run_cli("init photos --output c.yaml")
    assert load_config("c.yaml").model.init is None and f"from scratch: {why}\n" in Path("c.yaml").read_text()


@pytest.mark.parametrize(
    ("held_out", "kept"),
    [
        ("1.jpg,dog", "../runs/mine/held_out.csv"),
        ("1.jpg,hound\ngone.jpg,cat\n9.jpg,cat", "again-held_out.csv"),  # a class, a photo, a label have gone
        ("gone.jpg,cat\nlost.jpg,cat\n1.jpg,dog", None),  # of other photos
        ("", None),
        ("dog/1.jpg,dog", "../runs/mine/held_out.csv"),
    ],
)
def test_init_goes_on_from_a_run_with_its_size_and_the_labels_it_held_out(photos, run_cli, held_out, kept):
    folders = held_out.startswith("dog/")
    for path in sorted(photos.iterdir()):
        write_image(photos / ("cat", "dog")[int(path.stem) % 2] / path.name if folders else path, 300, 200)
        if folders:
            path.unlink()
    save_run(Path("runs/mine").absolute(), "model.name=resnet_tiny", "data.augmentation.size=48")
    table = Path("runs/mine/held_out.csv").absolute()
    if held_out:
        table.write_text(f"file,label\n{held_out}\n")
    Path("b").mkdir()
    # In so short a time no machine makes the updates with larger views.
    command = "init photos --weights runs/mine --hours 0.000001 --output b/again.yaml"
    command += " --labels labels.csv" * (not folders)
    assert "resnet_tiny, from runs/mine, " in run_cli(command)
    config, text = load_config("b/again.yaml"), Path("b/again.yaml").read_text()
    assert (f"validation: {kept}" in text) == bool(kept)
    assert (config.data.validation is None) == (kept is None)
    left = 12 - bool(kept)  # what is held out is none of the images to train on
    assert f": {left} images, {left if folders else 8 - bool(kept)} labels, " in text
    assert config.data.augmentation.size == 48 and config.model.init == str(table.parent)
    plan = run_cli("train b/again.yaml --dry-run data.backend=torchvision")
    assert ("without 1 validation images" in plan) == bool(kept)
    if kept == "again-held_out.csv":
        run_cli(command, code=2)
        Path("b/again.yaml").unlink()
        assert "b/again-held_out.csv exists" in run_cli(command, code=2)
        with pytest.raises(ConfigError, match="pass output"):
            init_config("photos", "labels.csv", weights="runs/mine")


def test_init_holds_out_labels_that_the_weights_have_not_learned(photos, run_cli, monkeypatch):
    """None of a class that has no other label."""
    monkeypatch.setattr(rules, "HOLD_OUT_FROM", 8)
    save_run(Path("runs/mine").absolute(), "model.name=resnet_tiny", "data.augmentation.size=48")
    Path("runs/mine/learned.csv").write_text("file,label\n0.jpg,cat\n1.jpg,dog\n2.jpg,cat\n")
    write_images(photos, *(f"{i}.jpg" for i in range(12, 16)))
    with open("labels.csv", "a") as table:
        table.write("".join(f"{i}.jpg,{'bird' if i == 15 else 'dog'}\n" for i in range(8, 16)))
    command = "init photos --labels labels.csv --weights runs/mine"
    note = "note     no label of these classes is held out, so accuracies say nothing of them: "
    assert f"{note}bird\n" in run_cli(command)
    assert load_config("mine.yaml").data.validation == str(Path("mine-held_out.csv").absolute())
    names = [line.split(",")[0] for line in Path("mine-held_out.csv").read_text().splitlines()[1:]]
    assert 3 <= len(names) <= 4 and not {"0.jpg", "1.jpg", "2.jpg", "15.jpg"} & {*names}
    # Of a class that the run holds out entirely there is none to train on.
    table = Path("runs/mine/held_out.csv")
    table.write_text("file,label\n15.jpg,bird\n")
    assert f"{note}cat, dog\n" in run_cli(f"{command} --output again.yaml")
    assert load_config("again.yaml").criterion.classes_per_batch == 2
    run_cli("train again.yaml --dry-run data.backend=torchvision")
    table.write_text("\n".join(line for line in Path("labels.csv").read_text().split() if "cat" not in line))
    assert "all labels that are not held out are of one class" in run_cli(
        f"{command} --output b.yaml", code=2
    )


def test_init_says_to_check_the_images_where_others_are_in_the_kept_index(photos, init, run_cli):
    init("--labels labels.csv")
    write_images(photos, "new.jpg")
    with open("labels.csv", "a") as table:
        table.write("new.jpg,dog\n")
    (photos / "11.jpg").unlink()
    why = "2 images came or went since the kept index was made"
    said = init("--labels labels.csv --output again.yaml")
    assert f"next     fastsuncet data check again.yaml  # {why}\nthen " in said
    run_cli("data check again.yaml data.backend=torchvision")
    run_cli("train again.yaml --dry-run data.backend=torchvision")


def test_machine_times_a_step(monkeypatch):
    monkeypatch.setattr(survey, "pick_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(survey, "build_model", lambda name: build_model("resnet_tiny"))
    found = survey.machine()
    assert found.device == "cpu" and 1e8 < found.macs_per_second < 1e14 and found.memory > 1e9


def test_machine_whose_gpu_torch_cannot_use_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # of a driver that is too old
    with pytest.raises(ConfigError, match="driver: update it"):
        survey.machine()
