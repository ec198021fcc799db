"""Images in tar shards of WebDataset's layout, read by offset: a few files instead of a million.

A shard is a plain tar. KEY.jpg (.png, ...) is an image and KEY.cls, if there is one, its label as a whole number.
Headers are scanned once, for the index; after that, an image is one read of an open file. Nothing is extracted to disk.

Shards are read, not mapped into memory, though a map saves a copy of 14 us an image: when a mapped file is cut short,
or its disk or server fails, the system kills the process without a message (SIGBUS).
"""

import contextlib
import errno
import io
import os
import re
import resource
import tarfile
import weakref
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipelines import atomic_files
from pipelines.data_errors import DataError
from pipelines.datasets.image_headers import EXTENSIONS, NOT_READ, stamp
from pipelines.datasets.names import as_lines, leaves_root, links_out, passed_over

# Where an image lies: the number of its shard, and bytes in it. Length 0: an image that was bad when it was packed.
# crc32 of the bytes, -1 where the shard has none.
MEMBER = np.dtype([("shard", "<i8"), ("offset", "<i8"), ("length", "<i8"), ("crc32", "<i8")])
REMEDY = "Copy the pack here again, or delete it and run `fastsuncet data pack` again"
_BLOCK = tarfile.BLOCKSIZE
# Where a shard keeps the crc32 of an image: in its header, as the file owner's name (uname). Other programs ignore that
# field, and every image is protected without a file of its own.
CHECKSUM = "crc32:{}"
# What tarfile may read into memory for one member's headers. A hostile header can claim any size.
_HEADER_BYTES = 1 << 20
_MOST_CLASSES = 1 << 20
# How files of gzip, bzip2, xz and zstd begin.
_COMPRESSED = re.compile(rb"\x1f\x8b|BZh\d1AY&SY|\xfd7zXZ\0|\x28\xb5\x2f\xfd")
# Why files are left out. "a.b.jpg" is the field "b.jpg" of the key "a".
_SECOND_DOT = "in WebDataset's layout an extension begins at the first dot of a name. Rename them to use them"
_OTHER_KIND = "they are of a kind that is not read: convert them to JPEG or PNG"
_LABEL_ALONE = "there is no image of this key, KEY.jpg or KEY.png, in the shard"
# The options of tar against members without their content.
_WHOLE = {"sparse": "without --sparse", "a link": "with --dereference --hard-dereference"}
UNPACK = "unpack it to a plain .tar, which is read by offset"
# Zeros after the last member that need no note: most programs fill a record of 10,240 bytes, `tar -b` larger ones.
_PADDING = 1 << 16


class Shards:
    """The bytes of N images in tar shards, whose files stay open for as long as this object lives.

    `paths`: S shards. `stamps`: int64 (S, 2), bytes and modification time (ns) of each when it was scanned; time -1:
    not compared. `members`: MEMBER (N,). Raises DataError for a shard that is missing or has changed.
    """

    def __init__(self, paths: Sequence[Path], stamps: np.ndarray, members: np.ndarray):
        if members.dtype != MEMBER or stamps.shape != (len(paths), 2):
            raise DataError(f"the index of a pack is damaged: its tables do not fit. {REMEDY}")
        self.paths, self.stamps, self.members = list(paths), stamps, members
        self._files: list[io.FileIO] = []
        weakref.finalize(self, _close, self._files)
        allow_open_files(len(self.paths))
        for path, (size, time) in zip(self.paths, stamps.tolist()):
            try:
                # Without O_NONBLOCK, opening a pipe would wait for its writer.
                self._files.append(io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)))
                now = stamp(os.fstat(self._files[-1].fileno()))
            except OSError as error:
                remedy = REMEDY if error.errno == errno.ENOENT else atomic_files.advice(error, "data.pack")
                text = f"cannot open the shard {path}: {error.strerror or error}"
                raise DataError(f"{text}. {remedy}") from error
            if now[0] != size or time not in (-1, now[1]):
                text = f"was cut short or changed: {now[0]:,} bytes now, {size:,} when it was indexed"
                raise DataError(f"the shard {path} {text}. {REMEDY}")
        shard, offset, length = (members[key] for key in ("shard", "offset", "length"))
        outside = (shard < 0) | (shard >= len(self.paths)) | (offset < 0) | (length < 0)
        if outside.any() or (length > stamps[shard, 0] - offset).any():
            raise DataError(f"the index of a pack is damaged: an image lies in no shard. {REMEDY}")

    def __len__(self) -> int:
        return len(self.members)

    def take(self, numbers: np.ndarray) -> "Shards":
        """Return the images `numbers`, int64, numbered anew in that order."""
        return Shards(self.paths, self.stamps, self.members[numbers])

    def read(self, i: int, most: int | None = None) -> bytes:
        """Return the bytes of image `i`, or the first `most` of them, in any thread and forked process.

        Raises DataError with the shard's name once it has been cut short or cannot be read any more.
        """
        shard, start, length, _ = self.members[i].item()
        path, file, length = self.paths[shard], self._files[shard].fileno(), min(length, most or length)
        try:
            content = _pread(file, length, start)
            if len(content) < length:
                size = os.fstat(file).st_size
                raise DataError(f"the shard {path} was cut short while in use: {size:,} bytes. {REMEDY}")
        except OSError as error:
            raise DataError(f"the shard {path} cannot be read: {error.strerror or error}") from error
        return content

    def fetch(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return the bytes of several images, uint8."""
        return [np.frombuffer(self.read(i), np.uint8) for i in indices]

    def damage(self, i: int) -> str | None:
        """Return why the bytes of image `i` are not those that were packed; None if they are, or nobody knows."""
        wanted = int(self.members[i]["crc32"])
        if wanted in (-1, zlib.crc32(self.read(i))):
            return None
        path = self.paths[self.members[i]["shard"]]
        return f"damaged in the shard {path}: its checksum is another. {REMEDY}"


def _pread(file: int, length: int, start: int) -> bytes:
    """Return `length` bytes of a file from `start` on, fewer only at its end.

    A file server can return less than it was asked for, and the rest when it is asked again.
    """
    content = b""
    while len(content) < length and (more := os.pread(file, length - len(content), start + len(content))):
        content = content + more if content else more
    return content


def _close(files: list[io.FileIO]) -> None:
    for file in files:
        with contextlib.suppress(OSError):  # of a file server: nothing was written
            file.close()


def require_inside(paths: Sequence[Path], root: Path) -> None:
    """Raise DataError for a shard that is, or lies behind, a link that leads out of `root`."""
    for path in paths:
        if links_out(path, root):
            raise DataError(f"the shard {path} is a link that leads out of {root}: put the file itself there")


class Scan(NamedTuple):
    """What the headers of a shard say, image by image."""

    names: list[str]
    labels: np.ndarray  # int64 (n,); -1: no KEY.cls
    members: np.ndarray  # MEMBER (n,); `shard` is 0
    left_out: dict[str, list[str]]  # why -> names
    padded: bool  # whether more than _PADDING zeros follow the last member


def scan_shard(path: Path) -> Scan:
    """Read the headers of a shard. Raises DataError, with its name, if anything in it is not as it should be."""
    images: dict[str, tuple[str, tuple[int, int, int, int]]] = {}
    labels: dict[str, int] = {}
    left_out: defaultdict[str, list[str]] = defaultdict(list)
    remedy = "Copy the shard here again, or write it anew"
    try:
        with _HeaderReader(io.FileIO(path)) as file:
            if _COMPRESSED.match(file.peek()):
                remedy = UNPACK.capitalize()
                raise ValueError("it is compressed")
            tar = tarfile.TarFile(fileobj=file, errorlevel=2)
            for member in iter(tar.next, None):
                tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue] - tarfile keeps a kilobyte of each
                file.allowed = _HEADER_BYTES
                name = member.name.removeprefix("./")
                wild = leaves_root(name) or member.size < 0
                hidden = any(passed_over(part) for part in name.split("/") if part != ".")
                if member.isdir() or (hidden and not wild):
                    continue
                linked = member.islnk() or member.issym()
                if kind := "sparse" if member.issparse() else "a link" if linked else "":
                    remedy = f"Write it anew by `tar` {_WHOLE[kind]}, so that each file is whole in it"
                    raise ValueError(f"its member {name!r} is {kind}")
                if not member.isreg() or wild:
                    raise ValueError(f"its member {name!r} is not a plain file below the archive's top")
                # WebDataset's rule: the extension begins at the first dot of the last part of the path.
                folder, _, base = name.rpartition("/")
                stem, _, extension = base.partition(".")
                key, extension = f"{folder}/{stem}", f".{extension.lower()}"
                if key in (labels if extension == ".cls" else images) and extension in (".cls", *EXTENSIONS):
                    raise ValueError(f"it has two images or two labels of the key {key.lstrip('/')!r}")
                if extension == ".cls":
                    text = _pread(file.fileno(), min(member.size, 32), member.offset_data).strip()
                    if member.size > 32 or not text.isdigit() or (label := int(text)) >= _MOST_CLASSES:
                        raise ValueError(f"its label {name!r} is no whole number from 0: {text!r}")
                    labels[key] = label
                elif extension in EXTENSIONS:
                    known = re.fullmatch(CHECKSUM.format("([0-9a-f]{8})"), member.uname)
                    crc32 = int(known[1], 16) if known else -1
                    images[key] = name, (0, member.offset_data, member.size, crc32)
                elif extension.endswith(tuple(EXTENSIONS)):
                    left_out[_SECOND_DOT].append(name)
                elif extension.endswith(tuple(NOT_READ)):
                    left_out[_OTHER_KIND].append(name)
            padded = _require_end(file.fileno(), tar.offset) > _PADDING
        if alone := [f"{key.lstrip('/')}.cls" for key in labels if key not in images]:
            left_out[_LABEL_ALONE] = alone
        names = [name for name, _ in images.values()]
        as_lines(names)  # raises DataError for a name that cannot be kept
    except OSError as error:
        raise DataError(f"cannot read the shard {path}: {error.strerror or error}") from error
    except (tarfile.TarError, ValueError, OverflowError, DataError) as error:
        raise DataError(f"the shard {path} cannot be used: {error}. {remedy}") from error
    members = np.array([member for _, member in images.values()], MEMBER)
    return Scan(names, np.array([labels.get(key, -1) for key in images], np.int64), members, left_out, padded)


def _require_end(file: int, end: int) -> int:
    """Return how many zeros follow from the byte `end` on, where tarfile saw the end; ValueError for anything else.

    It takes a damaged header, a lost page and the end of the first of two joined shards for the end.
    """
    size = os.fstat(file).st_size
    rest = (_pread(file, _PADDING, at) for at in range(end, size, _PADDING))
    if size - end < _BLOCK or any(part != bytes(len(part)) for part in rest):
        raise ValueError(f"it is cut short, damaged, or joined with another one, after byte {end:,}")
    return size - end


class _HeaderReader(io.BufferedReader):
    """A file for tarfile to read headers from, `allowed` bytes of them until that is set again."""

    allowed = _HEADER_BYTES

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= self.allowed:
            raise tarfile.ReadError(f"a header of more than {_HEADER_BYTES:,} bytes")
        self.allowed -= size
        return super().read(size)


def allow_open_files(count: int) -> int:
    """Raise this process's limit of open files for `count` more, as far as the system allows; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count + 512:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(count + 512, hard), hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
