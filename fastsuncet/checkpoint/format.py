"""One checkpoint's folder: how it is written, and what has to hold before a byte of it is used.

    model.safetensors   weights and buffers
    train_state.pt      optimizer and the like: tensors and plain types, read with weights_only=True
    meta.json           step, config, versions, ledger; size and sha256 of the two files, and sha256 of itself

A reader hashes the very bytes that it then parses, so nothing can change in between.
"""

import hashlib
import io
import json
import os
import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from fastsuncet import __version__
from fastsuncet.checkpoint import atomic_files, serialization
from fastsuncet.errors import CheckpointError
from fastsuncet.versions import dali, installed

FORMAT = 1  # of meta.json and the layout: raised when an older program could misread a newer checkpoint
MODEL, STATE, META = "model.safetensors", "train_state.pt", "meta.json"


@dataclass(frozen=True)
class Checkpoint:
    """One verified checkpoint, on the CPU: `model` contiguous, `state` with the strides it was saved with."""

    step: int  # updates done
    model: dict[str, Tensor]
    state: dict
    meta: dict  # the caller's keys, and step, format, time, versions, files
    path: Path


class DamagedCheckpoint(Exception):
    """Why this checkpoint cannot be used; another one may."""


def new_meta(step: int, meta: dict) -> dict:
    """The caller's `meta` and what a checkpoint says of itself; `write` adds the files. Raises TypeError."""
    record = {
        "step": step,
        "format": FORMAT,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "files": {},
    }
    if taken := sorted((record.keys() | {"sha256"}) & meta.keys()):
        raise ValueError(f"meta has {', '.join(taken)}: a checkpoint fills these in itself")
    return record | serialization.plain_json(meta)


def versions() -> dict[str, str | None]:
    """What writes a checkpoint, None for what is not installed. DALI is not imported for its number."""
    return {
        "fastsuncet": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "torchvision": installed("torchvision"),
        "timm": installed("timm"),
        "dali": dali(),
        "numpy": installed("numpy"),
    }


# ------------------------------------------------------------------------------------------------------ write


def write(path: Path, model: dict[str, Tensor], state: dict, meta: dict) -> None:
    """Makes the folder `path` and puts its three files on the disk. Raises OSError; the caller clears up."""
    os.mkdir(path)
    # Bytes first, then one plain write: an error is then an OSError with its reason, whichever library made
    # them.
    sums = {MODEL: _put(path / MODEL, safetensors.torch.save(model, {"format": "pt"}))}
    stream = io.BytesIO()
    torch.save(state, stream)
    # Not getbuffer(): CPython 3.12.1 crashes when it collects a buffer of BytesIO that an exception's frames hold, and
    # a full disk is just that. getvalue() shares the same bytes without a copy.
    sums[STATE] = _put(path / STATE, stream.getvalue())
    meta = meta | {"files": sums}
    meta["sha256"] = _own_sha256(meta)
    atomic_files.write_synced(path / META, json.dumps(meta, indent=1).encode())
    atomic_files.sync_folder(path)


def _put(path: Path, payload: bytes | memoryview) -> dict:
    return {"bytes": len(payload), "sha256": atomic_files.write_synced(path, payload)}


def _own_sha256(meta: dict) -> str:
    """meta.json vouches for itself: with one bit flipped in a value it would still be good JSON."""
    return hashlib.sha256(json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------- read


def verify(path: Path, step: int | None = None) -> tuple[dict, bytes, bytes]:
    """meta, and the bytes of the model and of the state, each as it was written. Raises DamagedCheckpoint.

    With `step` the folder must be that step's own, and no symbolic link. A newer format raises
    CheckpointError.
    """
    if step is not None and path.is_symlink():
        raise DamagedCheckpoint("it is a symbolic link, and these are not followed")
    if not path.is_dir():
        raise DamagedCheckpoint("there is no such folder")
    meta = read_meta(path)
    if step is not None and meta["step"] != step:
        raise DamagedCheckpoint(f"{META} is of step {meta['step']}: the folder was renamed")
    return meta, _payload(path / MODEL, meta), _payload(path / STATE, meta)


def read_meta(path: Path) -> dict:
    """meta.json of the checkpoint at `path` if it is as it was written; the other files are not looked at."""
    try:
        meta = json.loads(_read(path / META))
        intact = meta.pop("sha256") == _own_sha256(meta)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"{META} is not what was written ({type(error).__name__}: {error})"
        ) from error
    if not intact:
        raise DamagedCheckpoint(f"{META} was changed after it was written: its sha256 is another")
    if meta.get("format") != FORMAT:
        # Whole, but not ours to read: going back to an older checkpoint would throw away good work.
        raise CheckpointError(
            f"checkpoint {path} has format {meta.get('format')!r}, and fastsuncet {__version__} reads format "
            f"{FORMAT}. Use the version that wrote it: {meta.get('versions')}."
        )
    sums = meta.get("files")
    complete = isinstance(sums, dict) and all(isinstance(sums.get(name), dict) for name in (MODEL, STATE))
    if type(meta.get("step")) is not int or not complete:
        raise DamagedCheckpoint(f"{META} lacks its step, or the sums of {MODEL} and {STATE}")
    return meta


def _payload(path: Path, meta: dict) -> bytes:
    payload, sums = _read(path), meta["files"][path.name]
    if len(payload) != sums.get("bytes"):
        raise DamagedCheckpoint(
            f"{path.name} has {len(payload)} bytes, {sums.get('bytes')} bytes were written"
        )
    if hashlib.sha256(payload).hexdigest() != sums.get("sha256"):
        raise DamagedCheckpoint(f"{path.name} was changed after it was written: its sha256 is another")
    return payload


def _read(path: Path) -> bytes:
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name} cannot be read: {error.strerror}") from error
    if not payload:
        raise DamagedCheckpoint(f"{path.name} is empty")
    return payload


def parse(path: Path, meta: dict, model: bytes, state: bytes) -> Checkpoint:
    """The checkpoint in bytes that `verify` found good. Whoever wrote them: nothing in them is run."""
    try:
        tensors = safetensors.torch.load(model)
        plain = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
        if not isinstance(plain, dict):
            raise TypeError(f"{STATE} holds a {type(plain).__name__}")
    except MemoryError:
        raise
    except Exception as error:  # the hashes fit, so somebody made this; the parsers raise many types
        raise DamagedCheckpoint(
            "its hashes fit, yet it holds something else than tensors and plain types "
            f"({type(error).__name__}). It was not made by fastsuncet; nothing in it was run"
        ) from error
    return Checkpoint(meta["step"], tensors, plain, meta, path)
