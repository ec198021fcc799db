"""How a run talks to whoever reads its log: one line at a time."""

from collections.abc import Callable

# What is given to whatever has something to say. Progress.say keeps lines clear of a progress bar.
Say = Callable[[str], None]


def say_line(line: str) -> None:
    """Prints `line` and flushes: in a batch log, it must not come after the crash it explains, or never."""
    print(line, flush=True)
