"""Print lines for the reader of a run's log, read the paths people write, start our command line in another process."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from pipelines.output import printable, say_line, survive_lost_output

__all__ = [
    "Say",
    "cli_command",
    "printable",
    "say_line",
    "show_progress",
    "survive_lost_output",
    "typed_path",
]

# A function that prints one line. ProgressBar.say keeps lines clear of the bar.
Say = Callable[[str], None]


def show_progress(what: object, done: int, total: int) -> None:
    """Show how many of `total` are done, on one line of a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r{what}: {done:,} of {total:,}", end="" if done < total else "\n", file=sys.stderr)


def typed_path(text: str | os.PathLike[str] | None) -> Path:
    """Return a path that a person wrote, with ~ expanded; None: the empty path.

    The `~name` of no account stays as it is, as in a shell, and is then found missing: pathlib raises RuntimeError.
    """
    return Path(os.path.expanduser(text or ""))


def cli_command() -> list[str]:
    """Return the words that start `fastsuncet` in another process; append the arguments.

    The process imports the same copy of `fastsuncet` and `pipelines` as this one, installed or not, and nothing from
    the working directory; see `fastsuncet/__main__.py`.
    """
    return [sys.executable, str(Path(__file__).resolve().with_name("__main__.py"))]
