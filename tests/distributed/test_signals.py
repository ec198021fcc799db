"""A signal sets a flag, and what the process was doing goes on to its end."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from fastsuncet.checkpoint import manager
from fastsuncet.distributed import signals
from fastsuncet.distributed.signals import STOP_SIGNALS, SignalFlag


@pytest.mark.parametrize("name", STOP_SIGNALS)
def test_signal_flag_is_the_name_of_the_signal_and_interrupts_nothing(name):
    with SignalFlag() as flag:
        assert flag.requested is None
        os.kill(os.getpid(), signal.Signals[name])
        total = sum(range(1000))
        assert flag.requested == name
        assert total == 499500


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


def test_signal_flag_names_the_first_signal():
    with SignalFlag() as flag:
        for name in ("SIGUSR1", "SIGTERM", "SIGTERM", "SIGUSR2", "SIGINT"):
            os.kill(os.getpid(), signal.Signals[name])
        assert flag.requested == "SIGUSR1"


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


def test_signal_flag_leaves_other_signals_alone():
    before = signal.getsignal(signal.SIGUSR1)
    with SignalFlag(("SIGTERM",)) as flag:
        assert signal.getsignal(signal.SIGUSR1) == before
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.requested == "SIGTERM"


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


def test_signal_flag_under_many_sigterms_does_not_break_a_save(tmp_path):
    """System calls of a save are interrupted again and again; Python restarts them after the handler."""
    done = threading.Event()
    sent = []

    def send():
        while not done.wait(0.0005):
            os.kill(os.getpid(), signal.SIGTERM)
            sent.append(1)

    with SignalFlag() as flag:
        thread = threading.Thread(target=send)
        thread.start()
        try:
            for step in range(1, 6):
                weight = torch.full((200, 1000), float(step))
                manager.save(tmp_path, step, model={"weight": weight}, state={}, meta={}, keep=2)
        finally:
            done.set()
            thread.join()
    assert flag.requested == "SIGTERM"
    assert len(sent) > 10
    loaded = manager.load_newest(tmp_path, say=pytest.fail)
    assert loaded.step == 5
    assert torch.equal(loaded.model["weight"], weight)


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
sys.exit(75)
"""


def test_signal_flag_lets_a_process_finish_its_save_after_a_second_signal():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate("\n", timeout=60)
    assert output == "saved after SIGTERM\n"
    assert process.returncode == 75
