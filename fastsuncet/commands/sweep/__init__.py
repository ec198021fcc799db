"""`fastsuncet sweep`: run the commands of every run in one file, one after the other or as tasks of a job array.

Each command is a process, as when a person types it. What is done is skipped and what was stopped is continued, so that
the same command can always be given again. Nothing starts before the configs of all runs are checked.
"""

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType

from fastsuncet.commands.sweep.jobs import job_state
from fastsuncet.commands.sweep.runs import Job, Run, expand, read_sweep, runs_named, runs_of_task
from fastsuncet.distributed.signals import SignalFlag, end_with_parent
from fastsuncet.errors import CheckpointError, ConfigError
from fastsuncet.paths import cli_command
from pipelines.output import counted, say_line

# Exit codes with which a child reports a problem of its own, whether it was asked to stop or not; see errors.py.
REFUSED = (2, 3, 4, 5)
PREEMPTED = 75


def sweep(
    name: str,
    overrides: Sequence[str] = (),
    *,
    task: tuple[int, int] | None = None,
    only: Sequence[str] = (),
    dry_run: bool = False,
    show: bool = False,
    keep_going: bool = False,
) -> int:
    """Run the sweep `name`, a file or a shipped one, or the part of one task, and return the exit code.

    It is that of the first command that failed, 75 after a signal, 5 where a damaged checkpoint or result was left
    out and everything else is done, 0 where everything is done. `dry_run` prints every command line and `show` the
    state of every run; neither starts anything. Raises ConfigErrors.
    """
    runs = runs_named(expand(read_sweep(name), overrides), only)
    runs, which = runs_of_task(runs, task, os.environ)
    if "RANK" in os.environ:
        raise ConfigError(
            "RANK is set: torchrun started this process as a rank. A sweep starts the ranks of each of its runs; call "
            "it without torchrun"
        )
    if which:
        say_line(f"sweep    {which}: {', '.join(run.name for run in runs) or 'no run is left for it'}")
    if dry_run:
        for run in runs:
            for job in run.jobs:
                say_line(_command_line(job))
        say_line(f"\ndry run: {_counted(runs)}; every config is valid, nothing was started")
        return 0
    code, failures = 0, {}
    if not show:
        code = _work(runs, keep_going, failures)
        say_line("")
    for line in _table(runs, failures):
        say_line(line)
    return code


def _work(runs: Sequence[Run], keep_going: bool, failures: dict[tuple[str, ...], int]) -> int:
    """Start what is not done, in order, and return the exit code. A run whose command failed is not continued.

    Adds to `failures` the arguments of each job that failed, and its exit code.
    """
    failed = damaged = 0
    with Children() as children:
        for number, run in enumerate(runs, 1):
            lead = f"sweep    {run.name}:"
            for job in run.jobs:
                state = job_state(job)
                if not (state.done or state.damaged):
                    if children.requested is not None:
                        say_line(f"sweep    {children.requested}: stopped; the same command continues")
                        return PREEMPTED
                    say_line(f"sweep    run {number}/{len(runs)}, {run.name}: {_command_line(job)}")
                    code = children.run(job.arguments)
                    if code == PREEMPTED:
                        say_line(f"{lead} a signal stopped {job.command}; the same command continues")
                        return code
                    if code:
                        failed = failed or code
                        failures[job.arguments] = code
                        say_line(f"{lead} {job.command} failed with exit code {code}; see its message above")
                        if not keep_going or children.requested is not None:
                            return failed
                        break
                    state = job_state(job)
                if state.damaged:
                    damaged = CheckpointError.exit_code
                    say_line(f"{lead} {job.command} is {state.text}{state.remedy}")
    return failed or damaged


class Children(SignalFlag):
    """Run commands one after the other and pass every signal to the running one; nothing more is started then.

    Each has its own session: a scheduler or a terminal signals a whole process group, the child would get the signal
    twice, and the second one breaks off the shutdown of torchrun's agent.
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


def _command_line(job: Job) -> str:
    return shlex.join(["fastsuncet", *job.arguments])


def _counted(runs: Sequence[Run]) -> str:
    """Return how many runs and command lines there are: "6 runs, 12 commands"."""
    return f"{counted(len(runs), 'run')}, {counted(sum(len(run.jobs) for run in runs), 'command')}"


def _table(runs: Sequence[Run], failures: Mapping[tuple[str, ...], int]) -> list[str]:
    """Return lines with every command of every run and its state, or the code with which it has just failed."""
    rows, left = [("run", "command", "state")], 0
    for run in runs:
        for job in run.jobs:
            title, state = " ".join([job.command, *job.own, *job.options]), job_state(job)
            code = failures.get(job.arguments)
            text = state.text if code is None else f"failed with exit code {code}"
            rows.append((run.name if job is run.jobs[0] else "", title, text))
            left += not state.done
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    return [*lines, f"{_counted(runs)}: " + (f"{left} to do" if left else "all done")]
