"""A signal sets a flag, and what the process was doing goes on to its end."""

import os
import signal
import subprocess
import sys

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


def handlers() -> dict:
    return {name: signal.getsignal(signal.Signals[name]) for name in STOP_SIGNALS}


def test_signal_flag_restores_the_handlers():
    before = handlers()
    with pytest.raises(RuntimeError, match="in the loop"), SignalFlag():
        raise RuntimeError("in the loop")
    assert handlers() == before


def test_signal_flag_tells_a_second_ctrl_c_from_one_that_arrives_twice(monkeypatch):
    """And restores the handlers then: a third one must be able to end the process."""
    flag, now, before = SignalFlag(), [100.0], handlers()
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])

    def press_again_and_again():
        with flag:
            for wait in (0.0, 0.1, 1.0):
                now[0] += wait
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        press_again_and_again()
    assert flag.requested == "SIGINT" and now[0] == pytest.approx(101.1) and handlers() == before


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


@pytest.mark.parametrize(
    ("hang_up", "sent", "heard"),
    [
        (signal.SIG_DFL, ["SIGTERM"], "SIGTERM"),
        (signal.SIG_DFL, ["SIGHUP"], "SIGHUP"),
        (signal.SIG_IGN, ["SIGHUP", "SIGUSR1"], "SIGUSR1"),  # under nohup
    ],
)
def test_signal_flag_ignores_repeated_signals_until_the_process_has_ended(hang_up, sent, heard):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hang_up),
    )
    assert process.stdout.readline() == "ready\n"
    for each in sent:
        process.send_signal(signal.Signals[each])
    assert process.stdout.readline() == "saving\n"
    for repeated in STOP_SIGNALS:
        process.send_signal(signal.Signals[repeated])
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"saved after {heard}\n"
    for repeated in STOP_SIGNALS:
        process.send_signal(signal.Signals[repeated])
    process.communicate("\n", timeout=60)
    assert process.returncode == 75
