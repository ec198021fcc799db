"""Every test of a command runs in an empty folder, and as if nothing had launched it."""

from pathlib import Path

import PIL.Image
import pytest

from fastsuncet import cli
from fastsuncet.evaluation import confusion
from fastsuncet.evaluation.finetuning import fit
from tests.support.chromium import CHROMIUM, Chromium
from tests.support.exports import save_run

COLORS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_ARRAY_TASK_ID", "FASTSUNCET_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True, scope="package")
def _less_work():
    """Draw only the first confusion matrix, which takes most of a second, and take statistics from two batches.

    tests/evaluation/test_confusion.py draws all kinds.
    """
    drawn, draw = [], confusion.confusion_picture

    def first(*given) -> bytes:
        drawn.extend([] if drawn else [draw(*given)])
        return drawn[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(confusion, "confusion_picture", first)
        patch.setattr(fit, "BATCHES", 2)
        yield


@pytest.fixture
def run_cli(capsys):
    """A function that runs a command line, which must end with `code`; only `words`, after it, can have spaces.

    Returns what is printed on stdout, with nothing on stderr, and for a failure what is printed on stderr.
    """

    def run(line: str, *words: object, code: int = 0) -> str:
        capsys.readouterr()
        ended = cli.main([*line.split(), *map(str, words)])
        printed = capsys.readouterr()
        assert ended == code and (code or not printed.err), printed.err
        return printed.err if code else printed.out

    return run


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One Chromium for all pages: a test sets the size of its window."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with Chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def picture():
    """A function that writes a picture of one color, with noise that differs from picture to picture."""

    def write(path: Path, color: str, number: int) -> None:
        noise = PIL.Image.effect_noise((40 + number, 50), 40).convert("RGB")
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.blend(noise, PIL.Image.new("RGB", noise.size, COLORS[color]), 0.6).save(path)

    return write


@pytest.fixture
def labels(tmp_path):
    """A function that writes the labels of `each` pictures of some colors, or the text that it is given."""

    def write(each: int = 6, classes: tuple[str, ...] = tuple(COLORS), *, text: str = "") -> None:
        lines = [f"{color}{i}.png,{color}" for color in classes for i in range(each)]
        (tmp_path / "labels.csv").write_text(text or "\n".join(["file,label", *lines]))

    return write


@pytest.fixture
def run(tmp_path, picture, labels) -> Path:
    """A run of a tiny encoder on 18 labeled pictures of three colors, and 12 unlabeled ones in a tree."""
    for color in COLORS:
        for i in range(6):
            picture(tmp_path / "mine" / f"{color}{i}.png", color, i)
        for i in range(4):
            picture(tmp_path / "photos" / f"part{i % 2}" / f"{color}{i}.png", color, 7 + i)
    labels()
    data = [f"data.root={tmp_path / 'mine'}", f"data.csv={tmp_path / 'labels.csv'}", "data.train=null"]
    # DALI begins in more time than these images take.
    data += ["data.backend=torchvision", "data.decode_threads=1"]
    kind = ["data.kind=csv", "data.split.kind=csv", "data.split.file=null", "data.split.sha256=null"]
    alone = ["data.validation=null", "evaluation.knn_every_epochs=null", "evaluation.knn_k=3"]
    tiny = ["model.name=resnet_tiny", "data.augmentation.size=32", "linear.strength=0.1"]
    save_run(tmp_path / "run", *tiny, *data, *kind, *alone)
    (tmp_path / "run" / "learned.csv").write_text("file,label\n")  # none of them
    return tmp_path / "run"
