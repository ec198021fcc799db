"""What is wrong with a config, gathered and laid out for the person who wrote it: every problem at once,
each with its file and line, the key, the value as written, and what is allowed.
"""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fastsuncet.errors import ConfigError

WIDTH = 60  # characters of a value worth repeating in a message


@dataclass(frozen=True)
class Origin:
    """Where a value was written. `override` is the whole argument where it came from the command line."""

    file: str = ""
    line: int = 0
    written: str = ""
    override: str = ""

    def __str__(self) -> str:
        if self.override:
            return "command line"
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Problem:
    """One thing to change. `key` is dotted ("criterion.temperature"), empty where it is about the file as a
    whole.
    """

    key: str
    text: str
    origin: Origin = Origin()
    show_value: bool = True

    def __str__(self) -> str:
        subject = shorten(self.key)
        if self.origin.override:
            subject = shorten(self.origin.override)
        elif self.key and self.show_value and self.origin.written:
            subject = f"{shorten(self.key)}: {shorten(self.origin.written)}"
        head = ": ".join(part for part in (str(self.origin), subject) if part)
        lines = textwrap.wrap(self.text, 100, break_long_words=False, break_on_hyphens=False)
        return f"  {head}\n" + "\n".join(f"      {line}" for line in lines)

    def at(self, origin: Origin, show_value: bool = True) -> "Problem":
        """The same problem, with the place it was written at."""
        return replace(self, origin=origin, show_value=show_value)


class ConfigErrors(ConfigError):
    """Everything that is wrong with a config. `problems` holds each; the text lists them in the order of
    the files.
    """

    def __init__(self, problems: Iterable[Problem]):
        unique = dict.fromkeys(problems)  # a rule and a field may say the same about the same place
        self.problems = sorted(unique, key=lambda p: (bool(p.origin.override), p.origin.file, p.origin.line))
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{count} in the config\n\n" + "\n".join(map(str, self.problems)))


def shorten(text: str) -> str:
    """One line of at most WIDTH characters, without control characters: what a message repeats of a value."""
    line = " ".join(text.split())
    line = "".join(letter if letter.isprintable() else "?" for letter in line)
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def words(items: Iterable[object], last: str = "or") -> str:
    """A list as a sentence has it: a, b or c."""
    *head, tail = [str(item) for item in items]
    return f"{', '.join(head)} {last} {tail}" if head else tail
