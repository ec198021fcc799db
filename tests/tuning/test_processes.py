"""A child that hangs, dies or is not wanted any more costs its time limit at most, and leaves no process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.tuning import processes

pytestmark = pytest.mark.slow

HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
open(sys.argv[1] + ".pid", "w").write(str(child.pid))
time.sleep(99)
"""


def child(monkeypatch, code: str, seconds: float = 20, signals: SignalFlag | None = None):
    """Run a child that is this Python code; its arguments are the request's and the report's file."""
    command = lambda request, report: [sys.executable, "-c", code, str(request), str(report)]  # noqa: E731
    monkeypatch.setattr(processes, "child_command", command)
    return processes.run_child({"sides": {}}, dict(os.environ), seconds, signals or SignalFlag())


def is_alive(pid: int) -> bool:
    """Return whether a process still runs some time after it was killed."""
    status, ends = Path(f"/proc/{pid}/status"), time.monotonic() + 10
    while status.exists() and "zombie" not in status.read_text():
        if time.monotonic() > ends:
            return True
        time.sleep(0.05)
    return False


def test_run_child_returns_its_report(monkeypatch):
    code = "import sys; open(sys.argv[2], 'w').write(open(sys.argv[1]).read())"
    assert child(monkeypatch, code) == {"sides": {}}


def test_run_child_ends_one_that_hangs_with_what_it_started(monkeypatch, tmp_path):
    code = HANGS.replace("sys.argv[1] + ", f"'{tmp_path}/child' + ")
    began = time.monotonic()
    assert child(monkeypatch, code, seconds=2) == {"problem": "not done after 2 s"}
    assert time.monotonic() - began < 15
    assert not is_alive(int((tmp_path / "child.pid").read_text()))


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (
            "import os; print('the device is lost', flush=True); os.abort()",
            "was killed by SIGABRT: the device is lost",
        ),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL: no output"),
        (
            "raise MemoryError('CUDA out of memory')",
            "ended with exit code 1: MemoryError: CUDA out of memory",
        ),
    ],
)
def test_run_child_says_how_one_died(monkeypatch, code, problem):
    assert child(monkeypatch, code) == {"problem": problem}


def test_run_child_ends_at_once_on_a_stop_signal(monkeypatch):
    with SignalFlag() as signals:
        signals.requested = "SIGTERM"
        began = time.monotonic()
        assert child(monkeypatch, "import time; time.sleep(99)", 60, signals) == {
            "problem": "stopped by SIGTERM"
        }
        assert time.monotonic() - began < 10


def test_child_dies_with_its_parent(tmp_path):
    """The parent is killed, so it can end nothing itself."""
    inner = (
        "import os, signal, time; from fastsuncet.distributed.signals import end_with_parent;"
        "end_with_parent(signal.SIGKILL);"
        "print(os.getpid(), flush=True); time.sleep(99)"
    )
    outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}]).wait()"
    parent = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert not is_alive(pid)
