"""A child that hangs, dies or is not wanted any more costs its time limit at most, and leaves no process."""

import os
import sys
import time

import pytest

from fastsuncet.tuning import processes
from tests.support.ranks import is_alive, run_ranks

pytestmark = pytest.mark.slow

HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
open(sys.argv[1] + ".pid", "w").write(str(child.pid))
time.sleep(99)
"""


def child(monkeypatch, code: str, seconds: float = 20) -> tuple[list[dict], str]:
    """Run a child that is this Python code; its arguments are the request's and the report's file."""
    command = lambda request, report: [sys.executable, "-c", code, str(request), str(report)]  # noqa: E731
    monkeypatch.setattr(processes, "child_command", command)
    return processes.run_child({"sides": {}}, os.environ, processes.limited(seconds, lambda: False))


def test_run_child_returns_the_whole_lines_of_its_report(monkeypatch):
    code = "import sys; open(sys.argv[2], 'w').write(open(sys.argv[1]).read() + '\\n{\"half')"
    assert child(monkeypatch, code) == ([{"sides": {}}], "ended with exit code 0: no output")


def test_run_child_ends_one_that_hangs_with_what_it_started(monkeypatch, tmp_path):
    code = HANGS.replace("sys.argv[1] + ", f"'{tmp_path}/child' + ")
    began = time.monotonic()
    assert child(monkeypatch, code, seconds=2) == ([], "was stopped, or took too long")
    assert time.monotonic() - began < 15
    assert not is_alive(int((tmp_path / "child.pid").read_text()))


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("import os; print('it is lost', flush=True); os.abort()", "was killed by SIGABRT: it is lost"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL: no output"),
        ("raise MemoryError('too large')", "ended with exit code 1: MemoryError: too large"),
        # As torch words it, whose last line says how to build torch.
        (
            "raise RuntimeError('CUDA error: busy\\nCUDA kernel errors might be reported later\\nCompile with `DSA`')",
            "ended with exit code 1: RuntimeError: CUDA error: busy",
        ),
        (
            "import os; print('  what():  CUDA error: lost\\nException raised from a frame', flush=True); os.abort()",
            "was killed by SIGABRT: what():  CUDA error: lost",
        ),
    ],
)
def test_run_child_says_how_one_died(monkeypatch, code, end):
    assert child(monkeypatch, code) == ([], end)


ENDINGS = {"fails": "1: lost", "cannot start": "descriptor", "is stopped": ""}


def run_on_a_rank(rank, world_size):
    """The child of rank 1 fails, cannot start, or is stopped; that of rank 0 would wait for it."""
    code = "import time; time.sleep(99)" if rank == 0 else "raise SystemExit('lost')"
    problems = {}
    for how in ENDINGS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes, "child_command", lambda *_: [sys.executable, "-c", code])
            patch.setattr(processes, "VOTE", 0.1)
            patch.setattr(processes, "judge", list)
            if how == "cannot start" and rank == 1:
                patch.setattr(processes.subprocess, "Popen", lambda *_, **__: os.read(-1, 1))  # an OSError
            began = time.monotonic()
            found = processes.compare({}, {}, {}, 60, lambda how=how: how == "is stopped" and rank == 1)
            assert time.monotonic() - began < 30
            assert not any(each.final for each in found)
            problems[how] = [each.problem for each in found]
    return problems


def test_compare_ends_all_children_when_one_fails():
    first, second = run_ranks(run_on_a_rank, 2)
    assert first == second
    for how, (of_first, of_second) in first.items():
        assert of_first.endswith("was stopped, or took too long") and of_second.endswith(ENDINGS[how])
