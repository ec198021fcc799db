"""One command after the other as processes of their own, with every signal passed on.

A process each, so that exit codes, signals and memory are what they are when a person types the command. Each has a
session of its own: a scheduler and a terminal signal a whole group, a child would hear of it twice, and the second time
breaks off the shutdown of torchrun's agent.
"""

import signal
import subprocess
from collections.abc import Sequence
from types import FrameType, TracebackType

from fastsuncet.console import cli_command
from fastsuncet.distributed.signals import ASKING

REFUSED = (2, 3, 4, 5, 130)  # a child's own reasons, asked to stop or not; see errors.py
PREEMPTED = 75


class Children:
    """`with Children() as children:`; `children.run(arguments)` is the exit code of `fastsuncet ARGUMENTS`.

    A signal is passed to the child that runs; `requested` then names it, and nothing should be started any more.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._child: subprocess.Popen | None = None
        self._pending: list[int] = []
        self._before: dict[signal.Signals, object] = {}

    def run(self, arguments: Sequence[str]) -> int:
        """Waits for the child. A child that a signal of its own killed ends with 128 + its number, as in a shell.

        Where we were asked to stop, a child that left without a reason of its own was stopped by that: 75, because the
        same command starts it again.
        """
        self._child = subprocess.Popen([*cli_command(), *arguments], start_new_session=True)
        while self._pending:  # one that came between the check before and this line
            self._child.send_signal(self._pending.pop(0))
        code = self._child.wait()
        self._child = None
        if self.requested is not None and code not in (0, *REFUSED):
            return PREEMPTED
        return code if code >= 0 else 128 - code

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = self.requested or signal.Signals(number).name
        if number == signal.SIGHUP:  # the terminal is gone: to a trainer that would be the end without a save
            number = signal.SIGTERM
        if self._child is None:
            self._pending.append(number)
        else:
            self._child.send_signal(number)  # nothing where it has just ended

    def __enter__(self) -> "Children":
        hung_up = ["SIGHUP"] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else []  # not under nohup
        for name in [*ASKING, *hung_up]:
            number = signal.Signals[name]
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
