"""A sweep's commands are processes: their exit codes are kept, and signals reach them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fastsuncet.commands.sweep import Children

READY = "pathlib.Path('ready').touch(); time.sleep(60)"


def scripted(monkeypatch, code: str) -> Children:
    """Return Children that run `code` instead of fastsuncet."""
    script = [sys.executable, "-c", f"import os, signal, sys, time, pathlib\n{code}"]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen(script, **options))
    return Children()


def signal_when_ready(number: int) -> None:
    """Signal this process once the child has made the file `ready`."""

    def wait_and_signal():
        while not Path("ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait_and_signal, daemon=True).start()


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("sys.exit(0 if os.getsid(0) == os.getpid() else 3)", 0),  # its own session
    ],
)
def test_children_exit_codes_without_a_signal(monkeypatch, code, ends):
    with scripted(monkeypatch, code) as children:
        assert children.run(["version"]) == ends
        assert children.requested is None


@pytest.mark.slow
def test_children_run_this_program(capfd):
    with Children() as children:
        assert children.run(["version"]) == 0
    assert capfd.readouterr().out.startswith("fastsuncet ")


def test_children_get_sigterm_when_their_parent_is_killed(monkeypatch):
    code = "signal.signal(signal.SIGTERM, lambda *_: os._exit(pathlib.Path('ended').touch() or 0)); " + READY
    with scripted(monkeypatch, code) as children:
        parent = os.fork()
        if parent == 0:
            children.run([])
        while not Path("ready").exists():
            time.sleep(0.01)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    end = time.monotonic() + 30
    while not Path("ended").exists():
        assert time.monotonic() < end, "the child goes on alone"
        time.sleep(0.01)


EXIT = "signal.signal(signal.{}, lambda *_: sys.exit({})); " + READY
IGNORED = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
NOHUP = pytest.mark.skipif(IGNORED, reason="started under nohup, which ignores SIGHUP")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "number", "ends"),
    [
        pytest.param(READY, signal.SIGTERM, 75, id="dies-of-the-signal"),
        pytest.param(EXIT.format("SIGTERM", 75), signal.SIGTERM, 75, id="saves"),
        pytest.param(EXIT.format("SIGTERM", 5), signal.SIGTERM, 5, id="cannot-save"),
        pytest.param(EXIT.format("SIGTERM", 0), signal.SIGTERM, 0, id="was-done"),
        pytest.param(EXIT.format("SIGHUP", 75), signal.SIGHUP, 75, id="closed-terminal", marks=NOHUP),
    ],
)
def test_children_pass_signals_on(monkeypatch, code, number, ends):
    with scripted(monkeypatch, code) as children:
        signal_when_ready(number)
        assert children.run(["train"]) == ends
        assert children.requested == signal.Signals(number).name
    os.kill(os.getpid(), number)  # a repeated signal does not change the exit code of the sweep


def test_children_signal_just_before_the_start(monkeypatch):
    with scripted(monkeypatch, "time.sleep(60)") as children:
        os.kill(os.getpid(), signal.SIGTERM)
        assert children.run(["train"]) == 75
