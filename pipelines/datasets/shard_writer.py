"""Writes a pack: a copy of an index's files in one, which a kill at any moment leaves to be continued.

While it grows the pack is called FILE.part, and FILE.part.log says which images are in it for good; FILE is there only
once it is whole, on the disk, under its checksums. The same command continues where a killed one stopped.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np

from pipelines.data_errors import DataError
from pipelines.datasets.image_headers import THREADS, Progress, in_threads
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.shards import HEADER, header_of, open_pack, table_of

BLOCK = 256  # files read at a time, in threads: on a network disk a file is nearly all waiting
FLUSH = 64 << 20  # bytes between two waits for the disk: what a kill costs at most
_ROW = struct.Struct("<QII")  # an image's bytes, its crc32, and a crc32 of these two and its number


def write_pack(
    index: ImageIndex, output: str | Path, *, threads: int = THREADS, progress: Progress | None = None
) -> int:
    """Packs the files of `index` into `output`; returns how many images an earlier, killed start had packed already.

    Does nothing where `output` is a whole pack of these very images. `progress(done, all)` follows. Bad images keep
    their numbers and reasons, without bytes. Raises DataError: files that are gone or have changed since the index was
    made, a disk that refuses or is too small, another process at it, or an `output` that is something else.
    """
    output = Path(output)
    if index.root is None or index.pack is not None:
        raise DataError("only images that are files can be packed")
    if output.exists():
        open_pack(output, like=index)  # whatever is wrong with it, it is not for us to overwrite
        return len(index)
    part, log = (output.with_name(output.name + end) for end in (".part", ".part.log"))
    try:
        with contextlib.ExitStack() as stack:
            output.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            data, rows = (stack.enter_context(open(os.open(p, flags, 0o666), "r+b")) for p in (part, log))
            _lock(data, part)
            lengths, checksums = _taken_over(data, rows, index)
            before = len(lengths)
            _require_room(index, output, before)
            _copy(index, data, rows, lengths, checksums, threads, progress)
            _finish(index, data, lengths, checksums)
            os.replace(part, output)
        log.unlink()
        _sync_folder(output.parent)
    except OSError as error:
        raise DataError(
            f"cannot write the pack {output}: {error.strerror or error}. The same command continues it"
        ) from error
    return before


def _lock(data, part: Path) -> None:
    try:
        fcntl.flock(data, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"another process is writing {part}") from None
    except OSError:  # a file system without locks: two writers are then not told from one
        return
    if not part.exists():  # the other one finished between our opening and our locking
        raise DataError(f"another process has just finished {part}")


def _taken_over(data, rows, index: ImageIndex) -> tuple[list[int], list[int]]:
    """(bytes, crc32) of the images packed by an earlier start on the same files; both files end behind them."""
    digest = hashlib.sha256(index.fingerprint().encode())
    if index.stamps is not None:
        digest.update(np.ascontiguousarray(index.stamps))
    key, known = digest.digest(), rows.read()
    lengths, checksums = [], []
    if known[: len(key)] != key:
        rows.seek(0)
        rows.truncate()
        rows.write(key)
        rows.flush()
    else:
        there, end = os.fstat(data.fileno()).st_size, HEADER
        for start in range(len(key), len(known) - _ROW.size + 1, _ROW.size):
            length, checksum, check = _ROW.unpack_from(known, start)
            end += length
            # A row that a power cut tore, or whose bytes it lost, ends what counts.
            if check != _check(len(lengths), length, checksum) or end > there or len(lengths) == len(index):
                break
            lengths.append(length)
            checksums.append(checksum)
        rows.seek(len(key) + len(lengths) * _ROW.size)
        rows.truncate()
    data.truncate(HEADER + sum(lengths))
    data.seek(0, os.SEEK_END)
    return lengths, checksums


def _copy(
    index: ImageIndex, data, rows, lengths: list[int], checksums: list[int], threads: int, progress
) -> None:
    waiting, unsynced = b"", 0
    for first in range(len(lengths), len(index), BLOCK):
        numbers = range(first, min(first + BLOCK, len(index)))
        for number, content in zip(numbers, _contents(index, numbers, threads)):
            data.write(content)
            lengths.append(len(content))
            checksums.append(zlib.crc32(content))
            waiting += _ROW.pack(lengths[-1], checksums[-1], _check(number, lengths[-1], checksums[-1]))
            unsynced += len(content)
        if unsynced >= FLUSH or numbers.stop == len(index):
            _sync(data)
            rows.write(waiting)  # only now: a row says that its image is on the disk
            rows.flush()
            waiting, unsynced = b"", 0
        if progress is not None:
            progress(numbers.stop, len(index))


def _contents(index: ImageIndex, numbers: range, threads: int) -> list[bytes]:
    found = [b""] * len(numbers)

    def work(row: int) -> None:
        number = numbers[row]
        if number in index.bad:
            return  # shown to nobody
        path = index.path(number)
        try:
            found[row] = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"{path} cannot be packed: {error.strerror or error}; `fastsuncet data check` looks at every file"
            ) from error
        if index.stamps is not None and len(found[row]) != index.stamps[number, 0]:
            raise DataError(
                f"{path} has changed since its index was made: `fastsuncet data check` makes it again"
            )

    in_threads(work, len(numbers), threads)
    return found


def _finish(index: ImageIndex, data, lengths: list[int], checksums: list[int]) -> None:
    sizes = np.array(lengths, np.int64)
    offsets = HEADER + np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])[: len(sizes)]
    table = table_of(index, offsets, sizes, np.array(checksums, np.uint32))
    start = HEADER + sum(lengths)
    data.seek(start)
    data.write(table)
    data.seek(0)
    data.write(header_of(start, table))
    _sync(data)


def _require_room(index: ImageIndex, output: Path, done: int) -> None:
    if index.stamps is None:
        return
    wanted, free = int(index.stamps[done:, 0].clip(0).sum()), shutil.disk_usage(output.parent).free
    if wanted > free:
        size, unit = (1e9, "GB") if wanted >= 1e9 else (1e6, "MB")
        raise DataError(
            f"the pack {output} needs {wanted / size:,.1f} {unit} more, and its disk has {free / size:,.1f} {unit} left"
        )


def _check(number: int, length: int, checksum: int) -> int:
    return zlib.crc32(struct.pack("<QQI", number, length, checksum))


def _sync(stream) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems order renames themselves and refuse
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
