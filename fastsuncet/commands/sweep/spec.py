"""A sweep as one YAML file: a config, what varies in it, and the commands for each of its runs.

base: cifar10_suncet.yaml                        a config, relative to the sweep's own folder
name: cifar10_suncet-p{data.split.fraction}      of each run; null: the sweep's name and what varies
set: {checkpoint.every_epochs: 50}               the same in all runs
vary:                                            a run for each combination
  data.split.fraction: [0.01, 0.1]
  meta.seed: [0, 1]
runs:                                            a run for each entry (and for each combination, where both are given)
  suncet: {criterion.supervision: suncet}
  baseline: {base: cifar10_simclr.yaml}          with its own config
commands:                                        for each run, in this order; a list [train, finetune] is enough
  train:
  finetune:
    set: {finetune.epochs: 90}                   for this command alone; vary and runs repeat it
    every_checkpoint: true
  evaluate npi: {encoder: finetune/labels10}     a path below the run's folder
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from fastsuncet.config.messages import ConfigErrors, Origin, Problem, words
from fastsuncet.config.reader import Document, Key, parse, read_file

COMMANDS = (
    "train",
    "finetune",
    "evaluate knn",
    "evaluate npi",
    "evaluate linear",
    "evaluate accuracy",
    "transfer",
)
GROUP = ("set", "vary", "runs")
TAG = "logging.write_tag"


@dataclass(frozen=True)
class Assignment:
    """One `section.key: value` of a sweep, and where it is written."""

    key: str
    value: Any
    origin: Origin

    @property
    def override(self) -> str:
        """The setting as an override on the command line."""
        return f"{self.key}={override_value(self.value)}"


@dataclass(frozen=True)
class Variant:
    """An entry of `runs`, of a sweep or of one of its commands. `base` is None where it is the sweep's."""

    name: str
    base: str | None
    settings: tuple[Assignment, ...]


@dataclass(frozen=True, kw_only=True)
class SettingsGroup:
    """What is set and what varies, in a sweep or in one of its commands."""

    settings: tuple[Assignment, ...]
    vary: tuple[tuple[Assignment, ...], ...]  # for each key, its values
    variants: tuple[Variant, ...]

    def combinations(self) -> Iterator[tuple[Variant, tuple[Assignment, ...]]]:
        """Yield each entry of `runs` (an empty one where there is none) with each combination of `vary`."""
        yield from product(self.variants or [Variant("", None, ())], product(*self.vary))

    @property
    def keys_varied(self) -> set[str]:
        """The keys under `vary`."""
        return {values[0].key for values in self.vary}


@dataclass(frozen=True, kw_only=True)
class Command(SettingsGroup):
    """One command for each run: its name and what it is given."""

    name: str
    encoder: str | None
    every_checkpoint: bool


@dataclass(frozen=True, kw_only=True)
class Spec(SettingsGroup):
    """A sweep's file. Whether its settings give valid configs is checked when the configs are loaded."""

    file: str
    base: str
    name: str | None
    commands: tuple[Command, ...]
    origins: dict[Key, Origin]

    def origin(self, key: str) -> Origin:
        """Return the line of a key of the file, or the file where the key is not written."""
        return self.origins.get((key,), Origin(self.file))


def override_value(value: Any) -> str:
    """Return `value` as written in an override: plain where it reads back the same, otherwise in quotes."""
    plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        back = parse(plain).values
    except ConfigErrors:
        back = None
    same = type(back) is type(value) and back == value and plain == plain.strip()
    return plain if same else json.dumps(value, ensure_ascii=False)


def read_sweep(path: str | os.PathLike[str]) -> Spec:
    """Read the sweep at `path`. Raises ConfigErrors with everything that is wrong with the sweep's own keys."""
    shown = os.fspath(path)
    return _Reader(read_file(Path(shown).expanduser(), shown)).spec()


class _Reader:
    """Takes a document apart and gathers the problems with their lines."""

    def __init__(self, document: Document):
        self.document, self.problems = document, list(document.problems)

    def spec(self) -> Spec:
        top, file = self.document.values, self.document.file
        if not isinstance(top, dict):
            text = "this is not a sweep: it has the keys base, commands, and vary or runs (`fastsuncet sweep --help`)"
            raise ConfigErrors([*self.problems, Problem("", text, Origin(file))])
        if not {"base", "commands"} & set(top) and {"data", "model", "criterion", "optimization"} & set(top):
            text = f"this is a config and not a sweep, which names a config as its base: `fastsuncet train {file}`"
            raise ConfigErrors([Problem("", text, Origin(file))])
        self.known(top, ("base", "name", *GROUP, "commands"), ())
        name = top.get("name")
        self.require(
            isinstance(name, str | None) and name != "",
            ("name",),
            "must be text such as simclr-{optimization.epochs}, or null",
        )
        if "vary" not in top and "runs" not in top:
            self.problems.append(Problem("", "nothing varies: vary or runs is missing", Origin(file)))
        base, group, commands = self.base(top.get("base"), ("base",)), self.group(top, ()), self.commands(top)
        if self.problems:
            raise ConfigErrors(self.problems)
        return Spec(
            file=file, base=base, name=name, commands=commands, origins=self.document.origins, **group
        )

    def require(self, holds: bool, key: Key, text: str) -> bool:
        """Note a problem unless it `holds`, at the line of the key or of the nearest key above it."""
        if not holds:
            while len(key) > 1 and key not in self.document.origins:
                key = key[:-1]
            self.problems.append(Problem(".".join(key), text, self.origin(key)))
        return holds

    def origin(self, key: Key) -> Origin:
        return self.document.origins.get(key, Origin(self.document.file))

    def known(self, names: Sequence[str] | dict, known: Sequence[str], at: Key, kind: str = "key") -> bool:
        """Return whether all names are known, and note a problem for each other one."""
        for name in names:
            near = get_close_matches(name, known, 1)
            rest = f"did you mean {near[0]}?" if near else f"the {kind}s are {words(known, 'and')}"
            self.require(name in known, (*at, name), f"there is no such {kind}; {rest}")
        return all(name in known for name in names)

    def base(self, value: Any, at: Key) -> str:
        if not self.require(
            isinstance(value, str) and value != "",
            at,
            "must be the name of a config file, such as cifar10_suncet.yaml",
        ):
            return ""
        return os.path.normpath(os.path.join(os.path.dirname(self.document.file), os.path.expanduser(value)))

    def group(self, entry: dict[str, Any], at: Key) -> dict[str, Any]:
        """Return the arguments of a SettingsGroup."""
        settings = self.settings(self.lines(entry, (*at, "set"), "section.key: value"), (*at, "set"))
        vary = []
        for name, values in self.lines(entry, (*at, "vary"), "section.key: [value, value, ...]").items():
            key = (*at, "vary", name)
            holds = isinstance(values, list) and values != []
            if self.require(holds, key, "must be a list of values, such as [0.01, 0.1]") and self.require(
                len({override_value(value) for value in values}) == len(values),
                key,
                "has a value twice: that would be the same run again",
            ):
                line = self.origin(key)
                each = [
                    Assignment(name, value, replace(line, written=override_value(value))) for value in values
                ]
                vary.append(self.allowed(each))
        variants = []
        for name, changes in self.lines(entry, (*at, "runs"), "name: {section.key: value, ...}").items():
            key = (*at, "runs", name)
            if self.require(
                isinstance(changes, dict | None),
                key,
                "must be {section.key: value, ...}; an empty {} changes nothing",
            ):
                changes = dict(changes or {})
                base = self.base(changes.pop("base"), (*key, "base")) if "base" in changes else None
                variants.append(Variant(name, base, self.settings(changes, key)))
        # A key that varies is written nowhere else: one place would overrule the other.
        varied = {values[0].key for values in vary if values}
        for setting in [*settings, *(each for variant in variants for each in variant.settings)]:
            if setting.key in varied:
                self.problems.append(
                    Problem(setting.key, "is under vary too; keep one of the two", setting.origin)
                )
        return {"settings": settings, "vary": tuple(vary), "variants": tuple(variants)}

    def lines(self, entry: dict[str, Any], at: Key, form: str) -> dict[str, Any]:
        """Return the mapping below a key of a group, {} where there is none."""
        value = entry.get(at[-1])
        holds = value is None or (isinstance(value, dict) and (value != {} or at[-1] == "set"))
        return value if self.require(holds, at, f"must be lines {form}") and value else {}

    def settings(self, values: dict[str, Any], at: Key) -> tuple[Assignment, ...]:
        return self.allowed(
            [Assignment(key, value, self.origin((*at, key))) for key, value in values.items()]
        )

    def allowed(self, settings: Sequence[Assignment]) -> tuple[Assignment, ...]:
        """Return the settings, and note a problem for one that names the run."""
        for each in settings:
            if each.key in (TAG, "logging"):
                self.problems.append(Problem(each.key, "the key name of a sweep names its runs", each.origin))
        return tuple(each for each in settings if each.key not in (TAG, "logging"))

    def commands(self, top: dict[str, Any]) -> tuple[Command, ...]:
        value, at = top.get("commands"), ("commands",)
        listed = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not self.require(
            bool(value) and (listed or isinstance(value, dict)),
            at,
            f"must be a list of {words(COMMANDS, 'and')}, or lines command: {{set: ...}}",
        ):
            return ()
        entries = dict.fromkeys(value) if isinstance(value, list) else dict(value or {})
        self.require(
            len(entries) == len(value or ()),
            at,
            "lists a command twice. List it once, and use vary or runs below it",
        )
        found = [self.command(name, entry, (*at, name)) for name, entry in entries.items()]
        return tuple(command for command in found if command is not None)

    def command(self, name: str, entry: Any, at: Key) -> Command | None:
        keys = (*GROUP, "encoder", "every_checkpoint")
        if not self.known([name], COMMANDS, at[:-1], "command") or not self.require(
            isinstance(entry, dict | None), at, f"must be empty, or have the keys {words(keys, 'and')}"
        ):
            return None
        entry = entry or {}
        self.known(entry, keys, at)
        encoder, every = entry.get("encoder"), entry.get("every_checkpoint", False)
        self.require(
            encoder is None or (name != "train" and _is_below(encoder)),
            (*at, "encoder"),
            "must be a path below the run's folder, for a command other than train",
        )
        self.require(
            every is False or (every is True and name not in ("train", "transfer") and encoder is None),
            (*at, "every_checkpoint"),
            "must be true or false; true for finetune and evaluate without an encoder",
        )
        group = self.group(entry, at)
        self.require(
            all(variant.base is None for variant in group["variants"]),
            (*at, "runs"),
            "a command has no base; write base in the sweep's runs",
        )
        return Command(name=name, encoder=encoder, every_checkpoint=every, **group)


def _is_below(path: Any) -> bool:
    return isinstance(path, str) and path != "" and path[0] not in "/~" and ".." not in path.split("/")
