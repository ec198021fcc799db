"""Reads a sweep's file into a `Spec`, or says everything that is wrong with its own keys, each with its line."""

import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fastsuncet.commands.sweep.spec import COMMANDS, TAG, Command, Setting, Spec, Variant, as_yaml
from fastsuncet.config.messages import ConfigErrors, Origin, Problem, words
from fastsuncet.config.reader import Document, Key, read_file

TOP = ("base", "name", "set", "vary", "runs", "commands")
OF_A_COMMAND = ("set", "vary", "runs", "encoder", "every_checkpoint")


def read_sweep(path: str | os.PathLike[str]) -> Spec:
    """Reads the sweep at `path`. Raises ConfigErrors with everything that is wrong with its own keys."""
    shown = os.fspath(path)
    return _Reader(read_file(Path(shown).expanduser(), shown)).spec()


class _Reader:
    """Takes a document apart, gathering problems with their lines."""

    def __init__(self, document: Document):
        self.document, self.problems = document, list(document.problems)

    def wrong(self, key: Key, text: str) -> None:
        at = key
        while at and at not in self.document.origins:  # an entry of a list has no line of its own
            at = at[:-1]
        origin = self.document.origins.get(at, Origin(self.document.file))
        self.problems.append(Problem(".".join(at or key), text, origin))

    def spec(self) -> Spec:
        top = self.document.values
        if not isinstance(top, dict):
            text = "this is not a sweep: it has the keys base, commands, and vary or runs (`fastsuncet sweep --help`)"
            raise ConfigErrors([*self.problems, Problem("", text, Origin(self.document.file))])
        if not {"base", "commands"} & set(top) and {"data", "model", "criterion", "optimization"} & set(top):
            command = f"fastsuncet train {self.document.file}"
            text = f"this is a config and not a sweep, which names one as its base: `{command}`"
            raise ConfigErrors([Problem("", text, Origin(self.document.file))])
        for key in top:
            if key not in TOP:
                self.wrong((key,), _unknown(key, TOP))
        base = self.base(top.get("base"), ("base",))
        name = top.get("name")
        if not isinstance(name, str | None) or name == "":
            self.wrong(("name",), "must be text such as simclr-{optimization.epochs}, or null")
        settings = self.settings(top.get("set"), ("set",))
        vary = self.vary(top.get("vary"), ("vary",))
        variants = self.variants(top.get("runs"), ("runs",))
        if not vary and not variants and "vary" not in top and "runs" not in top:
            self.problems.append(
                Problem("", "nothing varies: vary or runs is missing", Origin(self.document.file))
            )
        commands = self.commands(top.get("commands"))
        self.twice(settings, vary, variants)
        if self.problems:
            raise ConfigErrors(self.problems)
        return Spec(self.document.file, base, name, settings, vary, variants, commands, self.document.origins)

    def base(self, value: Any, key: Key) -> str:
        if not isinstance(value, str) or not value:
            self.wrong(key, "must be the name of a config file, such as cifar10_suncet.yaml")
            return ""
        value = os.path.expanduser(value)
        return os.path.normpath(os.path.join(os.path.dirname(self.document.file), value))

    def settings(self, value: Any, key: Key) -> tuple[Setting, ...]:
        if value is None:
            return ()
        if not isinstance(value, dict):
            self.wrong(key, "must be lines section.key: value")
            return ()
        return tuple(
            self.checked(Setting(name, item, self.line((*key, name))) for name, item in value.items())
        )

    def vary(self, value: Any, key: Key) -> tuple[tuple[Setting, ...], ...]:
        if value is None:
            return ()
        if not isinstance(value, dict) or not value:
            self.wrong(key, "must be lines section.key: [value, value, ...]")
            return ()
        varied = []
        for name, items in value.items():
            at = (*key, name)
            if not isinstance(items, list) or not items:
                self.wrong(at, "must be a list of the values it takes, such as [0.01, 0.1]")
                continue
            if len({as_yaml(item) for item in items}) < len(items):
                self.wrong(at, "has a value twice: that would be the same run again")
                continue
            line = self.line(at)
            each = [Setting(name, item, Origin(line.file, line.line, as_yaml(item))) for item in items]
            varied.append(tuple(self.checked(each)))
        return tuple(varied)

    def variants(self, value: Any, key: Key) -> tuple[Variant, ...]:
        if value is None:
            return ()
        if not isinstance(value, dict) or not value:
            self.wrong(key, "must be lines name: {section.key: value, ...}")
            return ()
        found = []
        for name, entry in value.items():
            at = (*key, name)
            if not isinstance(entry, dict | None):
                self.wrong(at, "must be {section.key: value, ...}; an empty {} changes nothing")
                continue
            entry = dict(entry or {})
            base = self.base(entry.pop("base"), (*at, "base")) if "base" in entry else None
            found.append(Variant(name, base, self.settings(entry, at)))
        return tuple(found)

    def commands(self, value: Any) -> tuple[Command, ...]:
        plain = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not value or not (plain or isinstance(value, dict)):
            self.wrong(
                ("commands",), f"must be a list of {words(COMMANDS, 'and')}, or lines command: {{set: ...}}"
            )
            return ()
        entries = dict.fromkeys(value) if plain else value
        if len(entries) < len(value):
            self.wrong(("commands",), "has a command twice; vary and runs below it make it several")
        return tuple(c for name, entry in entries.items() if (c := self.command(name, entry)) is not None)

    def command(self, name: str, entry: Any) -> Command | None:
        at = ("commands", name)
        if name not in COMMANDS:
            self.wrong(at, _unknown(name, COMMANDS, "command of a sweep"))
            return None
        if not isinstance(entry, dict | None):
            self.wrong(at, f"must be empty, or have the keys {words(OF_A_COMMAND, 'and')}")
            return None
        entry = entry or {}
        for key in entry:
            if key not in OF_A_COMMAND:
                self.wrong((*at, key), _unknown(key, OF_A_COMMAND))
        encoder, every = entry.get("encoder"), entry.get("every_checkpoint", False)
        if encoder is not None and (name == "train" or not _is_below(encoder)):
            self.wrong(
                (*at, "encoder"), "must be a path below the run's folder, for a command other than train"
            )
        if not isinstance(every, bool) or (every and (name in ("train", "transfer") or encoder is not None)):
            self.wrong(
                (*at, "every_checkpoint"),
                "must be true or false; true for finetune and evaluate without an encoder",
            )
        settings = self.settings(entry.get("set"), (*at, "set"))
        vary, variants = (
            self.vary(entry.get("vary"), (*at, "vary")),
            self.variants(entry.get("runs"), (*at, "runs")),
        )
        if any(variant.base is not None for variant in variants):
            self.wrong((*at, "runs"), "a command has no base of its own; write base in the sweep's runs")
        self.twice(settings, vary, variants)
        return Command(name, settings, vary, variants, encoder, every is True)

    def checked(self, settings: Any) -> Iterator[Setting]:
        for setting in settings:
            if setting.key in (TAG, "logging"):
                self.problems.append(
                    Problem(setting.key, "the runs of a sweep are named by its key name", setting.origin)
                )
            else:
                yield setting

    def twice(self, settings: Any, vary: Any, variants: Any) -> None:
        """A key that varies has no other place: it would be said in one and overruled in the other."""
        varied = {values[0].key for values in vary if values}
        for setting in [*settings, *(s for variant in variants for s in variant.settings)]:
            if setting.key in varied:
                self.problems.append(
                    Problem(setting.key, "stands under vary too; keep one of the two", setting.origin)
                )

    def line(self, key: Key) -> Origin:
        while key and key not in self.document.origins:
            key = key[:-1]
        return self.document.origins.get(key, Origin(self.document.file))


def _is_below(path: Any) -> bool:
    return (
        isinstance(path, str)
        and path != ""
        and not path.startswith(("/", "~"))
        and ".." not in path.split("/")
    )


def _unknown(name: str, known: Key, kind: str = "key") -> str:
    near = get_close_matches(name, known, 1)
    rest = f"did you mean {near[0]}?" if near else f"there are {words(known, 'and')}"
    return f"there is no such {kind}; {rest}"
