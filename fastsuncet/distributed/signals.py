"""A signal asks; the loop answers at the end of its step.

The handler sets a flag and does nothing else: one that saves, prints or takes a lock can interrupt the very
code that holds that lock, and hangs at random.
"""

import signal
import time
from types import FrameType, TracebackType

# Slurm warns with SIGUSR1 or SIGUSR2 before the time limit, everything else stops with SIGTERM, a person with
# Ctrl-C.
ASKING = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")
# One Ctrl-C can arrive twice, from the terminal and again through a launcher. Two presses are further apart
# than this.
ONE_PRESS = 0.5  # seconds


class SignalFlag:
    """`with SignalFlag() as signals:`; `signals.requested` is None or the name of the first signal that came.

    More signals while one is being answered change nothing, so a save goes on to its end; only a second
    SIGINT raises KeyboardInterrupt where the program stands, for a person who does not want to wait. The
    handlers from before are back on leaving. Signals are handled in the main thread: entering elsewhere
    raises ValueError.
    """

    def __init__(self, names: tuple[str, ...] = ASKING):
        self.numbers = [signal.Signals[name] for name in names]
        self.requested: str | None = None
        self._interrupted_at: float | None = None
        self._before: dict[signal.Signals, object] = {}

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
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # None: the handler was set by C code, which Python can neither name nor put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
