"""From a sweep's file to its runs: every combination with its name, its configs and its command lines."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fastsuncet.commands.sweep.spec import TAG, Assignment, Command, Spec, Variant
from fastsuncet.config import Config, load_config
from fastsuncet.config.messages import ConfigErrors, Origin, Problem
from fastsuncet.errors import ConfigError

MAX_JOBS = 2_000  # of one sweep: more is a mistake


@dataclass(frozen=True)
class Job:
    """One command line of one run, and the config it will read."""

    command: str  # "train", "evaluate npi"
    arguments: tuple[str, ...]  # behind `fastsuncet`
    own: tuple[str, ...]  # of `arguments`: those that the run's other commands do not have
    options: tuple[str, ...]  # of `arguments`: those that choose an encoder
    config: Config


@dataclass(frozen=True)
class Run:
    """One run of a sweep: its name and its jobs, in order."""

    name: str
    jobs: tuple[Job, ...]

    @property
    def folder(self) -> Path:
        """Folder of all its jobs."""
        return self.jobs[0].config.run_folder


def expand(spec: Spec, overrides: Sequence[str] = ()) -> list[Run]:
    """Return the runs of a sweep in the order of its file, with `overrides` of the command line applied to each.

    Raises ConfigErrors with everything that is wrong with any config, and for two runs of one name or an override of a
    key that varies.
    """
    jobs = math.prod(map(len, spec.vary)) * max(1, len(spec.variants))
    jobs *= sum(math.prod(map(len, each.vary)) * max(1, len(each.variants)) for each in spec.commands)
    if jobs > MAX_JOBS:
        text = f"these are {jobs:,} command lines; a sweep can have at most {MAX_JOBS:,}"
        raise ConfigErrors([Problem("vary", text, spec.origin("vary"), show_value=False)])
    problems = [
        Problem(
            key,
            "varies in this sweep; leave it out, or choose runs with --only",
            Origin(override=f"{key}=..."),
        )
        for key in (override.partition("=")[0] for override in overrides)
        if key in spec.keys_varied | {TAG}
    ]
    runs: list[Run] = []
    differences: dict[str, str] = {}
    for variant, varied in spec.combinations():
        name = _name(spec, variant, varied)
        different = " ".join(filter(None, [variant.name, *(setting.override for setting in varied)]))
        if name in differences:
            text = (
                f"two runs would be called {name} and share a folder: {differences[name]}, and {different}. "
                "Put what they differ in into name"
            )
            problems.append(Problem("name", text, spec.origin("name")))
        differences.setdefault(name, different)
        base, settings = variant.base or spec.base, (*spec.settings, *variant.settings, *varied)
        found: list[Job] = []
        for command in spec.commands:
            for case, chosen in command.combinations():
                own = (*command.settings, *case.settings, *chosen)
                try:
                    found.append(_job(base, command, settings, own, overrides, name))
                except ConfigErrors as error:
                    problems += _at_the_sweeps_lines(error.problems, [*settings, *own], name, spec)
        runs.append(Run(name, tuple(found)))
    if problems:
        raise ConfigErrors(_merged(problems))
    return runs


def _job(
    base: str,
    command: Command,
    settings: Sequence[Assignment],
    own: Sequence[Assignment],
    overrides: Sequence[str],
    name: str,
) -> Job:
    """Return the job. Raises ConfigErrors where its config is wrong."""
    # The last value of a key counts, and the command line shows each key once.
    chosen = {setting.key: setting.override for setting in (*settings, *own)}
    words = [*chosen.values(), *overrides, f"{TAG}={name}"]
    config = load_config(base, words)
    options = ["--every-checkpoint"] if command.every_checkpoint else []
    if command.encoder is not None:
        options = ["--encoder", os.fspath(config.run_folder / command.encoder)]
    return Job(
        command.name,
        arguments=(*command.name.split(), base, *words, *options),
        own=tuple(chosen[key] for key in dict.fromkeys(setting.key for setting in own)),
        options=tuple(options),
        config=config,
    )


def _name(spec: Spec, variant: Variant, varied: Sequence[Assignment]) -> str:
    values = {setting.key: _in_a_name(setting.value) for setting in (*variant.settings, *varied)}
    values["run"] = variant.name
    if spec.name is None:
        leaves = [setting.key.rpartition(".")[2] for setting in varied]
        keys = [
            leaf if leaves.count(leaf) == 1 else each.key for leaf, each in zip(leaves, varied, strict=True)
        ]
        parts = [key + _in_a_name(setting.value) for key, setting in zip(keys, varied, strict=True)]
        return "-".join(filter(None, [Path(spec.file).stem, variant.name, *parts]))
    for key in re.findall(r"{([^{}]*)}", spec.name):
        if not values.get(key):
            text = f"{{{key}}} is not in every run: it can be {{run}}, or a key under vary or in every entry of runs"
            raise ConfigErrors([Problem("name", text, spec.origin("name"))])
    return re.sub(r"{([^{}]*)}", lambda match: values[match[1]], spec.name)


def _in_a_name(value: Any) -> str:
    """Return a value as part of a folder's name: letters, digits, dots and dashes stay."""
    items = value if isinstance(value, list) else [value]
    text = "_".join(item if isinstance(item, str) else json.dumps(item) for item in items)
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)


def _at_the_sweeps_lines(
    problems: Sequence[Problem], settings: Sequence[Assignment], name: str, spec: Spec
) -> Iterator[Problem]:
    """Yield the problems of one config, each at the line of the sweep that wrote the value."""
    lines = {setting.override: setting.origin for setting in settings}
    lines[f"{TAG}={name}"] = replace(spec.origin("name"), written=name)
    for problem in problems:
        yield replace(problem, origin=lines.get(problem.origin.override, problem.origin))


def _merged(problems: Sequence[Problem]) -> list[Problem]:
    """Return each problem once, with all values it was found with: one wrong line is wrong in every run."""
    found: dict[Problem, list[str]] = {}
    for problem in problems:
        same = replace(problem, origin=replace(problem.origin, written=""))
        found.setdefault(same, []).append(problem.origin.written)
    return [
        replace(
            problem, origin=replace(problem.origin, written=", ".join(filter(None, dict.fromkeys(written))))
        )
        for problem, written in found.items()
    ]


# ----------------------------------------------------------------------------------------------- which runs are ours
def runs_named(runs: Sequence[Run], patterns: Sequence[str]) -> list[Run]:
    """Return the runs whose name matches a pattern (* and ? as in file names); all of them without patterns.

    Raises ConfigError for a pattern that no name matches.
    """
    for pattern in patterns:
        if not any(fnmatchcase(run.name, pattern) for run in runs):
            names = ", ".join(run.name for run in runs)
            raise ConfigError(f"--only {pattern}: no run has such a name; the runs are {names}")
    return [run for run in runs if not patterns or any(fnmatchcase(run.name, each) for each in patterns)]


def runs_of_task(
    runs: Sequence[Run], task: str | None, environment: Mapping[str, str]
) -> tuple[list[Run], str]:
    """Return the runs of this task, and the task in words (empty where all runs are its own).

    `task` is "I/N": every N-th run from the I-th on. Without it, task T of a Slurm array does run T alone, whichever
    part of the array was submitted, so that a task submitted again is the same run again. Raises ConfigError.
    """
    if task is not None:
        match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", task)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(f"--task is I/N with 1 <= I <= N, such as 2/8, not {task}")
        return list(runs[int(match[1]) - 1 :: int(match[2])]), f"task {task}"
    number = environment.get("SLURM_ARRAY_TASK_ID")
    if number is None:
        return list(runs), ""
    if not number.isdecimal() or not 1 <= int(number) <= len(runs):
        raise ConfigError(
            f"this is task {number} of a Slurm array, and the sweep has {len(runs)} runs: submit it with "
            f"--array=1-{len(runs)}, or divide the runs with --task I/N"
        )
    return [runs[int(number) - 1]], f"task {number} of a Slurm array"
