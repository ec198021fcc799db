"""A million file names in one block of bytes: 40 bytes a name instead of the 100 of a list of strings."""

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pipelines.data_errors import DataError


class Names(Sequence[str]):
    """An immutable list of strings, kept as UTF-8 lines (uint8) and the positions where they end (int64).

    The bytes are those on the disk. Where the locale is not UTF-8, Python shows other characters for them.

    Eight ranks of a node each hold ImageNet's 1.28 million names. As Python strings that is 1 GB, and a million
    objects for every garbage collection to visit. `lines` is also what an index file stores.
    """

    def __init__(self, lines: np.ndarray):
        """`lines`: uint8, each name followed by a line feed. Raises DataError when the last one has none."""
        self.lines = np.ascontiguousarray(lines, np.uint8)
        self._ends = np.flatnonzero(self.lines == ord("\n"))
        if len(self.lines) and self.lines[-1] != ord("\n"):
            raise DataError("a list of names is cut off: it does not end in a line feed")

    @classmethod
    def of(cls, names: Iterable[str]) -> "Names":
        """Pack `names` in their order. Raises DataError for a name with a line break or that is not UTF-8.

        Such a name could not stand in a list of names or a CSV either.
        """
        names = list(names)
        # All at once, because a million of them take seconds; one by one only to find the wrong one.
        lines = _packed(names)
        if lines is None:
            wrong = next(name for name in names if _packed([name]) is None)
            raise DataError(f"a name has a line break in it or is not UTF-8, rename it: {wrong!r}")
        return cls(np.frombuffer(lines, np.uint8))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        """Return the name at an int, or the list of names at a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        position = range(len(self))[index]  # raises IndexError as a list does
        start = self._ends[position - 1] + 1 if position else 0
        return os.fsdecode(self.lines[start : self._ends[position]].tobytes())

    def __iter__(self) -> Iterator[str]:
        return (os.fsdecode(line[:-1]) for line in io.BytesIO(self.lines.data))

    def take(self, numbers: np.ndarray) -> "Names":
        """Return the names at `numbers`, int64, ascending and each once."""
        if len(numbers) == len(self):
            return self
        chosen = np.zeros(len(self), bool)
        chosen[numbers] = True
        return Names(self.lines[np.repeat(chosen, np.diff(self._ends, prepend=-1))])

    def right_aligned(self, indices: np.ndarray) -> np.ndarray:
        """Return the names at `indices`, int (B,), as the rows of a uint8 array as wide as the longest one of them.

        Shorter names have slashes before them.
        """
        ends = self._ends[indices]
        lengths = ends - np.where(indices == 0, 0, self._ends[indices - 1] + 1)
        before_end = np.arange(lengths.max(initial=0), 0, -1)
        letters = self.lines.take(ends[:, None] - before_end, mode="clip")
        return np.where(before_end <= lengths[:, None], letters, np.uint8(ord("/")))

    def leaving_root(self) -> str | None:
        """Return a name that, joined to a folder, could lead out of it; None if there is none."""
        # A search of the bytes: a million names one by one take seconds.
        lines = self.lines.tobytes()
        if not lines.startswith(b"/") and b"\n/" not in lines and b".." not in lines:
            return None
        return next(filter(leaves_root, self), None)

    def find(self, wanted: Sequence[str]) -> np.ndarray:
        """Return the position of each wanted name, int64 (len(wanted),); -1 where it is not in the list."""
        # One pass over all names with a dictionary of the few wanted: a dictionary of all would be the 1 GB again.
        positions = dict.fromkeys(wanted, -1)
        for position, name in enumerate(self):
            if name in positions:
                positions[name] = position
        return np.fromiter((positions[name] for name in wanted), np.int64, len(wanted))


def _packed(names: Sequence[str]) -> bytes | None:
    """Return `names` as lines; None if one has a line break in it or is not UTF-8."""
    try:
        lines = os.fsencode("".join(f"{name}\n" for name in names))
        lines.decode()
    except UnicodeError:
        return None
    return lines if lines.count(b"\n") == len(names) and b"\r" not in lines else None


def listed_lines(content: bytes) -> list[str]:
    """Return the lines of a UTF-8 file that lists names, with their ends, decoded as the names of files are.

    Raises UnicodeDecodeError when it is not UTF-8.
    """
    content.decode()
    return [os.fsdecode(line) for line in content.splitlines(keepends=True)]


def links_out(path: str | os.PathLike, root: str | os.PathLike) -> bool:
    """Return whether a path below `root` leads out of it by a link."""
    return not os.path.realpath(path).startswith(os.path.join(os.path.realpath(root), ""))


def leaves_root(name: str) -> bool:
    """Return whether a name, joined to a folder, could lead out of it."""
    return name.startswith("/") or (".." in name and ".." in name.split("/"))
