"""Print lines and progress, shorten lists of names, write tables, and go on without the output once it is lost."""

import contextlib
import csv
import functools
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

# A function that prints one line. ProgressBar.say keeps lines clear of the bar.
Say = Callable[[str], None]


def say_line(line: str, stream: TextIO | None = None) -> None:
    """Print `line` on standard output, or on `stream`, and flush it.

    Flushed, because in a batch log it must come before the traceback that it explains.
    """
    stream = stream or sys.stdout
    if stream is None:  # the process was started without one
        return
    with survive_lost_output(stream):
        # In one write, where print makes two: trackers say lines from threads, and two would run into each other.
        stream.write(f"{printable(line, stream.encoding)}\n")
        stream.flush()


def first_five(names: Sequence[str]) -> str:
    """Return the first five names as a message lists them, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def counted(count: int, noun: str) -> str:
    """Return "1 image", "2,000 images", "2 processes"."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def csv_table(rows: Sequence[Sequence[Any]]) -> bytes:
    """Return rows as CSV; None is an empty cell, and floats keep all their digits."""
    text = io.StringIO()
    # A space before a cell is left out when a table of labels is read, unless the cell is quoted.
    spaces = any(isinstance(cell, str) and cell.startswith(" ") for row in rows for cell in row)
    quoting = csv.QUOTE_ALL if spaces else csv.QUOTE_MINIMAL
    csv.writer(text, lineterminator="\n", quoting=quoting).writerows(rows)
    return text.getvalue().encode(errors="surrogateescape")  # names of files and folders are bytes


def duration(seconds: float) -> str:
    """Return "0.21 s", "48 s", "21 min", "2 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.2g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02} min"


def span(least: int, most: int) -> str:
    """Return "3 to 2,000", or "5" where both are 5."""
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


say_once = functools.cache(say_line)


def printable(text: str, encoding: str | None = None) -> str:
    r"""Return `text` with escapes (\x1b) for what moves the cursor, reverses the line, or is not in `encoding`.

    File names, labels and lines of CSV files are in messages, and data must not control the terminal.
    """
    shown = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown).encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")


def show_progress(what: object, done: int, total: int) -> None:
    """Show how many of `total` are done, on one line of a terminal; nothing elsewhere."""
    if sys.stderr and sys.stderr.isatty():  # a process can be started without one
        shown = printable(f"{what}: {done:,} of {total:,}", sys.stderr.encoding)
        print(f"\r{shown}", end="" if done < total else "\n", file=sys.stderr)


@contextlib.contextmanager
def survive_lost_output(stream: TextIO) -> Iterator[None]:
    """Go on if `stream` cannot be written inside: its reader has ended (`| head`), or its disk is full.

    A run of days must not end for its log. From then on the stream is discarded; one line on standard error says so.
    """
    try:
        yield
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        # Standard error can be lost as well. Then this discards it, before Python's last flush of it fails (code 120).
        say_line(f"the output cannot be written any more ({error.strerror}): going on without it", sys.stderr)
