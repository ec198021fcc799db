"""A sweep as one YAML file: a config, what varies in it, and what is done with each of its runs.

base: cifar10_suncet.yaml                        a config, taken from the sweep's own folder
name: cifar10_suncet-p{data.split.fraction}      of each run; null: the sweep's name and what varies
set: {checkpoint.every_epochs: 50}               the same in all runs
vary:                                            a run for each combination
  data.split.fraction: [0.01, 0.1]
  meta.seed: [0, 1]
runs:                                            a run for each entry (and for each combination, where both stand)
  suncet: {criterion.supervision: suncet}
  baseline: {base: cifar10_simclr.yaml}          with a config of its own
commands:                                        with each run, in this order; [train, finetune] where that is all
  train:
  finetune:
    set: {finetune.epochs: 90}                   of this command alone; vary and runs make it several
    every_checkpoint: true
  evaluate npi: {encoder: finetune/labels10}     a path below the run's folder
"""

import json
from dataclasses import dataclass
from typing import Any

from fastsuncet.config.messages import ConfigErrors, Origin
from fastsuncet.config.reader import Document

COMMANDS = (
    "train",
    "finetune",
    "evaluate knn",
    "evaluate npi",
    "evaluate linear",
    "evaluate accuracy",
    "transfer",
)
TAG = "logging.write_tag"


@dataclass(frozen=True)
class Setting:
    """One `section.key: value` of a sweep, and the line it stands on."""

    key: str
    value: Any
    origin: Origin

    @property
    def override(self) -> str:
        """As it would be written behind a config on the command line."""
        return f"{self.key}={as_yaml(self.value)}"


@dataclass(frozen=True)
class Variant:
    """An entry of `runs`, of a sweep or of one of its commands. `base` is None where it is the sweep's."""

    name: str
    base: str | None
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class Command:
    """What is done with a run: words of the command line, and what they are given."""

    words: str
    settings: tuple[Setting, ...] = ()
    vary: tuple[tuple[Setting, ...], ...] = ()  # of each key, its values
    variants: tuple[Variant, ...] = ()
    encoder: str | None = None
    every_checkpoint: bool = False


@dataclass(frozen=True)
class Spec:
    """A sweep's file, read; whether its settings make sound configs is for the configs' loader to say."""

    file: str
    base: str
    name: str | None
    settings: tuple[Setting, ...]
    vary: tuple[tuple[Setting, ...], ...]
    variants: tuple[Variant, ...]
    commands: tuple[Command, ...]
    origins: dict[tuple[str, ...], Origin]

    def at(self, *key: str) -> Origin:
        """The line of a key, or the file where that is not written."""
        return self.origins.get(key, Origin(self.file))


def as_yaml(value: Any) -> str:
    """`value` as an override has it: plain where it reads back the same, in quotes where it would not."""
    plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        back = Document(plain).values
    except ConfigErrors:
        back = None
    same = type(back) is type(value) and back == value and plain == plain.strip()
    return plain if same else json.dumps(value, ensure_ascii=False)
