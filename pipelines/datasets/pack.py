"""A pack: a folder of tar shards with an index, written from image files; or shards that another program wrote.

While it is written, a pack is called FOLDER.part-HASH. A shard in it is whole or not there, and the same command
continues after a kill. FOLDER exists only once everything is on the disk.
"""

import contextlib
import glob
import hashlib
import io
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from pipelines import atomic_files
from pipelines.data_errors import CannotWrite, DataError
from pipelines.datasets.folders import entries
from pipelines.datasets.image_headers import THREADS, image_size, in_threads, read_sizes, stamp
from pipelines.datasets.index import ImageIndex, class_numbers, load_index, require_index, save_index
from pipelines.datasets.shards import CHECKSUM, MEMBER, UNPACK, Scan, Shards, require_inside, scan_shard
from pipelines.output import counted, first_five, say_line, show_progress

INDEX = "index.npz"
SHARD_BYTES = 1 << 30  # what a kill costs at most; ImageNet makes 142 shards
BLOCK = 256  # files read at a time, in threads: on a network disk a file is nearly all waiting
_HEAD = 1 << 16  # bytes of an image that nearly always hold its size
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
_MAKE = "`fastsuncet data pack CONFIG --output FOLDER` makes one"


def open_pack(
    pack: str | Path,
    *,
    kept: Path | None = None,
    like: ImageIndex | None = None,
    scan: bool = False,
    upright: bool = False,
) -> ImageIndex:
    """Return the index of a pack: a folder, or a pattern of .tar files with *, ? and {a,b} or {0000..0146}.

    A folder of `write_pack` has the index of the files it was made from; `like`, where given, must name the same
    images. Other shards are scanned, in order of their names: images are called SHARD.tar/KEY.jpg, and classes have
    the numbers in KEY.cls. Images are turned as their EXIF tags say with `upright`. The result is kept in `kept`, and
    scanned again when a shard has changed, or with `scan`. Raises DataError.
    """
    folder = Path(os.path.expanduser(pack))
    if (folder / INDEX).is_file():
        index = load_index(folder / INDEX, root=folder)
        if index is None or index.pack is None:
            raise DataError(f"{folder / INDEX} is not the index of a pack: {_MAKE}")
        if index.upright != upright:
            text = f"data.exif_orientation={str(index.upright).lower()}"
            raise DataError(f"{folder} was packed with {text}: set that, or pack again")
        if like is not None and index.fingerprint() != like.fingerprint():
            text = "Delete it and run `fastsuncet data pack` again"
            raise DataError(f"the pack {folder} holds other images than the index of {like.root}. {text}")
        return index
    paths = _shard_paths(str(folder))
    # An index that cannot be used is made again: a shard has changed or moved, or it is damaged.
    with contextlib.suppress(DataError):
        index = load_index(kept, own=True) if kept is not None and not scan else None
        if index and index.pack is not None and index.pack.paths == paths and index.upright == upright:
            return index
    if kept is not None:
        require_index(kept)  # before all shards are read
    index = _scanned(paths, upright)
    if kept is not None:
        save_index(index, kept)
    return index


def _shard_paths(pattern: str) -> list[Path]:
    if os.path.isdir(pattern):
        # As images, shards have their ending in any case. One that is unpacked beside its compressed file is read.
        shards = {
            entry.path for entry in entries(pattern) if entry.name.lower().endswith((".tar", *_COMPRESSED))
        }
        names = sorted(name for name in shards if os.path.splitext(name)[0] not in shards)
        names = names or [f"{pattern}/*.tar"]
    else:
        # A file is itself, whatever its name: a[1].tar is no pattern.
        parts = () if os.path.exists(pattern) else _expanded(pattern)
        names = [name for part in parts for name in sorted(glob.glob(part)) or [part]] or [pattern]
    if missing := [name for name in names if not os.path.isfile(name)]:
        raise DataError(f"there is no pack or shard {missing[0]}: {_MAKE}")
    if compressed := [name for name in names if name.lower().endswith(_COMPRESSED)]:
        others = os.path.join(os.path.dirname(compressed[0]), "*.tar")
        raise DataError(f"{compressed[0]} is compressed: {UNPACK}, or name the other shards, as {others}")
    return [Path(os.path.abspath(name)) for name in dict.fromkeys(names)]


def _expanded(pattern: str) -> Iterator[str]:
    """Expand {a,b} and {000..146} as a shell does."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        yield pattern
        return
    options = found[1].split(",")
    if numbers := re.fullmatch(r"(\d+)\.\.(\d+)", found[1]):
        first, last = map(int, numbers.groups())
        options = [f"{n:0{len(numbers[1])}}" for n in range(first, last + 1)]
    if not options or options == [found[1]]:
        allowed = "{a,b} and {0000..0146}, from the lower number to the higher, are"
        raise DataError(f"{found[0]} in {pattern} is neither a list nor a range: {allowed}")
    for option in options:
        yield from _expanded(pattern[: found.start()] + option + pattern[found.end() :])


def _scanned(paths: list[Path], upright: bool) -> ImageIndex:
    """Return the index of shards that another program wrote."""
    root = Path(os.path.commonpath([path.parent for path in paths]))
    require_inside(paths, root)
    stamps = np.array([stamp(path.stat()) for path in paths], np.int64)
    scans: list[Scan] = in_threads(lambda i: scan_shard(paths[i]), len(paths), f"shards in {root}")
    for why in dict.fromkeys(why for scan in scans for why in scan.left_out):
        names = [
            f"{path.name}/{name}" for path, scan in zip(paths, scans) for name in scan.left_out.get(why, ())
        ]
        say_line(f"note: {counted(len(names), 'file')} in shards left out ({first_five(names)}): {why}")
    if padded := [path.name for path, scan in zip(paths, scans) if scan.padded]:
        say_line(
            f"note: {counted(len(padded), 'shard')} with over 64 KiB of zeros at the end ({first_five(padded)}): "
            "`tar -b` writes them, but a copy that was not finished can leave them as well"
        )
    members = np.concatenate([scan.members for scan in scans])
    members["shard"] = np.repeat(np.arange(len(paths)), [len(scan.names) for scan in scans])
    if not len(members):
        shards = f"{counted(len(paths), 'shard')} ({first_five([str(path) for path in paths])})"
        raise DataError(f"no image (KEY.jpg, KEY.png) in {shards}")
    labels = np.concatenate([scan.labels for scan in scans])
    pack = Shards(paths, stamps, members)

    def size_of(i: int) -> tuple[int, int]:
        try:
            return image_size(pack.read(i, _HEAD), upright=upright)
        except ValueError:  # the header is longer than that, or there is none
            return image_size(pack.read(i), upright=upright)

    sizes, bad = read_sizes(size_of, len(members), f"images in shards in {root}")
    folders = (path.relative_to(root) for path in paths)
    names = [f"{folder}/{name}" for folder, scan in zip(folders, scans) for name in scan.names]
    classes = class_numbers(int(labels.max()) + 1)
    return ImageIndex(root, names, labels, classes, sizes, bad=bad, pack=pack, upright=upright)


def write_pack(index: ImageIndex, folder: Path) -> int:
    """Pack the files of `index` into the absolute path `folder`; return how many a killed start had packed already.

    Does nothing where `folder` is a pack of the same images. Bad images keep their numbers and reasons, without bytes.
    Raises CannotWrite when the disk refuses, and DataError: files that are gone or have changed since the index was
    made, a disk that is too small, another writer, or a `folder` that is something else.
    """
    assert index.stamps is not None, "images of a pack and in memory are no files to be packed"
    # Named after the files and their times: when one of them changes, nothing of an earlier start is used.
    digest = hashlib.sha256(index.fingerprint().encode() + index.stamps.tobytes()).hexdigest()
    part = folder.with_name(f"{folder.name}.part-{digest[:12]}")
    try:
        atomic_files.make_folder(folder.parent)
        with atomic_files.only_writer(folder) as alone:
            if not alone:
                raise DataError(f"another process is writing {folder}")
            if (folder / INDEX).is_file():
                open_pack(folder, like=index, upright=index.upright)
                return len(index)
            return _write(index, folder, part)
    except OSError as error:
        advice = f"{atomic_files.advice(error, '--output')} The same command continues {part}"
        raise CannotWrite(f"cannot write the pack {folder}: {error.strerror or error}. {advice}") from error


def _write(index: ImageIndex, folder: Path, part: Path) -> int:
    """Make `part` the pack, then `folder`; return how many images were packed already."""
    if atomic_files.exists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists and is not a pack: choose another folder with --output")
    for other in set(folder.parent.glob(f"{glob.escape(folder.name)}.part-{'?' * 12}")) - {part}:
        atomic_files.remove(other)
    atomic_files.make_folder(part)
    atomic_files.remove_leftovers(part)
    before, pack = _write_shards(index, part)
    save_index(replace(index, root=part, stamps=None, pack=pack), part / INDEX)
    os.rename(part, folder)
    atomic_files.sync(folder.parent)
    return before


def _write_shards(index: ImageIndex, part: Path) -> tuple[int, Shards]:
    """Write the shards that are not there. Return how many images were there already, and all shards."""
    assert index.stamps is not None
    lengths = index.stamps[:, 0]
    good = index.good()
    if not len(good):
        raise DataError(f"all {len(index)} images under {index.root} are bad: there is nothing to pack")
    # Bytes in the tar: a header and whole blocks for the image, and two blocks for the label.
    room = 512 + (lengths[good] + 511) // 512 * 512 + np.where(index.labels[good] >= 0, 1024, 0)
    wanted = int(room.sum()) - sum(path.stat().st_size for path in part.glob("*.tar"))
    if wanted > (free := shutil.disk_usage(part).free):
        raise CannotWrite(f"{part} needs {wanted / 1e9:,.3f} GB, and its disk has {free / 1e9:,.3f} GB left")
    shard_of = np.unique((np.cumsum(room) - room) // SHARD_BYTES, return_inverse=True)[1]
    members, before, paths = np.zeros(len(index), MEMBER), 0, []
    members["crc32"] = -1
    for shard in range(shard_of[-1] + 1):
        numbers, path = good[shard_of == shard], part / f"{shard:06d}.tar"
        found = np.empty(0, MEMBER)
        with contextlib.suppress(DataError):  # not there, or damaged by a power cut
            found = scan_shard(path).members
        if np.array_equal(found["length"], lengths[numbers]):
            before += len(numbers)
            show_progress(part, int(numbers[-1]) + 1, len(index))
        else:
            found = _write_shard(index, path, numbers)
        found["shard"] = shard
        members[numbers] = found
        paths.append(path)
    return before, Shards(paths, np.array([(path.stat().st_size, -1) for path in paths], np.int64), members)


def _write_shard(index: ImageIndex, path: Path, numbers: np.ndarray) -> np.ndarray:
    """Write the shard of the images `numbers`; return where they lie in it, MEMBER (n,) with `shard` 0."""
    members = []
    with (
        ThreadPoolExecutor(THREADS) as readers,
        atomic_files.replacing(path) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):

        def add(name: str, content: bytes, owner: str = "") -> None:
            member = tarfile.TarInfo(name)
            member.size, member.uname = len(content), owner
            tar.addfile(member, io.BytesIO(content))

        for first in range(0, len(numbers), BLOCK):
            block = numbers[first : first + BLOCK].tolist()
            for number, content in zip(block, readers.map(partial(_content, index), block)):
                suffix = os.path.splitext(index.name(number))[1].lower()
                crc32 = zlib.crc32(content)
                members.append((0, tar.offset + tarfile.BLOCKSIZE, len(content), crc32))  # behind its header
                add(f"{number:08d}{suffix}", content, CHECKSUM.format(f"{crc32:08x}"))
                if index.labels[number] >= 0:
                    add(f"{number:08d}.cls", str(index.labels[number]).encode())
            show_progress(path.parent, block[-1] + 1, len(index))
    return np.array(members, MEMBER)


def _content(index: ImageIndex, number: int) -> bytes:
    path = index.path(number)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be packed: {error.strerror or error}") from error
    if len(content) != index.stamps[number, 0]:  # pyright: ignore[reportOptionalSubscript]
        raise DataError(f"{path} has changed since its index was made: run `fastsuncet data check`")
    return content
