"""Print lines for the reader of a run's log."""

import sys
from collections.abc import Callable

from pipelines.output import printable, say_line, survive_lost_output

__all__ = ["Say", "printable", "say_line", "show_progress", "survive_lost_output"]

# A function that prints one line. ProgressBar.say keeps lines clear of the bar.
Say = Callable[[str], None]


def show_progress(what: object, done: int, total: int) -> None:
    """Show how many of `total` are done, on one line of a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r{what}: {done:,} of {total:,}", end="" if done < total else "\n", file=sys.stderr)
