"""What a cell leaves behind: one JSON file, written by rank 0, read by it for all, by one process at a time."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fastsuncet.checkpoint import atomic_files
from fastsuncet.distributed.collectives import broadcast_json
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import CheckpointError

Record = dict[str, Any]


@contextmanager
def alone(folder: Path, place: Place) -> Iterator[bool]:
    """Makes `folder` and holds it on all ranks, or yields False on all if another process does."""
    with ExitStack() as stack:
        held, problem = True, None
        if place.first:
            try:
                atomic_files.make_folder(folder)
                held = stack.enter_context(atomic_files.exclusive(folder / ".running"))
            except OSError as error:
                problem = f"{folder} cannot be written: {error}. {atomic_files.advice(error)}"
        held, problem = broadcast_json([held, problem])
        if problem is not None:
            raise CheckpointError(problem)
        yield held


def read_shared(place: Place, read: Callable[[], Any]) -> Any:
    """`read()` of rank 0 on every rank: ranks that looked for themselves could see different files."""
    record, problem = None, None
    if place.first:
        try:
            record = read()
        except CheckpointError as error:
            problem = str(error)
    record, problem = broadcast_json([record, problem])
    if problem is not None:
        raise CheckpointError(problem)
    return record


def read_record(path: Path, identity: Record) -> Record | None:
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the result of a cell, {path}, cannot be read ({error}): remove it") from error
    if not isinstance(record, dict) or record.get("identity") != identity:
        raise CheckpointError(f"{path} is of another setting than its folder says: remove it")
    return record


def write_bytes(path: Path, payload: bytes) -> None:
    try:
        atomic_files.replace(path, payload)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}. {atomic_files.advice(error)}") from error
