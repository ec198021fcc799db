"""Names of files: kept as lines, read from lists that people write, and what none must do."""

import os
from collections.abc import Iterable, Sequence

import numpy as np

from pipelines.data_errors import DataError
from pipelines.output import counted, first_five

# Folders of a NAS, a file system or an archive program: thumbnails, deleted files, what nobody may list.
_SYSTEM = ("@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found", "__MACOSX")


def as_lines(names: Iterable[str]) -> np.ndarray:
    """Return names as UTF-8 lines, uint8, each with a line feed at its end: the bytes that they have on the disk.

    Raises DataError for a name with a line break or that is not UTF-8: it could not stand in a list or a CSV either.
    """
    names = list(names)
    # All at once, because a million of them take seconds; one by one only to find the wrong ones.
    lines = _joined(names)
    if lines is None:
        wrong = [repr(name) for name in names if _joined([name]) is None]
        count = counted(len(wrong), "name")
        raise DataError(f"{count} with a line break or not in UTF-8, to be renamed: {first_five(wrong)}")
    return np.frombuffer(lines, np.uint8)


def _joined(names: Sequence[str]) -> bytes | None:
    try:
        lines = os.fsencode("\n".join([*names, ""]))
        lines.decode()
    except UnicodeError:
        return None
    return lines if lines.count(b"\n") == len(names) and b"\r" not in lines else None


def from_lines(lines: np.ndarray) -> list[str]:
    """Return the names in what `as_lines` returned. Raises DataError when the last one has no line feed."""
    *names, rest = os.fsdecode(lines.tobytes()).split("\n")
    if rest:
        raise DataError("a list of names is cut off: it does not end in a line feed")
    return names


def listed_lines(content: bytes) -> list[str]:
    """Return the lines of a UTF-8 file that lists names, with their ends, decoded as the names of files are.

    Raises UnicodeDecodeError when it is not UTF-8.
    """
    content.decode()
    return [os.fsdecode(line) for line in content.splitlines(keepends=True)]


def links_out(path: str | os.PathLike, root: str | os.PathLike) -> bool:
    """Return whether a path below `root` leads out of it by a link."""
    return not os.path.realpath(path).startswith(os.path.join(os.path.realpath(root), ""))


def passed_over(name: str) -> bool:
    """Return whether a file or folder is not looked at, wherever it lies: it is hidden or of the system."""
    return name.startswith(".") or name in _SYSTEM


def leaves_root(name: str) -> bool:
    """Return whether a name, joined to a folder, could lead out of it."""
    return name.startswith("/") or (".." in name and ".." in name.split("/"))
