"""A signal sets a flag, and what the process was doing goes on to its end."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from fastsuncet.distributed import signals
from fastsuncet.distributed.signals import STOP_SIGNALS, SignalFlag


@pytest.mark.parametrize("name", STOP_SIGNALS)
def test_signal_flag_is_the_name_of_the_signal_and_interrupts_nothing(name):
    with SignalFlag() as flag:
        assert flag.requested is None
        os.kill(os.getpid(), signal.Signals[name])
        assert flag.requested == name
        for other in ("SIGUSR1", "SIGTERM"):
            os.kill(os.getpid(), signal.Signals[other])
        assert flag.requested == name  # the first one


@pytest.mark.parametrize("end", ["leave", "raise"])
def test_signal_flag_restores_the_handlers(end):
    before = {name: signal.getsignal(signal.Signals[name]) for name in STOP_SIGNALS}
    try:
        with SignalFlag():
            inside = {name: signal.getsignal(signal.Signals[name]) for name in STOP_SIGNALS}
            if end == "raise":
                raise RuntimeError("in the loop")
    except RuntimeError:
        assert end == "raise"
    assert {name: signal.getsignal(signal.Signals[name]) for name in STOP_SIGNALS} == before
    assert all(inside[name] != before[name] for name in STOP_SIGNALS)


def test_signal_flag_tells_a_second_ctrl_c_from_one_that_arrives_twice(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    with SignalFlag() as flag:
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += 0.1
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.requested == "SIGINT"
        now[0] += 1.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signal_flag_in_another_thread_is_refused_and_changes_nothing():
    errors = []

    def enter():
        try:
            with SignalFlag():
                pass
        except ValueError as error:
            errors.append(str(error))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "main thread" in errors[0]
    assert signal.getsignal(signal.SIGTERM) == before


PROGRAM = """
import sys, time
from fastsuncet.distributed.signals import SignalFlag
with SignalFlag() as signals:
    print("ready", flush=True)
    while signals.requested is None:
        time.sleep(0.01)
    print("saving", flush=True)
    sys.stdin.readline()  # a save, as long as the test wants it to take
print(f"saved after {signals.requested}", flush=True)
sys.stdin.readline()  # what comes after a save: status.json, the end of the interpreter
sys.exit(75)
"""
HANG_UPS = {"terminal": signal.SIG_DFL, "nohup": signal.SIG_IGN}


def started(hang_up: str = "terminal") -> subprocess.Popen:
    """Return a process that waits for a signal; it was started from a terminal or under nohup."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, HANG_UPS[hang_up]),
    )
    assert process.stdout.readline() == "ready\n"
    return process


def answer(process: subprocess.Popen) -> str:
    """Let the process go on to its next line, and return that line."""
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signal_flag_ignores_repeated_signals_until_the_process_has_ended(name):
    process = started()
    process.send_signal(signal.Signals[name])
    assert process.stdout.readline() == "saving\n"
    for repeated in STOP_SIGNALS:
        process.send_signal(signal.Signals[repeated])
    assert answer(process) == f"saved after {name}\n"
    for repeated in STOP_SIGNALS:
        process.send_signal(signal.Signals[repeated])
    process.communicate("\n", timeout=60)
    assert process.returncode == 75


def test_signal_flag_under_nohup_does_not_hear_sighup():
    process = started("nohup")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "saving\n"
    assert answer(process) == "saved after SIGUSR1\n"
    process.communicate("\n", timeout=60)
    assert process.returncode == 75
