"""What happens on SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C: the run saves at the end of its step and ends with code 75.

1. The signal handler of this module sets a flag and does nothing else. A handler that saves, prints or takes a lock
   can interrupt the very code that holds that lock, and hang.
2. The training loop (training/trainer.py) reads the flag once a step. `StopConsensus` makes all ranks stop after the
   same step, whichever of them got the signal.
3. The loop saves a checkpoint and raises `Preempted` (errors.py). The command writes status.json and ends with 75: the
   same command continues the run.

Who passes signals on: launch.py to the ranks that it started, commands/sweep/child.py to the sweep's command.
"""

import signal
import time
from types import FrameType
from typing import Any

# Slurm warns with SIGUSR1 or SIGUSR2 before the time limit. Other systems stop a job with SIGTERM, people with Ctrl-C.
STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")
# One Ctrl-C can arrive twice, from the terminal and from a launcher. Two presses are further apart than this.
ONE_PRESS = 0.5  # seconds


class SignalFlag:
    """`with SignalFlag() as signals:`; `signals.requested` is None or the name of the first signal.

    Further signals change nothing, so that a save is completed. Only a second SIGINT raises KeyboardInterrupt, for a
    person who does not want to wait. Leaving restores the handlers from before. Only the main thread handles signals:
    entering in another one raises ValueError.
    """

    def __init__(self, names: tuple[str, ...] = STOP_SIGNALS):
        self.numbers = [signal.Signals[name] for name in names]
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

    def __enter__(self) -> "SignalFlag":
        try:
            for number in self.numbers:
                self._before[number] = signal.signal(number, self._handle)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: C code set the handler, which Python can neither name nor restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
