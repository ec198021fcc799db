"""An image index on disk: one .npz without pickles, replaced atomically, verified when it is read."""

import contextlib
import itertools
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelines.data_errors import DataError
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.shards import Shards
from pipelines.datasets.string_table import Names, leaves_root

_KIND, _VERSION = "fastsuncet image index", 1
_MAKE = "`fastsuncet data check CONFIG` makes one"


def save_index(index: ImageIndex, path: Path) -> None:
    """Write an index of files or of tar shards to `path`. Raises DataError when the disk refuses."""
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
    }
    if index.stamps is not None:
        arrays["stamps"] = index.stamps
    if index.presence is not None:
        arrays["presence"] = index.presence
    if index.pack is not None:
        arrays["shards"] = Names.of(str(path.relative_to(index.root)) for path in index.pack.paths).lines
        arrays |= {"shard_stamps": index.pack.stamps, "members": index.pack.members}
    # Under another name until every byte is on the disk: a reader, or a run after a power cut, finds the old
    # index or the new one, never half of one.
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as stream:
            np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]: no array is called allow_pickle
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise DataError(f"cannot write the index {path}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems order renames themselves and refuse
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_index(path: Path, *, root: Path | None = None, refresh: bool = True) -> ImageIndex:
    """Read what `save_index` wrote; `root` is where the files lie now, by default where they lay then.

    With `refresh`, the size and time of every file are compared, and changed files have their headers read again
    (`ImageIndex.refreshed`). That is one stat for each file: let one rank of a job do it. New files are not looked
    for; that takes a new scan. Raises DataError: no such file, damaged, another version, files gone or shards changed.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise DataError(f"there is no index {path}: {_MAKE}") from None
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise DataError(f"the index {path} cannot be read ({error}): delete it; {_MAKE}") from error
    if str(arrays.get("kind")) != _KIND:
        raise DataError(f"{path} is not an image index; {_MAKE}")
    if (version := int(arrays.get("version", -1))) != _VERSION:
        raise DataError(f"the index {path} has version {version}, not {_VERSION}: delete it; {_MAKE}")
    try:
        root = root or Path(str(arrays["root"]))
        index = ImageIndex(
            root=root,
            files=Names(arrays["files"]),
            labels=arrays["labels"],
            classes=tuple(Names(arrays["classes"])),
            sizes=arrays["sizes"],
            stamps=None if "shards" in arrays else arrays["stamps"],
            bad=dict(zip(arrays["bad"].tolist(), Names(arrays["reasons"]), strict=True)),
            presence=arrays.get("presence"),
        )
        shards = Names(arrays["shards"]) if "shards" in arrays else ()
        shard_stamps, members = (arrays[key] if shards else None for key in ("shard_stamps", "members"))
        if index.fingerprint() != str(arrays["fingerprint"]):
            raise ValueError("its content does not match its fingerprint")
    except (KeyError, ValueError, DataError) as error:
        raise DataError(f"the index {path} is damaged ({error}): delete it; {_MAKE}") from error
    # Whoever wrote the file, it must not lead out of the data folder. Two substring searches clear nearly every name
    # before its parts are looked at.
    for name in itertools.chain(index.files, shards):
        if (name.startswith("/") or ".." in name) and leaves_root(name):
            raise DataError(f"the index {path} names {name!r}, which leads out of the data folder")
    if shard_stamps is not None and members is not None:
        paths = [root / name for name in shards]
        index = replace(index, pack=Shards(paths, shard_stamps, members))
    return index.refreshed() if refresh else index
