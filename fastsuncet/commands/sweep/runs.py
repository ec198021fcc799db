"""A sweep's file, which the help of cli/sweep.py shows, and its runs: every combination, its configs and commands."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, create_model

from fastsuncet.config import Config, load_config
from fastsuncet.config.messages import allowed, field_problems
from fastsuncet.config.problems import COMMAND_LINE, ConfigErrors, Origin, Problem, words
from fastsuncet.config.reader import Document, as_yaml, parse_override, read_file
from fastsuncet.config.schema import BELOW, CONFIG, Schema, Section, Switch, described, matching
from fastsuncet.config.shipped import find_config
from fastsuncet.errors import ConfigError
from pipelines.sampling.augmentation import Allowed

EVALUATIONS = tuple(f"evaluate {kind}" for kind in ("knn", "npi", "linear", "accuracy"))
COMMANDS = ("train", "finetune", *EVALUATIONS, "transfer")
TAG = "logging.write_tag"
IN_NAME = re.compile(r"{([^{}]*)}")  # a key in the name of a sweep's runs

# A key without a value below it is the same as an empty one.
Empty = BeforeValidator(lambda value: {} if value is None else value)
Settings = Annotated[dict[str, Any], Empty, described("lines section.key: value")]
# The check compares texts, because True == 1.
Values = Annotated[list[Any], Allowed(lambda each: 0 < len(each) == len(set(map(as_yaml, each))), "")]
Vary = Annotated[
    dict[str, Values], Empty, described("lines section.key: [value, value, ...], with each value once")
]
Runs = Annotated[dict[str, Settings], Empty, described("lines name: {section.key: value, ...}")]


class Group(Section):
    """What is set and what varies, in a sweep or in one of its commands."""

    set: Settings = Field(default={})
    vary: Vary = Field(default={})
    runs: Runs = Field(default={})


class Command(Group):
    """One command for each run, and what it evaluates."""

    encoder: Annotated[str, matching(BELOW, "a path below the run's folder")] | None = None
    every_checkpoint: Switch = False


_FIELDS = dict[str, Any]({name: (Command, Command()) for name in COMMANDS})
Commands = create_model("Commands", __base__=Section, **_FIELDS)


class Spec(Group):
    """A sweep's file. Whether its settings give valid configs is checked when the configs are loaded."""

    base: Annotated[str, matching(".+", "the name of a config file, such as cifar10_suncet.yaml")]
    name: Annotated[str, matching(".+", "text such as simclr-{optimization.epochs}")] | None = None
    commands: Annotated[
        Commands,  # pyright: ignore[reportInvalidTypeForm]
        described(f"a list of {words(COMMANDS, 'and')}, each once, or lines command: {{set: ...}}"),
    ]
    _document: Document = PrivateAttr(default_factory=Document)

    @property
    def file(self) -> str:
        """Name of the file."""
        return self._document.file

    @property
    def chosen(self) -> dict[str, Command]:
        """The commands, in the order of the file."""
        return {name: getattr(self.commands, name) for name in self._document.values["commands"]}

    def origin(self, key: str, *values: Any) -> Origin:
        """Return the line of a dotted key of the file, with `values` as what is written there."""
        line = self._document.locate(Problem(key, "")).origin
        return replace(line, written=", ".join(map(as_yaml, values)))

    def lines(self) -> Iterator[tuple[Group, str, str, list[Any]]]:
        """Yield (its group, dotted key in the file, section.key, values) of each setting."""
        for at, group in [("", self), *((f"commands.{name}.", each) for name, each in self.chosen.items())]:
            yield from ((group, f"{at}vary.{key}", key, values) for key, values in group.vary.items())
            runs = {f"runs.{name}": settings for name, settings in group.runs.items()}
            for entry, settings in ({"set": group.set} | runs).items():
                yield from ((group, f"{at}{entry}.{key}", key, [value]) for key, value in settings.items())

    def conflicts(self) -> Iterator[Problem]:
        """Yield what is wrong between keys of the file."""
        for group, path, key, values in self.lines():
            if key in (TAG, "logging"):
                yield Problem(path, "the key name of a sweep names its runs")
            elif key == "base" and not all(each and isinstance(each, str) for each in values):
                yield Problem(path, f"must be {allowed(SWEEP, 'base')}")
            elif key in group.vary and not path.endswith(f"vary.{key}"):
                yield Problem(path, "is under vary too; keep one of the two")
        for name, command in self.chosen.items():
            if name == "train" and (command.vary or command.runs):
                text = "cannot have vary or runs, because all its trainings would share a folder"
                yield Problem("commands.train", f"{text}; write them at the top of the sweep")
            if command.encoder and (name == "train" or command.every_checkpoint):
                yield Problem(f"commands.{name}.encoder", "goes with neither train nor every_checkpoint")
            if command.every_checkpoint and name in ("train", "transfer"):
                yield Problem(f"commands.{name}.every_checkpoint", "is for finetune and evaluate")


SWEEP = Schema(Spec)


def read_sweep(path: str | os.PathLike[str]) -> Spec:
    """Read the sweep at `path`. Raises ConfigErrors with everything that is wrong with the sweep's own keys."""
    file = find_config(os.fspath(path))
    document = read_file(file, SWEEP)
    values = document.values
    if not {"base", "commands"} & set(values) and set(CONFIG.sections) & set(values):
        text = (
            f"this is a config and not a sweep, which names a config as its base: `fastsuncet train {path}`"
        )
        raise ConfigErrors([document.locate(Problem("", text))])
    listed = values.get("commands")
    if isinstance(listed, list) and len({each for each in listed if isinstance(each, str)}) == len(listed):
        values["commands"] = {name: {} for name in listed}
    try:
        spec = Spec.model_validate_json(json.dumps(values))
        spec._document = document
        problems = list(spec.conflicts())
    except ValidationError as error:
        problems = field_problems(error, document)
    if problems:
        raise ConfigErrors(map(document.locate, problems))
    return spec


# ------------------------------------------------------------------------------------------------------ its runs
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


class Case(NamedTuple):
    """One combination of a group: an entry of `runs` ("" where there is none) with a value for each key of `vary`."""

    entry: str
    named: dict[str, Any]  # what tells it from the others
    settings: dict[str, Any]  # all of it


def _cases(group: Group) -> Iterator[Case]:
    for entry, changes in (group.runs or {"": {}}).items():
        for values in product(*group.vary.values()):
            named = changes | dict(zip(group.vary, values, strict=True))
            yield Case(entry, named, group.set | named)


def expand(spec: Spec, overrides: Sequence[str] = ()) -> list[Run]:
    """Return the runs of a sweep in the order of its file, with `overrides` of the command line applied to each.

    Raises ConfigErrors with everything that is wrong with any config, and for two runs of one name or an override of a
    key that varies.
    """
    varying = {TAG, *spec.vary, *IN_NAME.findall(spec.name or "")}
    varying |= {key for command in spec.chosen.values() for key in command.vary}
    problems = [
        Problem(key, "varies in this sweep; leave it out, or choose runs with --only", Origin(COMMAND_LINE))
        for override in overrides
        for key in parse_override(override).origins  # also those of a whole section: meta={seed: 3}
        if key in varying
    ]
    origins = {
        f"{key}={as_yaml(v)}": spec.origin(path, v) for _, path, key, values in spec.lines() for v in values
    }
    runs: list[Run] = []
    differences: dict[str, str] = {}
    for case in _cases(spec):
        name, different = _name(spec, case), " ".join([case.entry, *_overrides(case.named)]).strip()
        if name in differences:
            text = (
                f"two runs would be called {name} and share a folder: {differences[name]}, and {different}. "
                "Put what they differ in into name"
            )
            problems.append(Problem("name", text, spec.origin("name", spec.name)))
        differences[name] = different
        tag = f"{TAG}={name}"
        origins[tag] = spec.origin("name", name)
        found: list[Job] = []
        for command, group in spec.chosen.items():
            for own in _cases(group):
                settings = case.settings | own.settings
                base = find_config(settings.pop("base", spec.base), os.path.dirname(spec.file))
                base = os.path.normpath(base)
                changes = [*_overrides(settings), *overrides, tag]
                try:
                    config = load_config(base, changes, origins)
                except ConfigErrors as error:
                    problems += error.problems
                    continue
                options = ["--every-checkpoint"] if group.every_checkpoint else []
                if group.encoder:
                    options = ["--encoder", os.fspath(config.run_folder / group.encoder)]
                arguments = (*command.split(), base, *changes, *options)
                found.append(Job(command, arguments, tuple(_overrides(own.settings)), tuple(options), config))
        runs.append(Run(name, tuple(found)))
    if problems:
        raise ConfigErrors(problems)
    return runs


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={as_yaml(value)}" for key, value in settings.items()]


def _name(spec: Spec, case: Case) -> str:
    if spec.name is None:
        leaves = [key.rpartition(".")[2] for key in spec.vary]
        parts = [
            (leaf if leaves.count(leaf) == 1 else key) + _in_a_name(case.named[key])
            for leaf, key in zip(leaves, spec.vary, strict=True)
        ]
        return "-".join(filter(None, [Path(spec.file).stem, case.entry, *parts]))
    values = {key: _in_a_name(value) for key, value in case.named.items()}
    values |= {"run": case.entry} if spec.runs else {}
    for key in IN_NAME.findall(spec.name):
        if not values.get(key):
            text = f"{{{key}}} is not in every run: it can be {{run}}, or a key under vary or in every entry of runs"
            if key in values:
                text = f'{{{key}}} is "" in a run: replace that "" under runs or vary, or leave {{{key}}} out of name'
            raise ConfigErrors([Problem("name", text, spec.origin("name", spec.name))])
    return IN_NAME.sub(lambda match: values[match[1]], spec.name)


def _in_a_name(value: Any) -> str:
    """Return a value as part of a folder's name: letters, digits, dots and dashes stay."""
    items = value if isinstance(value, list) else [value]
    text = "_".join(item if isinstance(item, str) else json.dumps(item) for item in items)
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)


# ----------------------------------------------------------------------------------------------- which runs are ours
def runs_named(runs: Sequence[Run], patterns: Sequence[str]) -> list[Run]:
    """Return the runs whose name matches a pattern (* and ? as in file names); all of them without patterns.

    Raises ConfigError for a pattern that no name matches.
    """
    for pattern in patterns:
        if not any(fnmatchcase(run.name, pattern) for run in runs):
            raise ConfigError(
                f"--only {pattern}: no run has such a name; --dry-run lists the {len(runs)} runs"
            )
    return [run for run in runs if not patterns or any(fnmatchcase(run.name, each) for each in patterns)]


def runs_of_task(
    runs: Sequence[Run], task: tuple[int, int] | None, environment: Mapping[str, str]
) -> tuple[list[Run], str]:
    """Return the runs of this task, and the task in words (empty where all runs are its own).

    `task` is (I, N): every N-th run from the I-th on. Without it, task T of a Slurm array does run T alone, whichever
    part of the array was submitted, so that a task submitted again is the same run again. Raises ConfigError.
    """
    number = environment.get("SLURM_ARRAY_TASK_ID")
    if task is None and number is None:
        return list(runs), ""
    share, count = task or (int(number or 0), len(runs))
    if not 1 <= share <= count:
        raise ConfigError(f"there is no run {share}: a Slurm array of the {count} runs is --array=1-{count}")
    return list(runs[share - 1 :: count]), f"task {share}/{count}"
