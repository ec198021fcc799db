"""Bad input to `init`, `train`, `predict` and `suggest`: an exit code, what to do, and nothing half-written.

tests/pipelines/datasets/test_folders.py has the other faults of images and labels.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from fastsuncet import cli
from fastsuncet.commands.init import survey
from fastsuncet.commands.init.rules import Machine
from tests.support.pictures import cut_short, write_images

RUN = """\
data: {kind: csv, root: photos, csv: labels.csv, split: {kind: csv}, validation: null, backend: torchvision,
  augmentation: {size: 16}}
model: {name: resnet_tiny, hidden: 16, stem: cifar}
criterion: {temperature: 0.1, unsupervised_batch_size: 4, supervised_epochs: all, classes_per_batch: 2,
  supervised_imgs_per_class: 2}
optimization: {optimizer: adamw, steps: 1, lr: 0.001}
checkpoint: {export: []}
linear: {strength: 1}
"""
OWN = RUN.replace("root: photos", "root: own")
NAMES = [f"{i:02}.jpg" for i in range(12)]
ROWS = [f"{name},{('cat', 'dog')[i % 2]}" for i, name in enumerate(NAMES[:8])]
COMMANDS = {
    "init": "init photos --labels labels.csv --weights none --hours 0.1",
    "train": "train run.yaml",
    "predict": "predict run.yaml photos --output out.csv --page",
    "suggest": "suggest run.yaml --count 2 --output out.csv --page",
}
PHOTOS, LABELS, CONFIG = Path("photos"), Path("labels.csv"), Path("run.yaml")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Return a folder with photos, labels, a config and its run."""
    folder = tmp_path_factory.mktemp("sound")
    write_images(folder / PHOTOS, *NAMES)
    (folder / LABELS).write_text("\n".join(["file,label", *ROWS, ""]))
    (folder / CONFIG).write_text(RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train", "run.yaml"]) == 0
    return folder


@pytest.fixture
def here(sound, tmp_path, monkeypatch) -> Path:
    """Return a copy of it, in which a test can do damage; the speed of this machine is not measured."""
    monkeypatch.setattr(survey, "machine", lambda: Machine("cpu", "CPU", 1, 16e9, 4, 1e11))
    shutil.copytree(sound, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def files(folder: Path) -> dict[str, bytes | None]:
    """Return what is in a folder, without what is kept whole between commands: indices, classifiers, a pack."""
    kept = re.compile(r"runs(/indices.*|/run(/\.running|/classifier.*)?)?|out\.csv\.part-.*")
    names = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {
        name: path.read_bytes() if path.is_file() else None
        for name, path in names.items()
        if not kept.fullmatch(name)
    }


def table(*rows: str) -> Callable[[], object]:
    return lambda: LABELS.write_text("".join(f"{row}\n" for row in rows))


def each_photo(change: Callable[[Path], object], names: list[str] = NAMES) -> Callable[[], object]:
    return lambda: [change(PHOTOS / name) for name in names]


def empty(path: Path) -> None:
    path.write_bytes(b"")


class Case(NamedTuple):
    """A change of the sound folder, and for each command (all that are not named: `others`) its code and its words."""

    change: Callable[[], object]
    others: tuple[int, str] | None = None
    init: tuple[int, str] | None = None
    train: tuple[int, str] | None = None
    predict: tuple[int, str] | None = None
    suggest: tuple[int, str] | None = None


GOOD = (0, "")
HEAD = "file,label"
CASES = {
    "a label for a missing file": Case(table(HEAD, *ROWS, "gone.jpg,cat"), (3, "line 10: no image gone.jpg")),
    "one class": Case(
        table(HEAD, "00.jpg,cat", "01.jpg,cat"), suggest=GOOD,
        init=(2, "all labels are of one class"), predict=(3, "a classifier needs two or more"),
        train=(2, "only 1 class has a labeled image: label images of another")),
    "a class with one label": Case(table(HEAD, *ROWS, "08.jpg,owl"), GOOD),
    "a folder for the labels": Case(lambda: (LABELS.unlink(), LABELS.mkdir()), (3, "csv: Is a directory")),
    "no images": Case(each_photo(Path.unlink), (3, "holds no image (.bmp, .jpeg,")),
    "unreadable images": Case(
        each_photo(empty, NAMES[10:]), (3, "11.jpg: an empty file"), init=GOOD,
        suggest=(0, "skipped      2 images that cannot be decoded:\n  10.jpg: an empty file")),
    "images that end early": Case(
        each_photo(cut_short, NAMES[10:]), GOOD,  # the step of `train` reads none of them
        predict=(3, "11.jpg: "), suggest=(0, "skipped      2 images that cannot be decoded:\n  10.jpg: ")),
    "fewer images without a label than asked for, and a finished run": Case(
        each_photo(cut_short, NAMES[9:]), GOOD,
        train=(5, "training images were written again since this run was saved"),
        predict=(3, ".jpg: a truncated JPEG"),
        suggest=(3, "photos that can be read have no label; give --count 1")),
    "unreadable images that are not the run's": Case(
        lambda: (shutil.copytree(PHOTOS, "own"), CONFIG.write_text(OWN), empty(PHOTOS / NAMES[11])), GOOD,
        predict=(3, "11.jpg: an empty file\nRepair or remove them.\nOr leave them out: --skip-bad")),
    "only unreadable images": Case(
        each_photo(empty), (3, "11.jpg: an empty file"),
        init=(3, "none of the 12 images below photos can be read: 00.jpg (an empty file)")),
    "a folder of predict that is none": Case(
        lambda: (PHOTOS.rename("own"), CONFIG.write_text(OWN)), GOOD,
        init=(3, "no data folder"), predict=(3, "no data folder photos")),
    "a run of another network": Case(
        lambda: CONFIG.write_text(RUN.replace("resnet_tiny", "resnet18")), (2, "is not the network of"),
        init=GOOD, train=(5, "model.name: resnet_tiny in the checkpoint, resnet18 now")),
    "no run": Case(
        lambda: shutil.rmtree("runs"), (2, "/here/runs/run does not exist. An encoder is"), init=GOOD, train=GOOD),
    "an output that exists": Case(
        lambda: [Path(name).write_text("mine") for name in ("mine.yaml", "out.csv")],
        (2, "exists. Choose another name, or add --force"),
        init=(2, "mine.yaml exists. Choose another name, or remove it"), train=GOOD),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", CASES)
def test_bad_input_ends_with_its_code_its_words_and_nothing_half_written(name, command, here, capsys):
    case = CASES[name]
    if command == "train" and "run" not in name:
        shutil.rmtree("runs")
    case.change()
    before = files(here)
    code, words = getattr(case, command) or case.others
    assert cli.main(COMMANDS[command].split()) == code
    said = capsys.readouterr()
    assert words in said.out + said.err
    if code:
        assert "error: " in said.err and files(here) == before


@pytest.mark.slow
@pytest.mark.parametrize("command", [*COMMANDS, "data pack"])
@pytest.mark.parametrize(
    ("options", "words"), [("size=64k", "free some"), ("ro,size=64k", "You cannot write there")]
)
def test_bad_disk_ends_with_5(options, words, command, here, small_disk, monkeypatch, run_cli):
    # As under a quota: the disk is not known to be small before it is full.
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 60))
    disk = small_disk("size=64k")
    with pytest.raises(OSError, match="No space left"):
        (disk / "fill").write_bytes(bytes(1 << 20))
    small_disk(options)
    line = COMMANDS.get(command, "data pack run.yaml --output out.csv").replace("out.csv", f"{disk}/out.csv")
    line += {"init": f" --output {disk}/mine.yaml", "train": f" logging.folder={disk}/runs"}.get(command, "")
    said = run_cli(line, code=5)
    assert words in said and ("logging.folder" if command == "train" else "--output") in said
    assert list(files(disk)) == ["fill"]


@pytest.mark.slow
def test_suggest_writes_no_table_where_its_page_has_no_room(here, small_disk, run_cli):
    disk = small_disk("size=64k")
    (disk / "fill").write_bytes(bytes(60 << 10))
    assert "free some" in run_cli(f"suggest run.yaml --count 4 --output {disk}/out.csv --page", code=5)
    assert list(files(disk)) == ["fill"]


@pytest.mark.slow
def test_predict_continues_where_its_page_had_no_room(here, small_disk, run_cli, monkeypatch):
    disk = small_disk("size=256k")
    command = f"predict run.yaml photos --output {disk}/out.csv --page"
    with monkeypatch.context() as patch:
        patch.setattr("fastsuncet.commands.predict.prediction_page", lambda *_: "x" * (1 << 20))
        assert "free some" in run_cli(command, code=5) and not (disk / "out.csv").exists()
    assert "continuing after" in run_cli(command) and list(files(disk)) == ["out.csv", "out.html"]


@pytest.mark.slow
def test_predict_and_suggest_take_a_run_on_a_disk_that_cannot_be_written(here, small_disk, run_cli):
    run = shutil.copytree("runs/run", small_disk("size=4m") / "run")
    small_disk("ro,size=4m")
    assert "not kept     " in run_cli(f"predict {run} photos --output out.csv --page")
    assert Path("out.html").exists() and run_cli(f"suggest {run} --count 2 --output next.csv --page")
