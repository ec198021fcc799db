"""A run goes on when its standard output is lost, and no name in the data can end it or write the terminal's codes."""

import io
import os
import subprocess
import sys
from unittest import mock

import pytest

from pipelines.output import duration, say_line, show_progress


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
    """It is one write: lines of two threads must not run into each other."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    with mock.patch.object(stream, "write", wraps=stream.write) as write:
        say_line(name, stream)
    assert stream.buffer.getvalue().decode("latin-1") == f"{shown}\n"
    write.assert_called_once()


def test_show_progress_escapes_control_characters(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show_progress("a\x1b", 1, 1)
    assert capsys.readouterr().err == "\ra\\x1b: 1 of 1\n"


@pytest.mark.parametrize("lost", ["pipe", "disk", "both", "closed"])
def test_process_goes_on_without_its_standard_output(lost):
    """Its reader has ended (`| head`), its disk is full, or it was started without one (`>&- 2>&-`)."""
    program = (
        "from pipelines.output import say_line, show_progress\n"
        "for i in range(3): say_line(f'line {i}')\n"
        "show_progress('what', 1, 3)\nprint('more')"
    )
    reading, output = os.pipe()
    os.close(reading)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=full if lost == "disk" else output,
            stderr=full if lost == "both" else subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.closerange(1, 3) if lost == "closed" else None,
        )
    os.close(output)
    assert done.returncode == 0
    assert lost in ("both", "closed") or done.stderr.count("the output cannot be written any more") == 1


def test_duration_has_two_digits_or_whole_minutes():
    shown = ["0.21 s", "89 s", "2 min", "1 h 00 min", "2 h 05 min", "1,000 h 00 min"]
    assert [duration(seconds) for seconds in (0.2149, 89.4, 90, 3599, 7500, 3.6e6)] == shown
