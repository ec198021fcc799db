"""An image index on disk: one .npz without pickles, replaced atomically, verified when read."""

import contextlib
import os
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelines.data_errors import DataError
from pipelines.datasets.image_headers import THREADS, Progress
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.string_table import Names, leaves_root

_KIND, _VERSION = "fastsuncet image index", 1
_MAKE = "`fastsuncet data check CONFIG` makes one"


def save_index(index: ImageIndex, path: str | Path) -> None:
    """Writes an index of files to `path`. DataError when the disk refuses, or the data have no files."""
    if index.root is None or index.stamps is None:
        raise DataError("only an index of files is kept on disk; data in memory are read again each time")
    arrays = {
        "kind": np.array(_KIND),
        "version": np.array(_VERSION),
        "stamps": index.stamps,
        **arrays_of(index),
    }
    path = Path(path)
    # Under another name until every byte is on the disk: a reader, or a run after a power cut, finds the old
    # index or the new one, never half of one.
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as stream:
            np.savez(stream, **arrays)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise DataError(f"cannot write the index {path}: {error.strerror or error}") from error


def arrays_of(index: ImageIndex) -> dict[str, np.ndarray]:
    """What an index of files says, as arrays without pickles, but for the files' times; `index_of` reads it."""
    arrays = {
        "fingerprint": np.array(index.fingerprint()),
        "root": np.array(str(index.root)),
        "files": index.files.lines,
        "labels": index.labels,
        "classes": Names.of(index.classes).lines,
        "sizes": index.sizes,
        "bad": np.fromiter(index.bad, np.int64, len(index.bad)),
        "reasons": Names.of(" ".join(reason.split()) for reason in index.bad.values()).lines,
    }
    if index.presence is not None:
        arrays["presence"] = index.presence
    return arrays


def index_of(arrays: Mapping[str, np.ndarray]) -> ImageIndex:
    """The index that `arrays_of` was given. KeyError, ValueError or DataError: these arrays are not its own."""
    index = ImageIndex(
        root=Path(str(arrays["root"])),
        files=Names(arrays["files"]),
        labels=arrays["labels"],
        classes=tuple(Names(arrays["classes"])),
        sizes=arrays["sizes"],
        stamps=arrays.get("stamps"),
        bad=dict(zip(arrays["bad"].tolist(), Names(arrays["reasons"]), strict=True)),
        presence=arrays.get("presence"),
    )
    if index.fingerprint() != str(arrays["fingerprint"]):
        raise ValueError("its content does not match its fingerprint")
    return index


def load_index(
    path: str | Path,
    *,
    root: str | Path | None = None,
    refresh: bool = True,
    threads: int = THREADS,
    progress: Progress | None = None,
) -> ImageIndex:
    """Reads what `save_index` wrote; `root` is where the files lie now, by default where they lay then.

    With `refresh`, every file is asked for its bytes and its time and changed files have their headers read
    again (`ImageIndex.refreshed`). That is one stat a file: let one rank of a job do it. New files are not
    looked for; that takes a new scan. Raises DataError: no such file, damaged, another version, files gone.
    """
    index = _verified(Path(path))
    if root is not None:
        index = replace(index, root=Path(root))
    return index.refreshed(threads=threads, progress=progress) if refresh else index


def _verified(path: Path) -> ImageIndex:
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
        if "stamps" not in arrays:
            raise ValueError("it lacks the files' times")
        index = index_of(arrays)
    except (KeyError, ValueError, DataError) as error:
        raise DataError(f"the index {path} is damaged ({error}): delete it; {_MAKE}") from error
    # A file like any other: whoever wrote it, it must not lead out of the data folder. Two substring searches
    # clear nearly every name before its parts are looked at.
    for name in index.files:
        if (name.startswith("/") or ".." in name) and leaves_root(name):
            raise DataError(f"the index {path} names {name!r}, which leads out of the data folder")
    return index
