"""From a sweep's file to its runs: every combination with its name, its config and its command lines."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from fastsuncet.commands.sweep.spec import TAG, Command, Setting, Spec, Variant
from fastsuncet.config import Config, load_config
from fastsuncet.config.messages import ConfigErrors, Origin, Problem

MAX_JOBS = 2_000  # of one sweep: more is a slip of the hand, and nobody waits for it


@dataclass(frozen=True)
class Job:
    """One command line of one run, and the config it will read."""

    command: str  # "train", "evaluate npi"
    arguments: tuple[str, ...]  # behind `fastsuncet`
    own: tuple[str, ...]  # of `arguments`: what the run's other commands are not given
    options: tuple[str, ...]  # of `arguments`: those that choose an encoder
    config: Config


@dataclass(frozen=True)
class Run:
    """One run of a sweep: its name and its jobs, in order."""

    name: str
    jobs: tuple[Job, ...]

    @property
    def folder(self) -> Path:
        """Of all its jobs."""
        return self.jobs[0].config.run_folder


@dataclass(frozen=True)
class _Drawn:
    """A run before its configs are read."""

    name: str
    base: str
    settings: tuple[Setting, ...]
    differs: str  # from the other runs of the sweep, in words


def expand(spec: Spec, overrides: Sequence[str] = ()) -> list[Run]:
    """The runs of a sweep in the order of its file; `overrides` of the command line are laid on every one.

    Raises ConfigErrors with everything that is wrong with any of their configs, with two runs of one name, or with an
    override of what varies.
    """
    fixed = {setting.key for settings in spec.vary for setting in settings[:1]} | {TAG}
    clash = [
        Problem(key, "is what this sweep varies; leave it to the sweep, or choose runs with --only")
        for key in (override.partition("=")[0] for override in overrides)
        if key in fixed
    ]
    _count(spec)
    drawn = list(_draw(spec))
    problems = [replace(problem, origin=Origin(override=f"{problem.key}=...")) for problem in clash]
    runs = []
    for one in drawn:
        jobs = []
        for command, settings in _jobs(spec, one):
            job, wrong = _job(one, command, settings, overrides)
            jobs += [job] if job is not None else []
            problems += _placed(wrong, [*one.settings, *settings], one.name, spec)
        runs.append(Run(one.name, tuple(jobs)))
    problems += _same_names(spec, drawn)
    if problems:
        raise ConfigErrors(_merged(problems))
    return runs


def _count(spec: Spec) -> None:
    of_a_run = sum(
        max(1, len(command.variants)) * math.prod(len(values) for values in command.vary)
        for command in spec.commands
    )
    jobs = max(1, len(spec.variants)) * math.prod(len(values) for values in spec.vary) * of_a_run
    if jobs > MAX_JOBS:
        text = f"these are {jobs:,} command lines; {MAX_JOBS:,} are the most a sweep may have"
        raise ConfigErrors([Problem("vary", text, spec.at("vary"), show_value=False)])


def _draw(spec: Spec) -> Iterator[_Drawn]:
    for variant in spec.variants or [Variant("", None, ())]:
        for drawn in product(*spec.vary):
            said = [variant.name, *(setting.override for setting in drawn)]
            yield _Drawn(
                _name(spec, variant, drawn),
                variant.base or spec.base,
                (*spec.settings, *variant.settings, *drawn),
                " ".join(filter(None, said)),
            )


def _jobs(spec: Spec, run: _Drawn) -> Iterator[tuple[Command, tuple[Setting, ...]]]:
    for command in spec.commands:
        for variant in command.variants or [Variant("", None, ())]:
            for drawn in product(*command.vary):
                yield command, (*command.settings, *variant.settings, *drawn)


def _job(
    run: _Drawn, command: Command, settings: tuple[Setting, ...], overrides: Sequence[str]
) -> tuple[Job | None, list[Problem]]:
    """The job, or what is wrong with its config."""
    # Of a key written twice the last counts: a command line shows each once.
    chosen = {setting.key: setting.override for setting in (*run.settings, *settings)}
    written = [*chosen.values(), *overrides, f"{TAG}={run.name}"]
    try:
        config = load_config(run.base, written)
    except ConfigErrors as error:
        return None, error.problems
    options: list[str] = []
    if command.every_checkpoint:
        options = ["--every-checkpoint"]
    if command.encoder is not None:
        options = ["--encoder", os.fspath(config.run_folder / command.encoder)]
    arguments = (*command.words.split(), run.base, *written, *options)
    own = tuple(chosen[key] for key in dict.fromkeys(setting.key for setting in settings))
    return Job(command.words, arguments, own, tuple(options), config), []


# -------------------------------------------------------------------------------------------------------------- names
def _name(spec: Spec, variant: Variant, drawn: Sequence[Setting]) -> str:
    values = {setting.key: _in_a_name(setting.value) for setting in drawn}
    values |= {s.key: _in_a_name(s.value) for s in variant.settings}
    values |= {"run": variant.name}
    if spec.name is not None:
        return re.sub(r"{([^{}]*)}", lambda match: _filled(match[1], values, spec), spec.name)
    leaves = [setting.key.rpartition(".")[2] for setting in drawn]
    parts = [Path(spec.file).stem, variant.name]
    for setting, leaf in zip(drawn, leaves, strict=True):
        parts.append((leaf if leaves.count(leaf) == 1 else setting.key) + _in_a_name(setting.value))
    return "-".join(filter(None, parts))


def _filled(key: str, values: dict[str, str], spec: Spec) -> str:
    if key not in values or not values[key]:
        text = f"{{{key}}} is not what every run has: it can be {{run}}, or a key under vary or in every entry of runs"
        raise ConfigErrors([Problem("name", text, spec.at("name"))])
    return values[key]


def _in_a_name(value: Any) -> str:
    """A value as part of a folder's name: letters, digits, dots and dashes stay."""
    items = value if isinstance(value, list) else [value]
    text = "_".join(item if isinstance(item, str) else json.dumps(item) for item in items)
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)


def _same_names(spec: Spec, drawn: Iterable[_Drawn]) -> Iterator[Problem]:
    first: dict[str, _Drawn] = {}
    for run in drawn:
        other = first.setdefault(run.name, run)
        if other is not run:
            text = (
                f"two runs would be called {run.name} and share a folder: {other.differs}, and {run.differs}. "
                "Put what they differ in into name"
            )
            yield Problem("name", text, spec.at("name"))


# ----------------------------------------------------------------------------------------------------------- problems
def _placed(
    problems: Iterable[Problem], settings: Sequence[Setting], name: str, spec: Spec
) -> Iterator[Problem]:
    """The problems of one config, each at the line of the sweep that wrote the value."""
    lines = {setting.override: setting.origin for setting in settings}
    lines[f"{TAG}={name}"] = replace(spec.at("name"), written=name)
    for problem in problems:
        at = lines.get(problem.origin.override)
        yield problem if at is None else replace(problem, origin=at)


def _merged(problems: Iterable[Problem]) -> list[Problem]:
    """Each problem once, with all the values it was met with: a typo in one line is one mistake in every run."""
    met: dict[tuple, list[Problem]] = {}
    for problem in problems:
        origin = problem.origin
        met.setdefault((problem.key, problem.text, origin.file, origin.line, origin.override), []).append(
            problem
        )
    merged = []
    for same in met.values():
        written = ", ".join(dict.fromkeys(p.origin.written for p in same if p.origin.written))
        merged.append(replace(same[0], origin=replace(same[0].origin, written=written)))
    return merged
