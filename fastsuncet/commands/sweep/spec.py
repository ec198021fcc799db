"""A sweep as one YAML file, which the help of cli/sweep.py shows: a config, what varies in it, and the commands."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, create_model

from fastsuncet.config.messages import allowed, field_problems
from fastsuncet.config.problems import ConfigErrors, Origin, Problem, words
from fastsuncet.config.reader import Document, as_yaml, read_file
from fastsuncet.config.schema import BELOW, CONFIG, Schema, Section, Switch, described, matching
from fastsuncet.config.shipped import find_config
from pipelines.sampling.augmentation import Allowed

EVALUATIONS = tuple(f"evaluate {kind}" for kind in ("knn", "npi", "linear", "accuracy"))
COMMANDS = ("train", "finetune", *EVALUATIONS, "transfer")
TAG = "logging.write_tag"

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
        if not self.vary and not self.runs:
            yield Problem("", "nothing varies: vary or runs is missing")
        if not self.chosen:
            yield Problem("commands", f"must be {allowed(SWEEP, 'commands')}")
        for group, path, key, values in self.lines():
            if key in (TAG, "logging"):
                yield Problem(path, "the key name of a sweep names its runs")
            elif key == "base" and group is not self:
                yield Problem(path, "a command has no base; write base in the sweep's runs")
            elif key == "base" and not all(each and isinstance(each, str) for each in values):
                yield Problem(path, f"must be {allowed(SWEEP, 'base')}")
            elif key in group.vary and not path.endswith(f"vary.{key}"):
                yield Problem(path, "is under vary too; keep one of the two")
        for name, command in self.chosen.items():
            if name == "train" and (command.vary or command.runs):
                text = "cannot have vary or runs, because all its trainings would share a folder"
                yield Problem("commands.train", f"{text}; write them at the top of the sweep")
            if command.encoder and name == "train":
                yield Problem(
                    f"commands.{name}.encoder", "is for the other commands: train starts a new encoder"
                )
            if command.every_checkpoint and (name in ("train", "transfer") or command.encoder):
                text = "can be true for finetune and evaluate without an encoder"
                yield Problem(f"commands.{name}.every_checkpoint", text)


SWEEP = Schema(Spec)


def read_sweep(path: str | os.PathLike[str]) -> Spec:
    """Read the sweep at `path`. Raises ConfigErrors with everything that is wrong with the sweep's own keys."""
    file = find_config(os.fspath(path))
    document = read_file(Path(file), file, SWEEP)
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
