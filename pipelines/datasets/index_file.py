"""An index on disk: one .npz without pickles, replaced atomically and verified when it is read."""

import io
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pipelines import atomic_files
from pipelines.data_errors import CannotWrite, DataError
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.shards import Shards, require_inside
from pipelines.datasets.string_table import Names
from pipelines.output import say_line

_KIND, _VERSION = "fastsuncet image index", 3
MOST_BYTES = 16 << 30  # of a kept index: ImageNet's has 90 MB
_MAKE = "`fastsuncet data check CONFIG` makes one"


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
        times = np.fromiter(index.folders.values(), np.int64, len(index.folders))
        arrays |= {"folders": Names.of(index.folders).lines, "folder_times": times}
    if index.pack is not None:
        arrays["shards"] = Names.of(str(path.relative_to(index.root)) for path in index.pack.paths).lines
        arrays |= {"shard_stamps": index.pack.stamps, "members": index.pack.members}
    try:
        stream = io.BytesIO()
        np.savez(stream, **{key: array for key, array in arrays.items() if array is not None})
        atomic_files.make_folder(path.parent)
        # Whatever the umask, no other user can write it: `load_index` would refuse it.
        atomic_files.replace(path, stream.getvalue(), 0o644)
    except OSError as error:
        advice = atomic_files.advice(error, "data.index or logging.folder")
        raise CannotWrite(f"cannot write the index {path}: {error.strerror or error}. {advice}") from error


def load_index(path: Path, *, root: Path | None = None, own: bool = False) -> ImageIndex | None:
    """Read what `save_index` wrote, None where there is no file; `root` is where the files lie now, if not as then.

    With `own`, an index that this user cannot read, or another user can write, is none either, and a line says why.
    Raises DataError: damaged, another version, or shards that have changed.
    """
    try:
        with atomic_files.open_file(path, MOST_BYTES, own=own) as stream:
            return _read_index(stream, path, root)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not own:
            raise DataError(f"the index {path} cannot be read: {error.strerror}") from error
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
        folders = Names(arrays.get("folders", np.empty(0, np.uint8)))
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
            folders=dict(zip(folders, arrays["folder_times"].tolist(), strict=True)) if folders else None,
        )
        if index.fingerprint() != str(arrays["fingerprint"]):
            raise ValueError("its content does not match its fingerprint")
        # Whoever wrote the file, it must not lead out of the data folder.
        for names in (index.files, shards, folders):
            if (name := names.leaving_root()) is not None:
                raise ValueError(f"{name!r} leads out of the data folder")
        members = (arrays["shard_stamps"], arrays["members"]) if shards else ()
    except Exception as error:
        raise DataError(f"the index {path} cannot be used: {error}. Delete it; {_MAKE}") from error
    if members:
        paths = [folder / name for name in shards]
        require_inside(paths, folder)
        return replace(index, pack=Shards(paths, *members))
    return index
