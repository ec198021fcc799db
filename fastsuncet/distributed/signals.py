"""What happens on STOP_SIGNALS, SIGTERM for example: the run saves at the end of its step and ends with code 75.

1. The signal handler of this module only sets a flag: one that saves, prints or takes a lock can interrupt the very
   code that holds that lock, and hang.
2. The training loop (training/trainer.py) reads the flag once a step, and before each batch of an evaluation.
   `StopConsensus` makes all ranks stop after the same step, whichever of them got the signal.
3. The loop saves a checkpoint and raises `Preempted` (errors.py); before the first step commands/train.py raises it.
   The command writes status.json (checkpoint/run_folder.py), and cli/__init__.py returns 75. After the last update,
   where no evaluation is due, a signal changes nothing: the run exports its encoder and ends with 0.

launch.py passes signals on to its ranks, and commands/sweep to the sweep's command. When one of them dies, the
kernel sends SIGTERM (`end_with_parent`).
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from typing_extensions import Self

# Slurm warns with SIGUSR1 or SIGUSR2 before the time limit. Other systems stop a job with SIGTERM, people with Ctrl-C.
# A terminal that is closed sends SIGHUP; a process that was started under nohup ignores it, and stays so.
_HANG_UP = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ("SIGHUP",)
STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", *_HANG_UP)
# One Ctrl-C can arrive twice, from the terminal and from a launcher. Two presses are further apart than this.
ONE_PRESS = 0.5  # seconds
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Get the signal `by` when the process that started this one ends, however it ends. Only on Linux.

    Ranks whose agent was killed would go on training. A process that can hang needs SIGKILL.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), by)


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    """Leave the handlers of STOP_SIGNALS as they were: a notebook lives on, and must hear the next Ctrl-C."""
    before = {number: signal.getsignal(number) for number in map(signal.Signals.__getitem__, STOP_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


class SignalFlag:
    """`with SignalFlag() as signals:`; `signals.requested` is None or the name of the first signal.

    Further signals change nothing, so that a save is completed; only a second SIGINT raises KeyboardInterrupt. Leaving
    restores the handlers from before. Once a stop was requested it ignores the signals instead: a repeated one must not
    change the exit code of a run that has saved. Only the main thread can enter it.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._interrupted_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}  # handlers

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif now - self._interrupted_at > ONE_PRESS:
                raise KeyboardInterrupt
        if self.requested is None:
            self.requested = signal.Signals(number).name

    def __enter__(self) -> Self:
        for number in map(signal.Signals.__getitem__, STOP_SIGNALS):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        # After a second Ctrl-C, a third one must be able to end the process.
        ignore = self.requested is not None and kind is not KeyboardInterrupt
        for number, handler in self._before.items():
            # None: C code set the handler, which Python can neither name nor restore.
            after = handler or signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if ignore else after)
        self._before.clear()
