"""A data set as an index: which files, which labels, which sizes, which images are bad.

Training reads nothing but the index: no folder is listed at start, no header opened, and every rank has the same
images under the same numbers. Random crops are drawn from its sizes before anything is decoded. index_file.py keeps it
on disk.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipelines.data_errors import BadImage, DataError
from pipelines.datasets.string_table import Names
from pipelines.output import counted, first_five

if TYPE_CHECKING:
    from pipelines.datasets.image_headers import Progress
    from pipelines.datasets.shards import Shards

_LARGE = 25_000_000  # pixels of an image that a note names: 75 MB decoded


class FolderTimes(NamedTuple):
    """The folders in which the files of an index were found, and their times then."""

    names: Names  # relative to the root, which is ""
    times: np.ndarray  # int64 (F,), ns, or `folders.UNSURE`

    @classmethod
    def of(cls, times: Mapping[str, int]) -> "FolderTimes":
        """Pack times by name."""
        return cls(Names.of(sorted(times)), np.array([times[name] for name in sorted(times)], np.int64))


@dataclass(frozen=True, eq=False)
class ImageIndex:
    """N images under the numbers 0..N-1: files below `root`, members of tar shards (`pack`), or `pixels` in memory.

    An image in `bad` keeps its number, so that labels and splits do not shift, and has the size 0, 0;
    `require_good` refuses it. Raises DataError for arrays that do not fit each other.
    """

    root: Path | None  # None: there are no files
    files: Names  # relative to root, with "/"; any sequence of strings is converted
    labels: np.ndarray  # int64 (N,), position in `classes`; -1 = not labeled
    classes: tuple[str, ...]
    sizes: np.ndarray  # int32 (N, 2): height and width, as the images are read
    pixels: np.ndarray | None = None  # uint8 (N, H, W, 3)
    stamps: np.ndarray | None = None  # int64 (N, 2): bytes and modification time in ns, when sizes were read
    bad: Mapping[int, str] = field(default_factory=dict)  # number -> why the image cannot be used
    # int8 (N, classes), for images that show several: 1 the class is there, -1 it is not, 0 difficult, not counted.
    presence: np.ndarray | None = None
    pack: "Shards | None" = None  # where the content of the files is read from instead
    upright: bool = False  # whether images are turned as their EXIF tag says, or read as stored
    changed: tuple[int, ...] = ()  # images whose files were written again after the index was made
    folders: FolderTimes | None = None  # of an index of all images below the root

    def __post_init__(self):
        if not isinstance(self.files, Names):
            object.__setattr__(self, "files", Names.of(self.files))
        n, side = len(self.files), () if self.pixels is None else self.pixels.shape[1:3]
        for name, shape, dtype in (
            ("labels", (n,), np.int64),
            ("sizes", (n, 2), np.int32),
            ("stamps", (n, 2), np.int64),
            ("pixels", (n, *side, 3), np.uint8),
            ("presence", (n, len(self.classes)), np.int8),
        ):
            array = getattr(self, name)
            if array is not None and (array.shape != shape or array.dtype != dtype):
                wanted = f"{np.dtype(dtype)} {shape}"
                raise DataError(f"{name} of the index must be {wanted}, not {array.dtype} {array.shape}")
        if self.presence is not None and n and not -1 <= self.presence.min() <= self.presence.max() <= 1:
            raise DataError("presence of the index must be 1 (there), -1 (not there) or 0 (difficult)")
        if self.pack is not None and len(self.pack) != n:
            raise DataError(f"the pack holds {len(self.pack)} images, the index {n}")
        if n and not -1 <= self.labels.min() <= self.labels.max() < len(self.classes):
            raise DataError(
                f"labels reach from {self.labels.min()} to {self.labels.max()}, but {len(self.classes)} "
                f"classes are numbered from 0, and -1 means not labeled"
            )
        for which in (self.bad, self.changed):
            if which and not 0 <= min(which) <= max(which) < n:
                raise DataError(
                    f"bad or changed images reach from {min(which)} to {max(which)}, of {n} images"
                )

    def __len__(self) -> int:
        return len(self.files)

    def name(self, i: int) -> str:
        """Return the image's name in messages and lists: its path below the root."""
        return self.files[i]

    def path(self, i: int) -> Path:
        """Return the image's file, or PACK/NAME. Raises DataError when the data are in memory only."""
        if self.root is None:
            raise DataError(f"{self.name(i)} is held in memory and has no file")
        return self.root / self.files[i]

    def content(self, i: int) -> Path | bytes:
        """Return what a decoder is given: the image's file, or its bytes from the pack."""
        return self.path(i) if self.pack is None else self.pack.read(i)

    def rgb(self, i: int) -> np.ndarray:
        """Return the image as it is read, (H, W, 3) uint8. Raises RuntimeError when it cannot be decoded."""
        if self.pixels is not None:
            return self.pixels[i]
        from pipelines.datasets.image_headers import read_rgb  # and with it PIL's parsers

        return read_rgb(self.content(i), upright=self.upright)

    def length_now(self, i: int) -> int | None:
        """Return the length in bytes of an image's file if it is another one than in the index, else None."""
        if self.stamps is None or self.pack is not None:
            return None
        length = os.path.getsize(self.path(i))
        return None if length == self.stamps[i, 0] else length

    def damage(self, i: int) -> str | None:
        """Return why the stored bytes of an image are wrong; None if they are right, or have no checksum."""
        return None if self.pack is None else self.pack.damage(i)

    def fingerprint(self) -> str:
        """Return the sha256 of what decides a run: names, labels, classes, sizes, pixels, presence."""
        digest = hashlib.sha256()
        names, classes = self.files.lines, Names.of(self.classes).lines
        for array in (names, self.labels, classes, self.sizes, self.pixels, self.presence):
            if array is not None:
                digest.update(f"{array.shape}".encode())
                digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
        return digest.hexdigest()

    def contents(self) -> str:
        """Return the sha256 of the encoded images' lengths, which a copy of the files or a pack of them keeps."""
        return hashlib.sha256(self._lengths().tobytes()).hexdigest()

    def _lengths(self) -> np.ndarray:
        """Return the bytes of each encoded image, int64 (N,); 0 for a bad one, and where they are not known."""
        lengths = np.zeros(len(self), "<i8")
        if self.pack is not None:
            lengths[:] = self.pack.members["length"]
        elif self.stamps is not None:
            lengths[:] = self.stamps[:, 0]
        lengths[list(self.bad)] = 0
        return lengths

    def note_on_copies(self, progress: "Progress | None" = None) -> list[str]:
        """Return a sentence on the labeled images with the content of an earlier one, or none.

        A file is read only if another one has as many bytes.
        """
        from pipelines.datasets.image_headers import in_threads

        known = np.setdiff1d(np.flatnonzero(self.labels >= 0), list(self.bad), assume_unique=True)
        _, same, counts = np.unique(self._lengths()[known], return_inverse=True, return_counts=True)
        alike = known[counts[same] > 1].tolist()
        digests, first, copies = [b""] * len(alike), {}, []

        def work(row: int) -> None:
            content = self.content(alike[row])
            content = content if isinstance(content, bytes) else content.read_bytes()
            digests[row] = hashlib.sha256(content).digest()

        in_threads(work, len(alike), progress=progress)
        for i, digest in zip(alike, digests):
            if (j := first.setdefault(digest, i)) != i:
                mine, other = (f"{self.name(n)} ({self.classes[self.labels[n]]})" for n in (i, j))
                copies.append(f"{mine} of {other}")
        if not copies:
            return []
        are = "labeled image is a copy" if len(copies) == 1 else "labeled images are copies"
        why = "An accuracy is too high where one is learned from and the other judges, and two labels contradict"
        return [f"{len(copies):,} {are}: {first_five(copies)}. {why}: keep one of each"]

    def take(self, numbers: np.ndarray) -> "ImageIndex":
        """Return the index of the images `numbers`, int64, ascending and each once, numbered anew."""
        # Of these few alone: the numbers of ten million images are a gigabyte of Python objects on each rank.
        here = np.flatnonzero(np.isin(numbers, [*self.bad, *self.changed]))
        new_number = dict(zip(numbers[here].tolist(), here.tolist()))
        rows = {key: getattr(self, key) for key in ("labels", "sizes", "pixels", "stamps", "presence")}
        return replace(
            self,
            files=self.files.take(numbers),
            **{key: None if array is None else array[numbers] for key, array in rows.items()},
            bad={new_number[i]: reason for i, reason in self.bad.items() if i in new_number},
            changed=tuple(new_number[i] for i in self.changed if i in new_number),
            pack=None if self.pack is None else self.pack.take(numbers),
            folders=None,
        )

    def within(self, megapixels: float) -> "ImageIndex":
        """Return this index with the images of more pixels as bad ones, of size 0, 0."""
        large = np.flatnonzero(self.sizes.prod(1, dtype=np.int64) > megapixels * 1e6)
        if not len(large):
            return self
        sizes, bad = self.sizes.copy(), {**self.bad}
        for i, (height, width) in zip(large.tolist(), sizes[large].tolist()):
            bad[i] = f"{width} x {height} pixels, more than data.max_megapixels ({megapixels:g})"
        sizes[large] = 0
        return replace(self, sizes=sizes, bad=dict(sorted(bad.items())))

    def notes(self) -> list[str]:
        """Return sentences to print before a run: about changed files, and images that take much memory."""
        notes, pixels = [], self.sizes.prod(1, dtype=np.int64)
        if self.changed:
            text = f"{len(self.changed)} of {len(self)} images changed since their index was made"
            notes.append(f"{text}: {self.some(self.changed)}")
        if self.pixels is None and (large := np.flatnonzero(pixels > _LARGE).tolist()):
            most = int(pixels.argmax())
            height, width = self.sizes[most].tolist()
            notes.append(
                f"{counted(len(large), 'image')} of more than {_LARGE / 1e6:g} megapixels: the largest, "
                f"{self.name(most)}, takes {3 * pixels[most] / 1e6:,.0f} MB decoded ({width} x {height}), and a batch "
                "can hold several. A lower data.max_megapixels makes them bad images"
            )
        return notes

    def some(self, numbers: Sequence[int]) -> str:
        """Return the names of the first three of some images."""
        return ", ".join(self.name(i) for i in numbers[:3]) + (", ..." if len(numbers) > 3 else "")

    def bad_files(self) -> list[tuple[str, str]]:
        """Return (path, why it cannot be used) of each bad image."""
        return [(str(self.path(i)), reason) for i, reason in self.bad.items()]

    def good(self) -> np.ndarray:
        """Return the numbers of the images that are not bad, int64 ascending."""
        return np.delete(np.arange(len(self)), list(self.bad))

    def require_good(self, allowed: int | None = None) -> None:
        """Raise BadImage, which names them all, when more images are bad than `allowed`; None: none can be replaced."""
        if len(self.bad) > (allowed or 0):
            raise BadImage(self.bad_files(), allowed=allowed)

    def refreshed(self, rows: np.ndarray | None = None) -> "ImageIndex":
        """Return this index with the headers of changed files read again; itself when no file has changed.

        Compares all files, or the images `rows`, int64. A file has changed when its size in bytes or its modification
        time has. Other bad images stay bad. Raises DataError with the number and the names of files that are gone.
        """
        if self.root is None or self.stamps is None:
            return self
        from pipelines.datasets.image_headers import file_stamps, read_headers

        rows = np.arange(len(self)) if rows is None else rows
        before, now = self.stamps[rows], file_stamps(self.root, [self.name(i) for i in rows.tolist()])
        gone = rows[(now[:, 0] < 0) & (before[:, 0] >= 0)].tolist()
        if gone:
            raise DataError(
                f"{len(gone)} of the {len(self)} files in the index cannot be found under {self.root}: "
                f"{self.some(gone)}. Correct data.root, or make the index again with `fastsuncet data check CONFIG`"
            )
        changed = rows[(now != before).any(axis=1)].tolist()
        if not changed:
            return self
        headers = read_headers(self.root, [self.name(i) for i in changed], upright=self.upright)
        sizes, stamps = self.sizes.copy(), self.stamps.copy()
        sizes[changed], stamps[changed] = headers.sizes, headers.stamps
        bad = {i: reason for i, reason in self.bad.items() if i not in set(changed)}
        bad |= {changed[row]: reason for row, reason in headers.bad.items()}
        every = tuple(sorted({*self.changed, *changed}))
        return replace(self, sizes=sizes, stamps=stamps, bad=dict(sorted(bad.items())), changed=every)


def with_classes(index: ImageIndex, classes: tuple[str, ...]) -> ImageIndex:
    """Return the same images with their classes numbered as in `classes`, such as the training set's.

    Where those are `class_numbers`, they are taken as numbers of this index's classes in order. Raises DataError when
    an image's class is not in `classes`.
    """
    if index.classes == classes or classes == class_numbers(len(index.classes)):
        return replace(index, classes=classes)
    numbers = {name: number for number, name in enumerate(classes)}
    shown = [index.classes[label] for label in np.unique(index.labels[index.labels >= 0])]
    if unknown := [name for name in shown if name not in numbers]:
        raise DataError(
            f"{index.root} has {len(unknown)} classes that no training image has: {', '.join(unknown[:5])}"
        )
    # The last entry is that of the label -1.
    new_label = np.array([*(numbers.get(name, -1) for name in index.classes), -1], np.int64)
    return replace(index, labels=new_label[index.labels], classes=classes)


def class_numbers(count: int) -> tuple[str, ...]:
    """Return the names of classes that are known by their numbers only, as in shards with KEY.cls."""
    return tuple(f"class {number}" for number in range(count))
