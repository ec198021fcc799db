"""`fastsuncet sweep`: the runs of one file, each with its commands, one after the other or as tasks of an array.

Each command is a process of its own. What is done is skipped, what was stopped is continued, so that after any end the
same command goes on. Nothing starts before the configs of all runs are sound.
"""

import os
import shlex
from collections.abc import Sequence

from fastsuncet.commands.sweep.child import PREEMPTED, Children
from fastsuncet.commands.sweep.jobs import mark_done, results_of, state
from fastsuncet.commands.sweep.runs import Job, Run, expand
from fastsuncet.commands.sweep.spec_reader import read_sweep
from fastsuncet.commands.sweep.task_share import only, share
from fastsuncet.console import Say, say_line
from fastsuncet.errors import ConfigError


def sweep(
    path: str,
    overrides: Sequence[str] = (),
    *,
    task: str | None = None,
    patterns: Sequence[str] = (),
    dry_run: bool = False,
    show: bool = False,
    keep_going: bool = False,
    say: Say = say_line,
) -> int:
    """Runs the sweep at `path`, or this task's part of it, and returns the exit code: of the first command that failed,
    75 after a signal, 0 where all is done.

    `dry_run` says every command line, `show` how far every run is; neither starts one. Raises ConfigErrors.
    """
    runs = expand(read_sweep(path), overrides)
    chosen = only(runs, patterns)
    mine, which = share(chosen, task, os.environ)
    refuse_inside_a_launcher()
    if which:
        say(f"sweep    {which}: {', '.join(run.name for run in mine) or 'no run is left for it'}")
    if show:
        for line in table(mine):
            say(line)
        return 0
    if dry_run:
        for job in (job for run in mine for job in run.jobs):
            say(in_words(job))
        say(f"\ndry run: {counted(mine)}; every config is sound, nothing was started")
        return 0
    refuse_other_runs(mine)
    code = work(mine, keep_going, say)
    for line in ["", *table(mine)]:
        say(line)
    return code


def work(runs: Sequence[Run], keep_going: bool, say: Say) -> int:
    """The exit code of what is not done yet, in order. A run whose command failed gets none of its further ones."""
    failed = 0
    with Children() as children:
        for number, run in enumerate(runs, 1):
            for job in run.jobs:
                if state(job).done:
                    continue
                if children.requested is not None:
                    say(f"sweep    {children.requested}: stopped; the same command goes on")
                    return PREEMPTED
                say(f"sweep    run {number}/{len(runs)}, {run.name}: {in_words(job)}")
                before = results_of(run.folder)
                code = children.run(job.arguments)
                if code == PREEMPTED:
                    say(
                        f"sweep    {run.name}: {job.command} was stopped by a signal; the same command goes on"
                    )
                    return code
                if code == 0:
                    mark_done(job, before)
                    continue
                failed = failed or code
                say(
                    f"sweep    {run.name}: {job.command} ended with exit code {code}; its message stands above"
                )
                if not keep_going or children.requested is not None:
                    return failed
                break
    return failed


def refuse_inside_a_launcher() -> None:
    """Raises ConfigError under torchrun: every rank would run the whole sweep."""
    if "RANK" in os.environ:
        raise ConfigError(
            "RANK is set: this is a rank that torchrun started. A sweep starts the ranks of each of its runs itself; "
            "call it without torchrun"
        )


def refuse_other_runs(runs: Sequence[Run]) -> None:
    """Raises ConfigError where a folder holds a run with other settings, for all of them at once."""
    refused = [why for run in runs for job in run.jobs if (why := state(job).refused)]
    if refused:
        raise ConfigError("\n".join(refused))


def in_words(job: Job) -> str:
    """The command line, as a person would type it."""
    return shlex.join(["fastsuncet", *job.arguments])


def counted(runs: Sequence[Run]) -> str:
    """How many runs and command lines: "6 runs, 12 commands"."""
    jobs = sum(len(run.jobs) for run in runs)
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}, {jobs} command{'' if jobs == 1 else 's'}"


def table(runs: Sequence[Run]) -> list[str]:
    """Every command of every run with its state."""
    rows = [("run", "command", "state")]
    for run in runs:
        for job in run.jobs:
            title = " ".join([job.command, *job.own, *job.options])
            rows.append((run.name if job is run.jobs[0] else "", title, state(job).words))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    left = sum(not state(job).done for run in runs for job in run.jobs)
    return [*lines, f"{counted(runs)}: " + (f"{left} to do" if left else "all done")]
