"""A data set as an index: which files, which labels, which sizes, which images are bad; in memory and on disk.

Training reads nothing but the index: no folder is listed at start, no header opened, and every rank has the same
images under the same numbers. Random crops are drawn from its sizes before anything is decoded. On disk it is one .npz
without pickles, replaced atomically and verified when it is read.
"""

import hashlib
import io
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from pipelines import atomic_files
from pipelines.data_errors import BadImage, CannotWrite, DataError
from pipelines.datasets.image_headers import file_stamps, in_threads, read_headers, read_rgb
from pipelines.datasets.shards import Shards, require_inside
from pipelines.datasets.string_table import Names
from pipelines.output import say_line

_KIND, _VERSION = "fastsuncet image index", 3
MOST_BYTES = 16 << 30  # of a kept index: ImageNet's has 90 MB
_LARGE = 25_000_000  # pixels of an image that a note names: 75 MB decoded
_MAKE = "`fastsuncet data check CONFIG` makes one"


# In place of a folder's time in ns: it cannot be found, and it is so new that another change could leave it as it is.
GONE, UNSURE = -2, -1
_TICK = 2_000_000_000  # ns; the times of some file systems have steps of two seconds


class FolderTimes(NamedTuple):
    """The folders in which the files of an index were found, and their times then."""

    names: Names  # relative to the root, which is ""
    times: np.ndarray  # int64 (F,), ns, or UNSURE

    @classmethod
    def of(cls, times: Mapping[str, int]) -> "FolderTimes":
        """Pack times by name."""
        return cls(Names.of(sorted(times)), np.array([times[name] for name in sorted(times)], np.int64))


def folder_time(folder: str | os.PathLike[str]) -> int:
    """Return the time in ns at which a file last came to a folder, left it or was renamed; or GONE, or UNSURE."""
    try:
        changed = os.stat(folder).st_mtime_ns
    except OSError:
        return GONE
    return changed if 0 <= changed < time.time_ns() - _TICK else UNSURE


def folder_times(root: Path, names: Sequence[str]) -> np.ndarray:
    """Return `folder_time` of every folder, int64 (F,)."""
    times = np.empty(len(names), np.int64)

    def work(row: int) -> None:
        times[row] = folder_time(os.path.join(root, names[row]))

    in_threads(work, len(names), chunk=16)
    return times


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
    pack: Shards | None = None  # where the content of the files is read from instead
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
        return read_rgb(self.content(i), upright=self.upright) if self.pixels is None else self.pixels[i]

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
        lengths = np.zeros(len(self), "<i8")
        if self.pack is not None:
            lengths[:] = self.pack.members["length"]
        elif self.stamps is not None:
            lengths[:] = self.stamps[:, 0]
        lengths[list(self.bad)] = 0
        return hashlib.sha256(lengths.tobytes()).hexdigest()

    def take(self, numbers: np.ndarray) -> "ImageIndex":
        """Return the index of the images `numbers`, int64, numbered anew in that order."""
        place = {old: new for new, old in enumerate(numbers.tolist())}
        rows = {key: getattr(self, key) for key in ("labels", "sizes", "pixels", "stamps", "presence")}
        pack = self.pack
        return replace(
            self,
            files=Names.of(self.name(i) for i in place),
            **{key: None if array is None else array[numbers] for key, array in rows.items()},
            bad={place[i]: reason for i, reason in self.bad.items() if i in place},
            changed=tuple(place[i] for i in self.changed if i in place),
            pack=None if pack is None else Shards(pack.paths, pack.stamps, pack.members[numbers]),
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
                f"{len(large)} images have more than {_LARGE / 1e6:g} megapixels. The largest, {self.name(most)}, "
                f"takes {3 * pixels[most] / 1e6:,.0f} MB decoded ({width} x {height}), and a batch can hold several. "
                "A lower data.max_megapixels makes them bad images"
            )
        return notes

    def some(self, numbers: Sequence[int]) -> str:
        """Return the names of the first three of some images."""
        return ", ".join(self.name(i) for i in numbers[:3]) + (", ..." if len(numbers) > 3 else "")

    def require_good(self, allowed: int | None = None) -> None:
        """Raise BadImage, which names them all, when more images are bad than `allowed`; None: none can be replaced."""
        if len(self.bad) > (allowed or 0):
            raise BadImage([(str(self.path(i)), reason) for i, reason in self.bad.items()], allowed=allowed)

    def refreshed(self, rows: np.ndarray | None = None) -> "ImageIndex":
        """Return this index with the headers of changed files read again; itself when no file has changed.

        Compares all files, or the images `rows`, int64. A file has changed when its size in bytes or its modification
        time has. Other bad images stay bad. Raises DataError with the number and the names of files that are gone.
        """
        if self.root is None or self.stamps is None:
            return self
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


def save_index(index: ImageIndex, path: Path) -> None:
    """Write an index of files or of tar shards to `path`. Raises CannotWrite when the disk refuses."""
    if index.root is None or (index.stamps is None and index.pack is None):
        raise DataError("only an index of files is kept on disk; data in memory are read again each time")
    arrays = {
        "kind": np.array(_KIND),
        "version": np.array(_VERSION),
        "fingerprint": np.array(index.fingerprint()),
        "root": np.array(str(index.root)),
        "files": index.files.lines,
        "labels": index.labels,
        "classes": Names.of(index.classes).lines,
        "sizes": index.sizes,
        "bad": np.fromiter(index.bad, np.int64, len(index.bad)),
        "reasons": Names.of(" ".join(reason.split()) for reason in index.bad.values()).lines,
        "stamps": index.stamps,
        "presence": index.presence,
        "upright": np.array(index.upright),
        "changed": np.array(index.changed, np.int64),
    }
    if index.folders is not None:
        arrays |= {"folders": index.folders.names.lines, "folder_times": index.folders.times}
    if index.pack is not None:
        arrays["shards"] = Names.of(str(path.relative_to(index.root)) for path in index.pack.paths).lines
        arrays |= {"shard_stamps": index.pack.stamps, "members": index.pack.members}
    try:
        stream = io.BytesIO()
        np.savez(stream, **{key: array for key, array in arrays.items() if array is not None})
        atomic_files.make_folder(path.parent)
        # Whatever the umask, no other user can write it: `load_own_index` would refuse it.
        atomic_files.replace(path, stream.getvalue(), 0o644)
    except OSError as error:
        raise CannotWrite(
            f"cannot write the index {path}: {error.strerror or error}. "
            f"{atomic_files.advice(error, 'data.index or logging.folder')}"
        ) from error


def load_index(path: Path, *, root: Path | None = None, refresh: bool = True) -> ImageIndex:
    """Read what `save_index` wrote; `root` is where the files lie now, by default where they lay then.

    With `refresh`, the size and time of every file are compared, and changed files have their headers read again
    (`ImageIndex.refreshed`). That is one stat for each file: let one rank of a job do it. New files are not looked
    for; that takes a new scan. Raises DataError: no such file, damaged, another version, files gone or shards changed.
    """
    try:
        with atomic_files.open_file(path, MOST_BYTES) as stream:
            index = _read_index(stream, path, root)
    except FileNotFoundError:
        raise DataError(f"there is no index {path}: {_MAKE}") from None
    except OSError as error:
        raise DataError(f"the index {path} cannot be read: {error.strerror}") from error
    return index.refreshed() if refresh else index


def load_own_index(path: Path, *, root: Path | None = None) -> ImageIndex | None:
    """Return what `load_index` reads without `refresh`; None where there is no index that this user alone can write.

    A line says why one is not read. Raises DataError for a damaged one.
    """
    try:
        with atomic_files.open_file(path, MOST_BYTES, own=True) as stream:
            return _read_index(stream, path, root)
    except FileNotFoundError:
        return None
    except OSError as error:
        say_line(f"note: the index {path} is made anew, because {error.strerror}")
        return None


def _read_index(stream: BinaryIO, path: Path, root: Path | None) -> ImageIndex:
    try:
        with np.load(stream, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except Exception as error:  # a damaged archive fails in as many ways as zip, zlib and NumPy have
        # Not NumPy's own text, which advises to load pickles.
        text = f"the index {path} cannot be read: it is damaged, or no index ({type(error).__name__})"
        raise DataError(f"{text}. Delete it; {_MAKE}") from error
    if str(arrays.get("kind")) != _KIND:
        raise DataError(f"{path} is not an image index; {_MAKE}")
    try:
        if (version := int(arrays["version"])) != _VERSION:
            raise ValueError(f"it has version {version}, not {_VERSION}")
        folder, shards = root or Path(str(arrays["root"])), Names(arrays.get("shards", np.empty(0, np.uint8)))
        folders = None
        if "folders" in arrays:
            folders = FolderTimes(Names(arrays["folders"]), arrays["folder_times"])
            if folders.times.shape != (len(folders.names),) or folders.times.dtype != np.int64:
                raise ValueError("its folders do not fit their times")
        index = ImageIndex(
            root=folder,
            files=Names(arrays["files"]),
            labels=arrays["labels"],
            classes=tuple(Names(arrays["classes"])),
            sizes=arrays["sizes"],
            stamps=None if shards else arrays["stamps"],
            bad=dict(zip(arrays["bad"].tolist(), Names(arrays["reasons"]), strict=True)),
            presence=arrays.get("presence"),
            upright=bool(arrays["upright"]),
            changed=tuple(arrays["changed"].tolist()),
            folders=folders,
        )
        if index.fingerprint() != str(arrays["fingerprint"]):
            raise ValueError("its content does not match its fingerprint")
        # Whoever wrote the file, it must not lead out of the data folder.
        for names in (index.files, shards, folders.names if folders else Names.of(())):
            if (name := names.leaving_root()) is not None:
                raise ValueError(f"{name!r} leads out of the data folder")
        places = (arrays["shard_stamps"], arrays["members"]) if shards else ()
    except Exception as error:
        raise DataError(f"the index {path} cannot be used: {error}. Delete it; {_MAKE}") from error
    if places:
        paths = [folder / name for name in shards]
        require_inside(paths, folder)
        return replace(index, pack=Shards(paths, *places))
    return index
