"""A data set as an index: which files, which labels, which sizes, which images are bad.

Training reads nothing but the index: no folder is listed at start, no header opened, and every rank has the same
images under the same numbers. Random crops are drawn from its sizes before anything is decoded. On disk it is one .npz
without pickles, replaced atomically and verified when it is read.
"""

import hashlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from pipelines import atomic_files
from pipelines.data_errors import BadImage, CannotWrite, DataError
from pipelines.datasets.names import as_lines, from_lines, leaves_root
from pipelines.output import counted, say_line

if TYPE_CHECKING:
    from pipelines.datasets.shards import Shards

_LARGE = 25_000_000  # pixels of an image that a note names: 75 MB decoded
_KIND, _VERSION = "fastsuncet image index", 3
MOST_BYTES = 16 << 30  # of a kept index: ImageNet's has 90 MB
_MAKE = "`fastsuncet data check CONFIG` makes one"
_OTHER = f"Delete it if it is an index ({_MAKE}). If it is another file, give data.index another name"


@dataclass(frozen=True, eq=False)
class ImageIndex:
    """N images under the numbers 0..N-1: files below `root`, members of tar shards (`pack`), or `pixels` in memory.

    An image in `bad` keeps its number, so that labels and splits do not shift, and has the size 0, 0;
    `require_good` refuses it. Raises DataError for arrays that do not fit each other.
    """

    root: Path | None  # None: there are no files
    files: Sequence[str]  # relative to root, with "/"
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
    # Of an index of all images below the root: each folder ("" is the root), and its time in ns or `folders.UNSURE`.
    folders: Mapping[str, int] | None = None

    def __post_init__(self):
        n, side = len(self.files), () if self.pixels is None else self.pixels.shape[1:3]
        for name, shape, dtype, allowed in (
            ("labels", (n,), np.int64, (-1, len(self.classes) - 1)),
            ("sizes", (n, 2), np.int32, None),
            ("stamps", (n, 2), np.int64, None),
            ("pixels", (n, *side, 3), np.uint8, None),
            ("presence", (n, len(self.classes)), np.int8, (-1, 1)),
        ):
            array = getattr(self, name)
            if array is None:
                continue
            if array.shape != shape or array.dtype != dtype:
                wanted = f"{np.dtype(dtype)} {shape}"
                raise DataError(f"{name} of the index must be {wanted}, not {array.dtype} {array.shape}")
            if allowed and array.size and not allowed[0] <= array.min() <= array.max() <= allowed[1]:
                raise DataError(f"{name} of the index must be from {allowed[0]} to {allowed[1]}")
        if self.pack is not None and len(self.pack) != n:
            raise DataError(f"the pack holds {len(self.pack)} images, the index {n}")
        if not all(0 <= i < n for i in (*self.bad, *self.changed)):
            raise DataError(f"a bad or changed image of the index is none of its {n}")

    def __len__(self) -> int:
        return len(self.files)

    def name(self, i: int) -> str:
        """Return the image's name in messages and lists: its path below the root."""
        return self.files[i]

    def naming(self) -> str:
        """Return how the images of a pack are called, for messages about names that it lacks; "" for files."""
        if self.pack is None:
            return ""
        return f"the first image of the pack {self.root} is called {self.name(0)}"

    def find(self, names: Sequence[str]) -> np.ndarray:
        """Return the numbers of the images with these names, int64 (len(names),); -1 where there is none."""
        numbers = {name: i for i, name in enumerate(self.files)}
        return np.array([numbers.get(name, -1) for name in names], np.int64)

    def path(self, i: int) -> Path:
        """Return the image's file, or PACK/NAME."""
        assert self.root is not None, "images in memory have no files"
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
        names, classes = as_lines(self.files), as_lines(self.classes)
        for array in (names, self.labels, classes, self.sizes, self.pixels, self.presence):
            if array is not None:
                digest.update(f"{array.shape}".encode())
                digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
        return digest.hexdigest()

    def contents(self) -> str:
        """Return the sha256 of the encoded images' lengths, which a copy of the files or a pack of them keeps."""
        return hashlib.sha256(self.lengths().tobytes()).hexdigest()

    def lengths(self) -> np.ndarray:
        """Return the bytes of each encoded image, int64 (N,); 0 for a bad one, and where they are not known."""
        lengths = np.zeros(len(self), "<i8")
        if self.pack is not None:
            lengths[:] = self.pack.members["length"]
        elif self.stamps is not None:
            lengths[:] = self.stamps[:, 0]
        lengths[list(self.bad)] = 0
        return lengths

    def take(self, numbers: np.ndarray) -> "ImageIndex":
        """Return the index of the images `numbers`, int64, ascending and each once, numbered anew."""
        # Of these few alone: the numbers of ten million images are a gigabyte of Python objects on each rank.
        here = np.flatnonzero(np.isin(numbers, [*self.bad, *self.changed]))
        new_number = dict(zip(numbers[here].tolist(), here.tolist()))
        rows = {key: getattr(self, key) for key in ("labels", "sizes", "pixels", "stamps", "presence")}
        return replace(
            self,
            files=list(map(self.name, numbers.tolist())),
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
        if large := np.flatnonzero(pixels > _LARGE).tolist():
            most = int(pixels.argmax())
            height, width = self.sizes[most].tolist()
            takes = f"{self.name(most)} takes {3 * pixels[most] / 1e6:,.0f} MB decoded ({width} x {height})"
            more = f"{counted(len(large), 'image')} of more than {_LARGE / 1e6:g} megapixels"
            notes.append(f"{more}: {takes}. A lower data.max_megapixels makes them bad images")
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


def with_classes(index: ImageIndex, classes: tuple[str, ...]) -> ImageIndex:
    """Return the same images with their classes numbered as in `classes`, such as the training set's.

    Classes that are `class_numbers` on one side are matched by number. Raises DataError when an image's class is not in
    `classes`.
    """
    ours, theirs = index.classes, classes
    if len(ours) == len(theirs) and class_numbers(len(ours)) in (ours, theirs):
        ours, theirs = as_class_numbers(ours), as_class_numbers(theirs)
    numbers = {name: number for number, name in enumerate(theirs)}
    shown = [ours[label] for label in np.unique(index.labels[index.labels >= 0])]
    if unknown := [name for name in shown if name not in numbers]:
        names = ", ".join(unknown[:5])
        raise DataError(f"{index.root} has {len(unknown)} classes that no training image has: {names}")
    # The last entry is that of the label -1.
    new_label = np.array([*(numbers.get(name, -1) for name in ours), -1], np.int64)
    return replace(index, labels=new_label[index.labels], classes=classes)


def as_class_numbers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the classes as `class_numbers`, in the order of their names, and of numbers where all names are such."""
    bare = [name.removeprefix("class ") for name in names]
    order = sorted(bare, key=int) if all(map(str.isdecimal, bare)) else bare
    return tuple(f"class {order.index(name)}" for name in bare)


def class_numbers(count: int) -> tuple[str, ...]:
    """Return the names of classes that are known by their numbers only, as in shards with KEY.cls."""
    return tuple(f"class {number}" for number in range(count))


def save_index(index: ImageIndex, path: Path) -> None:
    """Write an index of files or of tar shards to `path`.

    Raises CannotWrite when the disk refuses, and DataError as `require_index`.
    """
    assert index.root is not None, "images in memory are read again each time"
    arrays = {
        "kind": np.array(_KIND),
        "version": np.array(_VERSION),
        "fingerprint": np.array(index.fingerprint()),
        "root": np.array(str(index.root)),
        "files": as_lines(index.files),
        "labels": index.labels,
        "classes": as_lines(index.classes),
        "sizes": index.sizes,
        "bad": np.fromiter(index.bad, np.int64, len(index.bad)),
        "reasons": as_lines(" ".join(reason.split()) for reason in index.bad.values()),
        "stamps": index.stamps,
        "presence": index.presence,
        "upright": np.array(index.upright),
        "changed": np.array(index.changed, np.int64),
    }
    if index.folders is not None:
        times = np.fromiter(index.folders.values(), np.int64, len(index.folders))
        arrays |= {"folders": as_lines(index.folders), "folder_times": times}
    if index.pack is not None:
        arrays["shards"] = as_lines(str(path.relative_to(index.root)) for path in index.pack.paths)
        arrays |= {"shard_stamps": index.pack.stamps, "members": index.pack.members}
    require_index(path)
    try:
        stream = io.BytesIO()
        np.savez(stream, **{key: array for key, array in arrays.items() if array is not None})
        atomic_files.make_folder(path.parent)
        # Whatever the umask, no other user can write it: `load_index` would refuse it.
        atomic_files.replace(path, stream.getvalue(), 0o644)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> CannotWrite:
    advice = atomic_files.advice(error, "data.index or logging.folder")
    return CannotWrite(f"cannot write the index {path}: {error.strerror or error}. {advice}")


def require_index(path: Path) -> None:
    """Raise DataError for anything at `path` that does not begin as an index: it can be a file of the user.

    Raises CannotWrite where the disk does not say whether anything is there.
    """
    try:
        if not atomic_files.exists(path):
            return
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        with atomic_files.open_file(path, sys.maxsize) as stream:
            why = "" if _KIND.encode("utf-32-le") in stream.read(512) else "it is damaged, or no index"
    except OSError as error:
        why = error.strerror
    if why:
        raise DataError(f"the index {path} cannot be read: {why}. {_OTHER}")


def load_index(path: Path, *, root: Path | None = None, own: bool = False) -> ImageIndex | None:
    """Read what `save_index` wrote, None where there is no file; `root` is where the files lie now, if not as then.

    With `own`, an index that another user can write, or that is too large, is none either, and a line says why.
    Raises DataError: no index, damaged, another version, or shards that have changed.
    """
    try:
        with atomic_files.open_file(path, MOST_BYTES, own=own) as stream:
            return _read_index(stream, path, root)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not own:
            raise DataError(f"the index {path} cannot be read: {error.strerror}") from error
        require_index(path)
        say_line(f"note: the index {path} is made anew, because {error.strerror}")
        return None


def _read_index(stream: BinaryIO, path: Path, root: Path | None) -> ImageIndex:
    try:
        with np.load(stream, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except Exception as error:  # a damaged archive fails in as many ways as zip, zlib and NumPy have
        # Not NumPy's own text, which advises to load pickles.
        text = f"the index {path} cannot be read: it is damaged, or no index ({type(error).__name__})"
        raise DataError(f"{text}. {_OTHER}") from error
    if str(arrays.get("kind")) != _KIND:
        raise DataError(f"{path} is not an image index. {_OTHER}")
    try:
        if (version := int(arrays["version"])) != _VERSION:
            raise ValueError(f"it has version {version}, not {_VERSION}")
        folder = root or Path(str(arrays["root"]))
        shards, folders = (from_lines(arrays.get(key, np.empty(0))) for key in ("shards", "folders"))
        index = ImageIndex(
            root=folder,
            files=from_lines(arrays["files"]),
            labels=arrays["labels"],
            classes=tuple(from_lines(arrays["classes"])),
            sizes=arrays["sizes"],
            stamps=None if shards else arrays["stamps"],
            bad=dict(zip(arrays["bad"].tolist(), from_lines(arrays["reasons"]), strict=True)),
            presence=arrays.get("presence"),
            upright=bool(arrays["upright"]),
            changed=tuple(arrays["changed"].tolist()),
            folders=dict(zip(folders, arrays["folder_times"].tolist(), strict=True)) if folders else None,
        )
        if index.fingerprint() != str(arrays["fingerprint"]):
            raise ValueError("its content does not match its fingerprint")
        # Whoever wrote the file, it must not lead out of the data folder.
        for names in (index.files, shards, folders):
            if (name := next(filter(leaves_root, names), None)) is not None:
                raise ValueError(f"{name!r} leads out of the data folder")
        members = (arrays["shard_stamps"], arrays["members"]) if shards else ()
    except Exception as error:
        raise DataError(f"the index {path} cannot be used: {error}. Delete it; {_MAKE}") from error
    if members:
        from pipelines.datasets.shards import Shards, require_inside  # few runs read a pack

        paths = [folder / name for name in shards]
        require_inside(paths, folder)
        return replace(index, pack=Shards(paths, *members))
    return index
