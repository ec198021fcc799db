"""Many image files as one: each image's bytes as they were, in one place, checksummed.

A shared file system is asked for one file where a folder asks it for a million. What a pack looks like (numbers
little-endian):

    0       header, 4096 bytes: magic, version, where the table is, how long, its sha256; a crc32 of these
    4096    the images' bytes, one after the other
    table   an .npz: offsets and bytes of each image, its crc32, and the index (names, labels, sizes, bad ones)

Training reads the bytes without counting them through: a flipped bit is found by `fastsuncet data check`, or when the
image cannot be decoded. `pipelines.datasets.shard_writer` writes packs.

Read, not mapped into memory, though a map saves a copy of 14 us an image: where a mapped file is cut short, or its disk
or server fails, the system kills the process that touches it (SIGBUS), and nobody learns why. A read says so.
"""

import hashlib
import io
import os
import struct
import weakref
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipelines.data_errors import DataError
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.index_io import arrays_of, index_of

MAGIC, VERSION = b"fastsuncet packed images", 1
_FIELDS = struct.Struct("<24sIQQ32s")  # magic, version, the table's offset and length, its sha256
HEADER = 4096  # bytes: the images begin on a page of their own
_CRC = struct.Struct("<I")
_MAKE = "delete it and make it again with `fastsuncet data pack`"


@dataclass(frozen=True, eq=False)
class Pack:
    """The bytes of N images: `pack[i]` is a read-only uint8 array. The file stays open for as long as the Pack lives.

    Reading raises DataError, with the pack's name, once the file has been cut short or cannot be read any more.
    """

    path: Path
    descriptor: int  # of the open file, which from now on is the Pack's to close
    offsets: np.ndarray  # int64 (N,)
    lengths: np.ndarray  # int64 (N,) bytes; 0 of an image that could not be read when it was packed
    checksums: np.ndarray  # uint32 (N,) crc32

    def __post_init__(self):
        weakref.finalize(self, os.close, self.descriptor)

    def __reduce__(self):
        # A copy's number would be that of another file once ours is closed, or at once in another process.
        raise TypeError(f"an open pack is neither copied nor pickled: open {self.path} again, by open_pack")

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, i: int) -> np.ndarray:
        return np.frombuffer(self.read(i), np.uint8)

    def read(self, i: int) -> bytes:
        """What the file of image `i` held. Any number of threads and forked processes may read at once."""
        start, length = int(self.offsets[i]), int(self.lengths[i])
        content = b""
        try:
            while len(content) < length:  # a file server may give less than asked for, more when asked again
                more = os.pread(self.descriptor, length - len(content), start + len(content))
                if not more:
                    size = os.fstat(self.descriptor).st_size
                    raise DataError(
                        f"the pack {self.path} was cut short while it was in use: {size:,} bytes, and image {i} ends "
                        f"at {start + length:,}; put it back whole, or {_MAKE}"
                    )
                content = content + more if content else more
        except OSError as error:
            raise DataError(f"the pack {self.path} cannot be read: {error.strerror or error}") from error
        return content

    def fetch(self, indices: np.ndarray) -> list[np.ndarray]:
        """The bytes of several images; the disk is asked for all of them before the first one is waited for."""
        advise = getattr(os, "posix_fadvise", None)  # an operating system may have none
        if advise is not None:
            for i in indices[self.lengths[indices] > 0]:  # 0 bytes would ask for all the rest of the file
                advise(self.descriptor, int(self.offsets[i]), int(self.lengths[i]), os.POSIX_FADV_WILLNEED)
        return [self[i] for i in indices]

    def damage(self, i: int) -> str | None:
        """Why the bytes of image `i` are not those that were packed; None if they are."""
        if zlib.crc32(self.read(i)) == self.checksums[i]:
            return None
        return f"damaged in the pack {self.path}: its checksum is another; {_MAKE}"


def open_pack(path: str | Path, like: ImageIndex | None = None) -> ImageIndex:
    """The images of a pack: an ImageIndex like that of the files they came from, its root the pack itself.

    `like`, where given, is the index that a run would read otherwise. Raises DataError: no such file, no pack,
    truncated, a damaged header or table, or other images than those of `like`; the first that differs is named.
    """
    path = Path(path)
    try:
        with open(path, "rb") as stream:
            header, size = stream.read(HEADER), os.fstat(stream.fileno()).st_size
            start, length, digest = _read_header(path, header, size)
            stream.seek(start)
            table = stream.read(length)
            if hashlib.sha256(table).digest() != digest:
                raise DataError(f"the pack {path} is damaged: the checksum of its table is another; {_MAKE}")
            index = _opened(path, stream.fileno(), table, start)
    except FileNotFoundError:
        raise DataError(f"there is no pack {path}: `fastsuncet data pack CONFIG` makes one") from None
    except OSError as error:
        raise DataError(f"the pack {path} cannot be read: {error.strerror or error}") from error
    if like is not None:
        require_same_images(path, index, like)
    return index


def require_same_images(path: Path, packed: ImageIndex, like: ImageIndex) -> None:
    """Raises DataError, naming the first image that differs, unless the index of a pack says what `like` says."""
    if packed.fingerprint() == like.fingerprint():
        return
    first = next((i for i in range(min(len(packed), len(like))) if _row(packed, i) != _row(like, i)), None)
    if first is not None:
        difference = (
            f"image {first} is {_told(packed, first)} in the pack and {_told(like, first)} in the index"
        )
    else:
        difference = f"{len(packed):,} images in the pack and {len(like):,} in the index"
    raise DataError(f"the pack {path} holds other images than the index: {difference}; {_MAKE}")


def header_of(table_offset: int, table: bytes) -> bytes:
    """The HEADER bytes that a pack begins with."""
    fields = _FIELDS.pack(MAGIC, VERSION, table_offset, len(table), hashlib.sha256(table).digest())
    return (fields + _CRC.pack(zlib.crc32(fields))).ljust(HEADER, b"\0")


def table_of(index: ImageIndex, offsets: np.ndarray, lengths: np.ndarray, checksums: np.ndarray) -> bytes:
    """The table that a pack ends with."""
    stream = io.BytesIO()
    np.savez(stream, offsets=offsets, lengths=lengths, checksums=checksums, **arrays_of(index))
    return stream.getvalue()


def _read_header(path: Path, header: bytes, size: int) -> tuple[int, int, bytes]:
    """(offset, length, sha256) of the table."""
    if not header.startswith(MAGIC):
        raise DataError(f"{path} is not a pack of images: `fastsuncet data pack CONFIG` makes one")
    fields = header[: _FIELDS.size]
    if len(header) < HEADER:
        raise DataError(f"the pack {path} is truncated: {size:,} bytes are not even its header; {_MAKE}")
    if header[_FIELDS.size : _FIELDS.size + _CRC.size] != _CRC.pack(zlib.crc32(fields)):
        raise DataError(f"the pack {path} is damaged: the checksum of its header is another; {_MAKE}")
    _, version, start, length, digest = _FIELDS.unpack(fields)
    if version != VERSION:
        raise DataError(f"the pack {path} has version {version}, not {VERSION}: {_MAKE}")
    if size < start + length:
        raise DataError(f"the pack {path} is truncated: {size:,} of its {start + length:,} bytes; {_MAKE}")
    return start, length, digest


def _opened(path: Path, descriptor: int, table: bytes, end: int) -> ImageIndex:
    """The index in a pack's table. `end` is that of the images' part; the descriptor stays the caller's."""
    try:
        with np.load(io.BytesIO(table), allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
        offsets, lengths, checksums = (arrays[key] for key in ("offsets", "lengths", "checksums"))
        index = replace(index_of(arrays), root=path, stamps=None)
        if not len(offsets) == len(lengths) == len(checksums) == len(index):
            raise ValueError("its lists are of different lengths")
        if len(offsets) and (offsets.min() < HEADER or lengths.min() < 0 or (offsets + lengths).max() > end):
            raise ValueError("it names bytes outside of the images' part")
    except (KeyError, ValueError, OSError, DataError, zipfile.BadZipFile) as error:
        raise DataError(f"the pack {path} is damaged ({error}): {_MAKE}") from error
    return replace(index, pack=Pack(path, os.dup(descriptor), offsets, lengths, checksums))


def _row(index: ImageIndex, i: int) -> tuple:
    return index.name(i), int(index.labels[i]), tuple(index.sizes[i].tolist())


def _told(index: ImageIndex, i: int) -> str:
    height, width = index.sizes[i].tolist()
    return f"{index.name(i)} ({width} x {height}, class {index.labels[i]})"
