"""Commands as processes, one after the other, with every signal passed on.

As processes, their exit codes, signals and memory are the same as when a person types the command. Each has its own
session: a scheduler or a terminal signals a whole process group, the child would get the signal twice, and the second
one breaks off the shutdown of torchrun's agent.
"""

import signal
import subprocess
from collections.abc import Sequence
from types import FrameType

from fastsuncet.distributed.signals import SignalFlag, end_with_parent
from fastsuncet.paths import cli_command

# Exit codes with which a child reports a problem of its own, whether it was asked to stop or not; see errors.py.
REFUSED = (2, 3, 4, 5, 130)
PREEMPTED = 75


class Children(SignalFlag):
    """`with Children() as children:`; `children.run(arguments)` returns the exit code of `fastsuncet ARGUMENTS`.

    A signal is passed to the running child. `requested` is then its name, and nothing more should be started.
    """

    def __init__(self) -> None:
        super().__init__()
        self._child: subprocess.Popen | None = None
        self._pending: list[int] = []

    def run(self, arguments: Sequence[str]) -> int:
        """Wait for the child and return its exit code, or 128 + the signal that killed it, as a shell does.

        Return 75 where a stop was requested and the child gives no reason of its own: the same command continues it.
        """
        # A run whose sweep was killed must not go on beside that of the restarted sweep.
        words = [*cli_command(), *arguments]
        self._child = subprocess.Popen(words, start_new_session=True, preexec_fn=end_with_parent)
        while self._pending:  # a signal that came just before the child was there
            self._child.send_signal(self._pending.pop(0))
        code = self._child.wait()
        self._child = None
        if self.requested is not None and code not in (0, *REFUSED):
            return PREEMPTED
        return code if code >= 0 else 128 - code

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = self.requested or signal.Signals(number).name
        if self._child is None:
            self._pending.append(number)
        else:
            self._child.send_signal(number)  # does nothing where it has just ended
