"""A data set as an index: which files, which labels, which sizes, which images are bad.

Training reads nothing but the index: no folder is listed at start, no header opened, and every rank has the same
images under the same numbers. Random crops are drawn from its sizes before anything is decoded.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pipelines.data_errors import BadImage, DataError
from pipelines.datasets.image_headers import file_stamps, read_headers
from pipelines.datasets.shards import Shards
from pipelines.datasets.string_table import Names


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
    sizes: np.ndarray  # int32 (N, 2): height and width as stored, before any EXIF rotation
    pixels: np.ndarray | None = None  # uint8 (N, H, W, 3)
    stamps: np.ndarray | None = None  # int64 (N, 2): bytes and modification time in ns, when sizes were read
    bad: Mapping[int, str] = field(default_factory=dict)  # number -> why the image cannot be used
    # int8 (N, classes), for images that show several: 1 the class is there, -1 it is not, 0 difficult, not counted.
    presence: np.ndarray | None = None
    pack: Shards | None = None  # where the content of the files is read from instead

    def __post_init__(self):
        if not isinstance(self.files, Names):
            object.__setattr__(self, "files", Names.of(self.files))
        n = len(self.files)
        _check(self.labels, "labels", (n,), np.int64)
        _check(self.sizes, "sizes", (n, 2), np.int32)
        if self.stamps is not None:
            _check(self.stamps, "stamps", (n, 2), np.int64)
        if self.pixels is not None:
            _check(self.pixels, "pixels", (n, *self.pixels.shape[1:3], 3), np.uint8)
        if self.presence is not None:
            _check(self.presence, "presence", (n, len(self.classes)), np.int8)
            if n and not -1 <= self.presence.min() <= self.presence.max() <= 1:
                raise DataError("presence of the index must be 1 (there), -1 (not there) or 0 (difficult)")
        if self.pack is not None and len(self.pack) != n:
            raise DataError(f"the pack holds {len(self.pack)} images, the index {n}")
        if n and not -1 <= self.labels.min() <= self.labels.max() < len(self.classes):
            raise DataError(
                f"labels reach from {self.labels.min()} to {self.labels.max()}, but {len(self.classes)} "
                f"classes are numbered from 0, and -1 means not labeled"
            )
        if self.bad and not 0 <= min(self.bad) <= max(self.bad) < n:
            raise DataError(f"bad images reach from {min(self.bad)} to {max(self.bad)}, of {n} images")

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

    def damage(self, i: int) -> str | None:
        """Return why the stored bytes of an image are wrong; None if they are right, or have no checksum."""
        return None if self.pack is None else self.pack.damage(i)

    def fingerprint(self) -> str:
        """Return the sha256 of what decides a run: names, labels, classes, sizes, pixels, presence."""
        digest = hashlib.sha256()
        arrays = [self.files.lines, self.labels, Names.of(self.classes).lines, self.sizes]
        for array in [*arrays, *(held for held in (self.pixels, self.presence) if held is not None)]:
            digest.update(f"{array.shape}".encode())
            digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
        return digest.hexdigest()

    def require_good(self, allowed: int = 0) -> None:
        """Raise BadImage, which names them all, when more than `allowed` images are bad."""
        if len(self.bad) > allowed:
            raise BadImage([(str(self.path(i)), reason) for i, reason in self.bad.items()])

    def refreshed(self) -> "ImageIndex":
        """Return this index with the headers of changed files read again; itself when no file has changed.

        A file has changed when its size in bytes or its modification time has. Other bad images stay bad.
        Raises DataError with the number and the names of files that are gone.
        """
        if self.root is None or self.stamps is None:
            return self
        stamps = file_stamps(self.root, self.files)
        gone = np.flatnonzero((stamps[:, 0] < 0) & (self.stamps[:, 0] >= 0)).tolist()
        if gone:
            shown = ", ".join(self.name(i) for i in gone[:3]) + (", ..." if len(gone) > 3 else "")
            raise DataError(
                f"{len(gone)} of the {len(self)} files in the index cannot be found under {self.root}: {shown}. "
                f"Correct data.root, or make the index again with `fastsuncet data check CONFIG`"
            )
        changed = np.flatnonzero((stamps != self.stamps).any(axis=1)).tolist()
        if not changed:
            return self
        headers = read_headers(self.root, [self.name(i) for i in changed])
        sizes, bad = self.sizes.copy(), dict(self.bad)
        # The stamps stay those from before the headers: a file that changed in between is read again next time.
        sizes[changed] = headers.sizes
        for row, number in enumerate(changed):
            bad.pop(number, None)
            if row in headers.bad:
                bad[number] = headers.bad[row]
        return replace(self, sizes=sizes, stamps=stamps, bad=dict(sorted(bad.items())))


def _check(array: np.ndarray, name: str, shape: tuple[int, ...], dtype: type) -> None:
    if array.shape != shape or array.dtype != dtype:
        wanted = f"{np.dtype(dtype)} {shape}"
        raise DataError(f"{name} of the index must be {wanted}, not {array.dtype} {array.shape}")
