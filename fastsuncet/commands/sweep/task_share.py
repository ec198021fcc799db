"""Which of a sweep's runs are this process's: by name, by a share, or by its number in a Slurm array."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from fastsuncet.commands.sweep.runs import Run
from fastsuncet.errors import ConfigError


def only(runs: Sequence[Run], patterns: Sequence[str]) -> list[Run]:
    """The runs whose name fits one of `patterns` (* and ? as in file names). ConfigError for one that fits none."""
    for pattern in patterns:
        if not any(fnmatchcase(run.name, pattern) for run in runs):
            raise ConfigError(
                f"--only {pattern}: no run has such a name; there are {', '.join(run.name for run in runs)}"
            )
    return [run for run in runs if not patterns or any(fnmatchcase(run.name, p) for p in patterns)]


def share(runs: Sequence[Run], task: str | None, environment: Mapping[str, str]) -> tuple[list[Run], str]:
    """(the runs of this task, a word about which these are, empty where they are all).

    `task` is "I/N", every N-th run from the I-th on. Without it a Slurm array's task number T is run T alone, whichever
    part of the array was submitted: a number submitted again is the same run again. Raises ConfigError.
    """
    if task is not None:
        match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", task)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(f"--task is I/N with 1 <= I <= N, such as 2/8, not {task}")
        first, count = int(match[1]), int(match[2])
        return list(runs[first - 1 :: count]), f"task {task}"
    number = environment.get("SLURM_ARRAY_TASK_ID")
    if number is None:
        return list(runs), ""
    if not number.isdecimal() or not 1 <= int(number) <= len(runs):
        raise ConfigError(
            f"this is task {number} of a Slurm array, and the sweep has {len(runs)} runs: submit it with "
            f"--array=1-{len(runs)}, or give each task a share with --task I/N"
        )
    return [runs[int(number) - 1]], f"task {number} of a Slurm array"
