"""A run goes on when its standard output is lost, and no name in the data can end it or write the terminal's codes."""

import io
import subprocess

import pytest

from fastsuncet.console import cli_command, say_line
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


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["pipe", "disk", "both"])
def test_training_goes_on_without_its_standard_output(lost, tmp_path):
    words = ["train", str(CONFIGS / "digits_demo.yaml"), *SMALL, *SHORT, f"logging.folder={tmp_path}"]
    with open("/dev/full", "w") as full, open(tmp_path / "errors", "w") as errors:
        process = subprocess.Popen(
            [*cli_command(), *words],
            stdout=full if lost == "disk" else subprocess.PIPE,
            stderr=subprocess.STDOUT if lost == "both" else errors,
            text=True,
        )
    if lost != "disk":
        assert process.stdout.readline().startswith("run ")
        process.stdout.close()  # as `| head -1` does
    assert process.wait(300) == 0, (tmp_path / "errors").read_text()
    notes = (tmp_path / "errors").read_text().count("the output cannot be written any more")
    assert notes == (0 if lost == "both" else 1)
    assert metrics(tmp_path / "digits_demo")[-1]["step"] == 3
