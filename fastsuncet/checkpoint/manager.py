"""Save checkpoints so that each is complete and verified or does not count, and load the newest good one.

    FOLDER/step_00012345/   one checkpoint, see format.py
    FOLDER/latest           the name of the newest one, as text

A save writes under a hidden name, syncs and renames; only then does it point `latest` to the new checkpoint and remove
those that are too old. So a kill at any moment leaves the old checkpoints and `latest` as they were, or the new one
complete. A load stops if no checkpoint is good: a run never starts over from step 0 in silence.

Only one rank saves. Hidden names: .lock, .tmp-* (being written or removed), .replaced-* (of a step saved again).
"""

import contextlib
import functools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fastsuncet.checkpoint import format
from fastsuncet.checkpoint.run_folder import disk_errors, require_writable
from fastsuncet.errors import CheckpointError
from pipelines import atomic_files
from pipelines.output import Say, say_line

FOLDER = "checkpoints"  # of a run, in its folder
LATEST = "latest"
T = TypeVar("T")
_NAME = re.compile(r"(?:\.replaced-)?(step_([0-9]{8}|[1-9][0-9]{8,}))")


def save(
    folder: Path,
    step: int,  # updates done
    *,
    model: dict[str, Tensor],
    state: dict[str, Any],  # nested dicts, lists and tuples of tensors, int, float, str, bool, None
    meta: dict[str, Any],  # JSON types: config, ledger and whatever else a reader needs
    keep: int,  # newest good checkpoints that stay, this one included; at least 1
    say: Say = say_line,
) -> Path:
    """Write the checkpoint of `step`, which can be there already, completely or not at all; return its folder.

    An older one is removed only after `keep` newer ones have been read back and found good; if its meta has
    "scheduled": false, after a single one. Raises as `encode`, TypeError or ValueError for a meta that is no JSON,
    and CheckpointError if the disk refuses: what was half written is removed, and everything older is untouched.
    """
    name = f"step_{step:08d}"
    files = format.encode(model, state)
    size = sum(len(payload) for payload in files.values())
    try:
        atomic_files.make_folder(folder)
        with atomic_files.exclusive(folder / ".lock") as held:
            if not held:
                raise CheckpointError(
                    f"another process is writing a checkpoint in {folder}: two runs must not share a "
                    "folder. Stop one of them, or give it another logging.folder."
                )
            # Of killed writers: under the lock, none of them is alive.
            atomic_files.remove_leftovers(folder)
            for path in folder.glob(".replaced-step_*"):
                if (folder / path.name.removeprefix(".replaced-")).exists():
                    atomic_files.try_to_remove(path)
            _require_space(folder, name, size)
            atomic_files.replace_folder(folder / name, lambda new: format.write(new, step, files, meta))
            atomic_files.replace(folder / LATEST, f"{name}\n".encode())
            _remove_old(folder, step, keep, say)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {name} ({_megabytes(size)}) could not be saved in {folder}: {error}. "
            f"{atomic_files.advice(error)} The checkpoints before it are as they were; the same command continues "
            "from them."
        ) from error
    return folder / name


def require_room(folder: Path, size: int) -> None:
    """Make `folder`, and raise CheckpointError unless a checkpoint of `size` bytes can be saved there."""
    with disk_errors(folder):
        atomic_files.make_folder(folder)
        _require_space(folder, "of this run", size)
    require_writable(folder / LATEST)


def _require_space(folder: Path, name: str, size: int) -> None:
    """Raise CheckpointError unless twice `size` is free: metrics and other runs are written to that disk as well."""
    free = shutil.disk_usage(folder).free
    if free < 2 * size:
        raise CheckpointError(
            f"checkpoint {name} is {_megabytes(size)} and needs twice that ({_megabytes(2 * size)}) of free disk "
            f"space; {folder} has {_megabytes(free)}. Free {_megabytes(2 * size - free)} (all checkpoints but the "
            "newest can go), or move the run's folder to another disk and set logging.folder. The checkpoints before "
            "it are as they were."
        )


def _remove_old(folder: Path, step: int, keep: int, say: Say) -> None:
    """Remove checkpoints up to `step` beyond the `keep` newest good ones, and the damaged ones older than those.

    One that the schedule did not ask for does not count, and is removed once there is a newer good one: a run that was
    stopped ends with the checkpoints of one that was not. Later steps, of a run that was set back, stay until then.
    """
    found = [(n, path) for n, path in _list(folder) if n <= step and not path.is_symlink()]
    extra = {path for _, path in found if not _scheduled(path)}
    if extra <= {path for _, path in found[:1]} and len(found) - len(extra) <= keep:
        return
    good = counted = 0
    for number, path in found:
        if counted < keep and not (good and path in extra):
            try:
                files = [(path / name).stat() for name in (format.MODEL, format.STATE, format.META)]
                _verify_once(path, number, *((file.st_size, file.st_mtime_ns) for file in files))
                good += 1
                counted += path not in extra
            except (format.DamagedCheckpoint, CheckpointError, OSError) as fault:
                say(f"checkpoint: {path} is damaged and does not count among those kept: {fault}")
            continue
        hidden = folder / f".tmp-{path.name}"
        try:
            # Rename it first: a kill during the removal must not leave what looks like a damaged checkpoint.
            os.rename(path, hidden)
            atomic_files.remove(hidden)
        except OSError as error:  # the save itself is complete
            say(f"checkpoint: {path} is old and could not be removed: {error}")


@functools.cache
def _verify_once(path: Path, step: int, *changes: tuple[int, int]) -> None:
    """Verify a checkpoint, and not again at the next save unless a file has other `changes`: `keep` can be large."""
    format.verify(path, step)


def _scheduled(path: Path) -> bool:
    """Whether the checkpoint in folder `path` counts among those kept; a damaged one counts until it is verified."""
    with contextlib.suppress(format.DamagedCheckpoint, CheckpointError):  # verifying it reports these
        return format.read_meta(path).get("scheduled", True)
    return True


# ------------------------------------------------------------------------------------------------------- load
def load_newest(folder: Path, say: Say = say_line) -> format.LoadedCheckpoint | None:
    """Return the checkpoint that `latest` names, else the newest good one; None if there has never been one.

    Each one passed over is reported. Raises CheckpointError if none of them can be used, or one has a newer format.
    """
    return _newest(folder, format.read, say)


def newest_meta(folder: Path) -> dict[str, Any] | None:
    """Do as `load_newest`, but read no weights, report nothing, and return a meta: for what all of a run's have."""
    return _newest(folder, format.read_meta, lambda line: None)


def _newest(folder: Path, read: Callable[[Path, int], T], say: Say) -> T | None:
    candidates = _list(folder)
    named = _latest(folder, say)
    if named is not None:
        if named not in dict(candidates):
            # It is gone. Report that: it can be all there was.
            candidates.append((named, folder / f"step_{named:08d}"))
        candidates.sort(key=lambda candidate: candidate[0] != named)
    faults = []
    for number, path in candidates:
        try:
            found = read(path, number)
        except format.DamagedCheckpoint as fault:
            faults.append(f"{path.name}: {fault}")
            say(f"checkpoint: {path} cannot be used: {fault}")
            continue
        if faults:
            say(f"checkpoint: continuing from {path.name} instead")
        return found
    if not faults:
        return None
    raise CheckpointError(
        "\n  ".join([f"none of the checkpoints in {folder} can be used:", *faults])
        + "\nNothing was changed. Bring one of them back, or move the folder away to start over from step 0."
    )


def load(path: str | Path) -> format.LoadedCheckpoint:
    """Return the one checkpoint in folder `path`, whatever its name. Raises CheckpointError if it is not good."""
    try:
        return format.read(Path(path))
    except format.DamagedCheckpoint as fault:
        raise CheckpointError(f"checkpoint {path} cannot be used: {fault}") from fault


def good_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every good checkpoint, ascending, and report each damaged one. Reads every file.

    Raises CheckpointError for a newer format, or for a folder that cannot be listed.
    """
    good = []
    for number, path in reversed(_list(folder)):
        try:
            format.verify(path, number)
            good.append((number, path))
        except format.DamagedCheckpoint as fault:  # noqa: PERF203 - reading the files takes far longer
            say_line(f"checkpoint: {path} cannot be used: {fault}")
    return good


def _list(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of each folder with a checkpoint's name, newest first; a hidden one only if it is alone."""
    try:
        matches = [match for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    except FileNotFoundError:
        return []
    except OSError as error:
        advice = atomic_files.advice(error)
        raise CheckpointError(f"checkpoints in {folder} cannot be listed: {error}. {advice}") from error
    visible = {match[0] for match in matches if match[0] == match[1]}
    return sorted(
        ((int(m[2]), folder / m[0]) for m in matches if m[0] == m[1] or m[1] not in visible), reverse=True
    )


def _latest(folder: Path, say: Say) -> int | None:
    """Return the step that `latest` names, if it is there and names one."""
    path = folder / LATEST
    try:
        text = atomic_files.read_bytes(path, 100).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        text = f"it cannot be read: {error}"
    match = _NAME.fullmatch(text)
    if match is None or match[0] != match[1]:  # never a path such as "../elsewhere"
        say(f"checkpoint: {path} names no checkpoint ({text!r}); looking for the newest good one")
        return None
    return int(match[2])


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
