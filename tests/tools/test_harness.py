"""What the bench tools share: turns, ratios, counts, the report, the exit codes; and every tool's --help."""

import io
import multiprocessing
import os
import queue
import runpy
import sys
import threading
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest
import torch

from pipelines.data_errors import DataError
from tests.support.ranks import start_forked
from tools.bench import harness
from tools.bench.dispatch_counter import Counter
from tools.bench.harness import ratios, show_target, time_in_turns

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [p for p in sorted(ROOT.glob("tools/**/*.py")) if "__main__" in p.read_text(encoding="utf-8")]


def ask_for_help(folder: Path) -> None:
    """Run each script with --help where its folder is not yet on the path, and no module of it was imported."""
    os.chdir(folder)
    elsewhere = [path for path in sys.path if path and Path(path).resolve() != ROOT]
    for script in SCRIPTS:
        sys.path[:], sys.argv, text = elsewhere, [str(script), "--help"], io.StringIO()
        for name in [name for name in sys.modules if name.partition(".")[0] == "tools"]:
            del sys.modules[name]
        with redirect_stdout(text), pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(str(script), run_name="__main__")
        assert "usage:" in text.getvalue(), script


@pytest.mark.slow
def test_every_tool_answers_help(tmp_path):
    """Each script runs from another folder as a user starts it."""
    assert len(SCRIPTS) == 6
    process = start_forked(ask_for_help, tmp_path)
    process.join()
    assert process.exitcode == 0


@pytest.fixture
def events(monkeypatch):
    """CUDA events on a clock that only work moves forward, in milliseconds."""
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at, self.waited = clock[0], False

        def synchronize(self):
            self.waited = True

        def elapsed_time(self, end):
            assert end.waited, "read before the device came to the second event"
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return clock


def test_time_in_turns_rotates_and_does_not_count_the_warmup(events, monkeypatch):
    calls = []
    monkeypatch.setattr(harness, "settle", lambda: calls.append("."))

    def work(name):
        calls.append(name)
        events[0] += 100.0 if calls.count(name) <= 2 else 1.0

    contenders = {name: lambda name=name: work(name) for name in "abc"}
    measure = partial(harness.seconds_of, device="cuda")
    found = time_in_turns(contenders, measure, rounds=3, discarded={"b": 1})
    assert "".join(calls) == "aabbcc" + ".a.bb.c" + ".bb.c.a" + ".c.a.bb"
    assert found == {name: pytest.approx([1e-3] * 3) for name in "abc"}
    assert harness.seconds_of(contenders["a"], "cuda", 20) == pytest.approx(1e-3)


def test_ratios_are_taken_within_each_round():
    assert ratios([2, 9, 4], [1, 3, 4]) == [2, 3, 1]


def test_target_is_met_by_the_median_in_the_direction_asked(capsys):
    show_target("x", [4, 6, 7], 5, at_least=True)
    show_target("x", [4, 6, 7], 5, at_least=False)
    first, second = capsys.readouterr().out.split("\n\n", 1)
    assert first == "met: x: 6 (4-7), target at least 5"
    assert second == "MISSED: x: 6 (4-7), target at most 5\n\n"


def test_counter_counts_waits_views_and_bytes():
    x, mask = torch.ones(1000), torch.ones(1000, dtype=torch.bool)
    with Counter() as counter:
        x.view(10, 100).add_(1)  # reads 4,000 bytes and writes 4,000; the view is free
    assert (counter.operators, counter.waits, counter.moved, counter.peak) == (1, 0, 8000, 0)
    with Counter() as counter:
        y = x + x  # 8,000 read, 4,000 written and kept
        del y
    assert (counter.operators, counter.moved, counter.peak, counter.now) == (1, 12000, 4000, 0)
    for question in (lambda: x.sum().item(), lambda: x[mask], lambda: bool(x[0] > 0), lambda: x.nonzero()):
        with Counter() as counter:
            question()
        assert counter.waits == 1


def test_batches_prepared_before_a_turn_are_not_counted(monkeypatch):
    """A source needs 10 ms a batch and keeps up to 4 ready."""
    monkeypatch.setattr(harness, "settle", lambda: time.sleep(0.05))
    ready: queue.Queue[None] = queue.Queue(maxsize=4)

    def prepare():
        while True:
            time.sleep(0.01)
            ready.put(None)

    threading.Thread(target=prepare, daemon=True).start()
    wall, cpu = harness.wall_and_cpu_in_turns({"a": ready.get, "b": lambda: None}, 12, rounds=3, discarded=6)
    assert min(wall["a"]) > 0.115 > max(wall["b"]) and cpu["a"]


def test_cpu_time_is_that_of_workers_too_and_a_turn_waits_until_they_rest():
    """A worker computes for half a second: that belongs to no turn."""
    worker = multiprocessing.get_context("fork").Process(target=_compute, daemon=True)
    before = harness.cpu_seconds()
    worker.start()
    (turn,) = time_in_turns({"a": lambda: None}, lambda _: harness.cpu_seconds(), 1, discarded={"a": 1})["a"]
    assert turn - before > 0.4
    worker.kill()


def _compute() -> None:
    while time.process_time() < 0.5:
        pass
    time.sleep(60)


def test_run_prints_an_error_as_one_line_with_its_exit_code(capsys):
    def wrong() -> int:
        raise DataError("no data folder nowhere")

    for main, code in ((lambda: 1, 1), (wrong, 3)):
        with pytest.raises(SystemExit, match=f"^{code}$"):
            harness.run(main)
    assert capsys.readouterr().err == "error: no data folder nowhere\n"
