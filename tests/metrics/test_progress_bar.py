"""A bar at a terminal, lines in a log, and the numbers of the metrics in both."""

import fcntl
import io
import os
import pty
import re
import struct
import termios
import time
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest
import torch

from fastsuncet.distributed.place import Place
from fastsuncet.metrics import progress_bar as progress
from fastsuncet.metrics.progress_bar import ProgressBar
from fastsuncet.training.trainer import RunLogger
from tests.support.runs import small_config

LOSSES = ("nt_xent", "suncet")
RECORD = {"step": 120, "nt_xent": 5.43217, "suncet": 3.2, "lr": 0.48, "views_per_second": 12345.6}
RECORD |= {"data_wait": 0.031, "petaflops": 0.012345, "images": 999}


@pytest.fixture(autouse=True)
def no_batch_system(monkeypatch):
    for name in progress.BATCH:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def lines(*records: dict) -> list[str]:
    with redirect_stdout(io.StringIO()) as stream, redirect_stderr(stream):
        shown = ProgressBar(600, losses=LOSSES)
        for record in records:
            shown.update(record)
        shown.close()
    return stream.getvalue().splitlines()


def terminal(width: int, show, rows: int = 24) -> str:
    """Return what `show()` writes to a terminal `width` characters wide."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, width, 0, 0))
    with os.fdopen(slave, "w") as stream, redirect_stdout(stream), redirect_stderr(stream):
        show()
        stream.flush()
        time.sleep(0.01)
        written = os.read(master, 1 << 16)
    os.close(master)
    return written.decode()


def test_progress_line_has_the_time_and_every_number_of_its_record():
    whole, few = lines(RECORD, {"step": 121, "nt_xent": float("nan")})
    losses, speed = "nt_xent=5.4322 suncet=3.2000", "views_per_second=12345.6 data_wait=3.1%"
    assert whole.split()[2:] == f"step=120/600 {losses} lr=0.48 {speed} petaflops=0.01235 left=00:00".split()
    date, clock, *cells = few.split()
    assert abs(time.time() - time.mktime(time.strptime(f"{date} {clock}", "%Y-%m-%d %H:%M:%S"))) < 60
    assert cells == ["step=121/600", "nt_xent=nan", "left=00:00"]


def test_progress_time_left_follows_the_pace_and_forgets_the_start_up(monkeypatch):
    clock = iter([0.0, 1.0, 101.0, 111.0, 121.0, 131.0, 231.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    shown = lines(*({"step": step} for step in (0, 10, 20, 30, 40, 50)))
    # No update yet; 10 s each, with the start-up; 1 s each; the same; the same; 1 + (10 - 1) / 5 s each.
    assert [line.split("left=")[1] for line in shown] == ["?", "1:38:20", "09:40", "09:30", "09:20", "25:40"]


@pytest.mark.parametrize(("width", "fit"), [(160, 6), (100, 4), (40, 0)])
def test_progress_at_a_terminal_is_one_bar_that_fits_and_is_drawn_over(width, fit):
    def show():
        shown = ProgressBar(600, 100, LOSSES)
        shown.update(RECORD)
        shown.say("step 120: KNN 56.1 %")
        shown.update(RECORD | {"step": 240, "suncet": float("nan")})
        shown.close()

    written = terminal(width, show)
    frames = [frame.strip() for frame in re.split(r"[\r\n]+", written)]
    frame = next(frame for frame in frames if "240/600" in frame)
    assert frame.startswith("40%|")
    numbers = ("nt_xent 5.43", "suncet nan", "lr 0.48", "12,346 views/s", "wait 3%", "0.0123 PF")
    assert [text in frame for text in numbers] == [True] * fit + [False] * (6 - fit)
    assert all(len(frame) < width for frame in frames)
    assert "step 120: KNN 56.1 %" in frames
    # The line that was said, and the one the cursor ends on: all else is drawn over.
    assert written.count("\n") == 2


def test_progress_bar_moves_between_the_lines():
    def show():
        shown = ProgressBar(600, 100, LOSSES)
        time.sleep(0.6)  # it is drawn twice a second at most
        shown.at(103)

    assert "103/600 00:00<" in terminal(80, show)


@pytest.mark.parametrize(
    ("width", "rows", "name", "value"),
    [
        (120, 24, "SLURM_JOB_ID", "7"),
        (120, 24, "CI", "true"),
        (120, 24, "TERM", "dumb"),
        # `docker run -t` can give a terminal without a size, on which tqdm draws nothing.
        (0, 24, "TERM", "xterm"),
        (80, 0, "TERM", "xterm"),
    ],
)
def test_progress_in_a_batch_job_or_without_a_size_is_lines(monkeypatch, width, rows, name, value):
    monkeypatch.setenv(name, value)
    written = terminal(width, lambda: ProgressBar(600, 0, LOSSES).update(RECORD), rows)
    assert " step=120/600 nt_xent=5.4322" in written


def test_progress_is_printed_by_the_first_rank_only(tmp_path, capsys):
    task = SimpleNamespace(config=small_config(tmp_path), columns=("loss",), terms=LOSSES, steps=10)
    for rank in (0, 1, 2):
        with RunLogger(task, tmp_path, Place(rank, 3, torch.device("cpu"))) as logger:
            logger.say("suncet has plateaued")
    out, err = capsys.readouterr()
    assert out.count("suncet has plateaued") == 1 and err == ""
