"""Write and read the folder of one checkpoint.

    model.safetensors   weights and buffers
    train_state.pt      optimizer state and the like: tensors and plain types, read with weights_only=True
    meta.json           step, config, versions, ledger; size and sha256 of the two files, and sha256 of itself

A reader hashes the very bytes that it parses afterwards, so they cannot change in between.
"""

import hashlib
import io
import json
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastsuncet.errors import CheckpointError
from fastsuncet.versions import __version__, versions
from pipelines import atomic_files
from pipelines.atomic_files import MEMORY

FORMAT = 1  # of meta.json and the layout: raise it when an older program could misread a newer checkpoint
MODEL, STATE, META = "model.safetensors", "train_state.pt", "meta.json"
META_LIMIT = 64 << 20  # bytes; a config and a ledger have a few thousand


@dataclass(frozen=True)
class LoadedCheckpoint:
    """One verified checkpoint, on the CPU: `model` contiguous, `state` with the strides it was saved with."""

    step: int  # updates done
    model: dict[str, Tensor]
    state: dict[str, Any]
    meta: dict[str, Any]  # the caller's keys, and step, format, time, versions, files
    path: Path


class DamagedCheckpoint(Exception):
    """The reason why this checkpoint cannot be used. Another one can be good."""


def record_path(weights: Path) -> Path:
    """Return the JSON that describes the exported file `weights`: in a folder of its own, or next to the file."""
    return weights.with_name("fastsuncet.json") if weights.name == MODEL else weights.with_suffix(".json")


# ------------------------------------------------------------------------------------------------------ write
def encode(model: dict[str, Tensor], state: dict[str, Any]) -> dict[str, bytes]:
    """Return the content of the model's and the state's file. Copying tensors to the host waits for the device.

    safetensors has no strides: channels-last weights are stored as (O, I, H, W), and loading them into a channels-last
    parameter copies the values into that layout. Raises UnpicklingError for a state that could not be read back when
    the run resumes.
    """
    # Without the tensors, which torch always reads back: with them a save would be encoded a fifth more slowly.
    _decode(_encoded(tree_map_only(Tensor, lambda x: None, state)))
    # Encode before writing: a failed write is then an OSError with its reason, whichever library made the bytes.
    return {MODEL: safetensors_of(model), STATE: _encoded(tree_map_only(Tensor, cpu_copy, state))}


def safetensors_of(tensors: dict[str, Tensor]) -> bytes:
    """Return the content of a safetensors file. A tensor with two names is written twice: networks can share layers."""
    own = {"copy": True, "memory_format": torch.contiguous_format}
    copies = {name: x.detach().to("cpu", **own) for name, x in tensors.items()}
    return safetensors.torch.save(copies, {"format": "pt"})


def _encoded(state: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream)
    # Not getbuffer(): CPython 3.12.1 crashes when it collects a buffer of BytesIO that an exception's frames hold.
    return stream.getvalue()


def _decode(payload: bytes) -> Any:
    return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)


def cpu_copy(tensor: Tensor) -> Tensor:
    """Return `tensor` on the CPU, without gradient, with the same values and strides.

    A tensor on the CPU is copied only if it is a view into more memory than its own: torch.save writes whole storages,
    so one row of a large buffer would take the buffer along.
    """
    tensor = tensor.detach().cpu()
    own = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if own else tensor.clone()


def write(path: Path, step: int, files: dict[str, bytes], meta: dict[str, Any]) -> None:
    """Make the folder `path` and write `files` and meta.json to the disk. Raises OSError; the caller cleans up."""
    os.mkdir(path)
    for name, payload in files.items():
        atomic_files.write_synced(path / name, payload)
    meta = meta | {
        "step": step,
        "format": FORMAT,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "files": {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in files.items()},
    }
    meta = json.loads(json.dumps(meta, allow_nan=False))  # as a reader gets it: the hash is of this
    meta["sha256"] = meta_sha256(meta)
    atomic_files.write_synced(path / META, json.dumps(meta, indent=1).encode())
    atomic_files.sync(path)


def meta_sha256(meta: dict[str, Any]) -> str:
    """Return the hash that meta.json holds of itself: JSON with one bit flipped in a value is still good JSON."""
    return _sha256(json.dumps(meta, sort_keys=True, separators=(",", ":")).encode())


def _sha256(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


# ------------------------------------------------------------------------------------------------------- read
def read(path: Path, step: int | None = None) -> LoadedCheckpoint:
    """Return the checkpoint in folder `path`. No code in it is run, even if it was forged. Raises as `verify`."""
    meta, model, state = verify(path, step)
    try:
        tensors = safetensors.torch.load(model)
        plain = _decode(state)
        if not isinstance(plain, dict):
            raise TypeError(f"{STATE} holds a {type(plain).__name__}")
    except MemoryError:
        raise
    except Exception as error:  # the hashes fit, so the file was made this way; the parsers raise many types
        raise DamagedCheckpoint(
            "its hashes fit, but it holds something else than tensors and plain types "
            f"({type(error).__name__}). It was not made by fastsuncet; nothing in it was run"
        ) from error
    return LoadedCheckpoint(meta["step"], tensors, plain, meta, path)


def verify(path: Path, step: int | None = None) -> tuple[dict[str, Any], bytes, bytes]:
    """Return meta, the bytes of the model and the bytes of the state, all as they were written.

    With `step`, the folder must hold that step and must not be a symbolic link. Raises DamagedCheckpoint;
    CheckpointError for a newer format.
    """
    meta = read_meta(path, step)
    return meta, _read_listed(path / MODEL, meta), _read_listed(path / STATE, meta)


def read_meta(path: Path, step: int | None = None) -> dict[str, Any]:
    """Return the meta of the checkpoint in folder `path`, and look at no other file of it. `step`, errors: `verify`."""
    if step is not None and os.path.islink(path):
        raise DamagedCheckpoint("it is a symbolic link, and these are not followed")
    try:
        meta = json.loads(_read(path / META, META_LIMIT))
        if meta.pop("sha256") != meta_sha256(meta):
            raise DamagedCheckpoint(f"{META} was changed after it was written: its sha256 differs")
        if meta.get("format") != FORMAT:
            # This one is whole. Going back to an older checkpoint would throw away good work.
            raise CheckpointError(
                f"checkpoint {path} has format {meta.get('format')!r}, and fastsuncet {__version__} reads format "
                f"{FORMAT}. Use the version that wrote it: {meta.get('versions')}."
            )
        found, sizes = meta["step"], [meta["files"][name]["bytes"] for name in (MODEL, STATE)]
        if not all(type(number) is int for number in (found, *sizes)) or max(sizes) > MEMORY:
            raise ValueError(f"step {found} and files of {sizes} bytes, and {MEMORY:,} bytes fit into memory")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"{META} is not what was written ({type(error).__name__}: {error})"
        ) from error
    if step not in (None, found):
        raise DamagedCheckpoint(f"{META} is of step {found}: the folder was renamed")
    return meta


def _read_listed(path: Path, meta: dict[str, Any]) -> bytes:
    wanted = meta["files"][path.name]
    payload = _read(path, wanted["bytes"])
    if len(payload) != wanted["bytes"]:
        raise DamagedCheckpoint(f"{path.name} has {len(payload)} bytes, {wanted['bytes']} bytes were written")
    if _sha256(payload) != wanted.get("sha256"):
        raise DamagedCheckpoint(f"{path.name} was changed after it was written: its sha256 differs")
    return payload


def _read(path: Path, limit: int) -> bytes:
    try:
        return atomic_files.read_bytes(path, limit)
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name} cannot be read: {error.strerror}") from error
