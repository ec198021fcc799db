"""What is wrong with a config, each problem at the line that has it, and `ConfigErrors`, which reports them all."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fastsuncet.errors import ConfigError
from pipelines.output import counted

WIDTH = 60  # characters of a value that a message repeats
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Origin:
    """Where a value was written, and the value as it was written."""

    file: str = ""
    line: int = 0
    written: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Problem:
    """One thing to change. `key` is dotted ("criterion.temperature"), or empty for the file as a whole."""

    key: str
    text: str
    origin: Origin = Origin()
    meant: str = ""  # the key that an unknown key was probably meant to be

    def __str__(self) -> str:
        equals = "=" if self.origin.file == COMMAND_LINE else ": "
        subject = shorten(self.key) + (equals + shorten(self.origin.written) if self.origin.written else "")
        head = ": ".join(part for part in (str(self.origin), subject) if part)
        lines = textwrap.wrap(self.text, 100, break_long_words=False, break_on_hyphens=False)
        return "\n      ".join([f"  {head}", *lines])


class ConfigErrors(ConfigError):
    """Everything that is wrong with a config: `problems` in the order of the files, the command line last.

    A problem that several values of one line have is reported once, with these values.
    """

    def __init__(self, problems: Iterable[Problem]):
        found: dict[Problem, dict[str, None]] = {}
        for each in problems:
            values = found.setdefault(replace(each, origin=replace(each.origin, written="")), {})
            values |= {each.origin.written: None} if each.origin.written else {}
        self.problems = sorted(
            (replace(p, origin=replace(p.origin, written=", ".join(values))) for p, values in found.items()),
            key=lambda p: (p.origin.file == COMMAND_LINE, p.origin.file, p.origin.line),
        )
        count = counted(len(self.problems), "problem")
        super().__init__(f"{count} in the config\n\n" + "\n".join(map(str, self.problems)))


def shorten(text: str) -> str:
    """Return one line of at most WIDTH characters, without control characters."""
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def words(items: Iterable[object], last: str = "or") -> str:
    """Return a list as in a sentence: a, b or c."""
    *head, tail = [str(item) for item in items]
    return f"{', '.join(head)} {last} {tail}" if head else tail
