"""A run goes on when its standard output is lost, and no name in the data can end it or write the terminal's codes."""

import io
import multiprocessing
import os
import sys

import pytest

from fastsuncet.cli import main
from fastsuncet.console import say_line
from tests.support.ranks import PRELOADED
from tests.support.runs import CONFIGS, SMALL, metrics

SHORT = (
    "optimization.steps=3",
    "optimization.warmup=0",
    "logging.log_every=1",
    "criterion.unsupervised_batch_size=32",
)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\x1b[2J\x07\r.png", r"a\x1b[2J\x07\r.png"),  # clears the screen, rings, begins the line again
        ("gpj.\u202eexe\u2066", r"gpj.\u202eexe\u2066"),  # shown in reverse
        ("\udcff.png", r"\udcff.png"),  # a byte that is not UTF-8
        ("\u00e4\u20ac\u4e2d.png", "\u00e4\\u20ac\\u4e2d.png"),  # what Latin-1 lacks
        ("one\n\ttwo", "one\n\ttwo"),
    ],
)
def test_say_line_escapes_control_characters_and_what_the_log_cannot_hold(name, shown):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    say_line(name, stream)
    assert stream.buffer.getvalue().decode("latin-1") == f"{shown}\n"


def train(lost: str, folder: str, pipe: str) -> None:
    """Train as the command does, with a standard output that is lost."""
    errors = os.open(f"{folder}/errors", os.O_WRONLY | os.O_CREAT)
    output = os.open("/dev/full" if lost == "disk" else pipe, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output if lost == "both" else errors, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    words = ["train", str(CONFIGS / "digits_demo.yaml"), *SMALL, *SHORT, f"logging.folder={folder}"]
    sys.exit(main(words))


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["pipe", "disk", "both"])
def test_training_goes_on_without_its_standard_output(lost, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=train, args=(lost, str(tmp_path), str(tmp_path / "pipe")))
    process.start()
    if lost != "disk":
        with open(tmp_path / "pipe") as reader:
            assert reader.readline().startswith("run ")  # and closes it then, as `| head -1` does
    process.join(300)
    assert process.exitcode == 0, (tmp_path / "errors").read_text()
    notes = (tmp_path / "errors").read_text().count("the output cannot be written any more")
    assert notes == (0 if lost == "both" else 1)
    assert metrics(tmp_path / "digits_demo")[-1]["step"] == 3
