"""Checkpoints: a folder that is whole and verified, or that does not count.

    FOLDER/step_00012345/   one checkpoint, see snapshot.py
    FOLDER/latest           the name of the newest one, as text

A save writes under a hidden name, fsyncs the files and the folder, renames it, fsyncs the parent, and only
then points `latest` to it and removes what is too old. So a kill at any moment leaves the old checkpoints and
`latest` as they were, or the new one complete. A load goes back to the newest good checkpoint and says what
was wrong with each that it passed over; where none is good it stops, since starting over from step 0 in
silence is the one thing nobody wants.

Only one rank saves. Hidden names: .lock, .tmp-* (being written, or being removed), .replaced-* (the
checkpoint of a step that is being saved again).
"""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from fastsuncet.checkpoint import atomic_files, serialization
from fastsuncet.checkpoint import format as snapshot
from fastsuncet.checkpoint.format import Checkpoint, DamagedCheckpoint
from fastsuncet.console import Say, say_line
from fastsuncet.errors import CheckpointError

__all__ = ["Checkpoint", "good_checkpoints", "load", "load_newest", "save"]

LATEST = "latest"
# Besides the tensors: their names and shapes, the config. Only the check for free space uses it.
OVERHEAD = 1 << 20  # bytes
_NAME = re.compile(r"(?:\.replaced-)?(step_([0-9]{8}|[1-9][0-9]{8,}))")


def save(
    folder: str | Path,
    step: int,  # updates done
    *,
    model: dict[str, Tensor],
    state: dict,  # nested dicts, lists and tuples of tensors, int, float, str, bool, None
    meta: dict,  # JSON types: config, ledger, whatever else a reader should find
    keep: int,  # newest good checkpoints that stay, this one included
    say: Say = say_line,
) -> Path:
    """Writes the checkpoint of `step` so that it exists completely or not at all; returns its folder.

    Tensors may be on any device; copying them to the host is the sync. A checkpoint of the same step is
    replaced. An older one is removed only once `keep` newer ones have been read back and found good. Raises
    TypeError or ValueError, with the path of the item, for contents that could not be read back;
    CheckpointError if the disk refuses, after removing what was half written and with everything older
    untouched.
    """
    folder = Path(folder)
    if step < 0 or keep < 1:
        raise ValueError(f"step {step} and keep {keep}: at least 0 and 1 are wanted")
    name = f"step_{step:08d}"
    meta = snapshot.new_meta(step, meta)
    model, state = serialization.model_tensors(model), serialization.plain_state(state)
    needed = serialization.num_bytes([model, state]) + OVERHEAD
    try:
        atomic_files.make_folder(folder)
        with atomic_files.exclusive(folder / ".lock") as held:
            if not held:
                raise CheckpointError(
                    f"another process is writing a checkpoint in {folder}: two runs must not share a "
                    "folder. Stop one of them, or give it another logging.folder."
                )
            _sweep(folder)
            _require_space(folder, name, needed)
            _install(folder, name, model, state, meta)
            atomic_files.replace(folder / LATEST, f"{name}\n".encode())
            _prune(folder, step, keep, say)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {name} ({_size(needed)}) could not be saved in {folder}: {error}. "
            f"{atomic_files.advice(error)} The checkpoints before it are as they were; the same command continues "
            "from them."
        ) from error
    return folder / name


def _install(folder: Path, name: str, model: dict[str, Tensor], state: dict, meta: dict) -> None:
    """The new checkpoint under a hidden name, then under its own; the hidden one goes if anything fails."""
    temporary, target, old = folder / f".tmp-{name}", folder / name, folder / f".replaced-{name}"
    try:
        snapshot.write(temporary, model, state, meta)
        # A folder cannot be renamed onto a full one. Between these two renames the old one counts under its
        # hidden name: it may be the only checkpoint there is.
        if os.path.lexists(target):
            os.rename(target, old)
        os.rename(temporary, target)
        atomic_files.sync_folder(folder)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(target):
            os.rename(old, target)
        _remove_quietly(temporary)
        raise
    _remove_quietly(old)


def _remove_quietly(path: Path) -> None:
    """Clears up what no reader looks at. An error here is not worth a save, nor the error that led here:
    the next save sweeps again."""
    with contextlib.suppress(OSError):
        atomic_files.remove(path)


def _sweep(folder: Path) -> None:
    """Removes what killed writers left behind. Only under the lock: none of these writers is alive."""
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        superseded = match and path.name != match[1] and (folder / match[1]).exists()
        if path.name.startswith(".tmp-") or superseded:
            _remove_quietly(path)


def _require_space(folder: Path, name: str, needed: int) -> None:
    """Twice the size must be free: other things are being written to that disk as well, metrics for one."""
    free = atomic_files.free_bytes(folder)
    if free < 2 * needed:
        raise CheckpointError(
            f"checkpoint {name} needs {_size(needed)}, and twice that ({_size(2 * needed)}) is to be free "
            f"before it is written; {folder} has {_size(free)}. Free {_size(2 * needed - free)}, lower "
            "checkpoint.keep, or point logging.folder to another disk. The checkpoints before it are as they "
            "were."
        )


# What was read back whole, and when its files last changed: each is read back once, not at every save.
_read_back: dict[Path, tuple] = {}


def _prune(folder: Path, step: int, keep: int, say: Say) -> None:
    """Removes checkpoints up to `step` beyond the `keep` newest good ones.

    DamagedCheckpoint ones count for nothing and go when they are older than those. Later steps (a run that was set
    back) are left alone until the run passes them.
    """
    found = [(n, path) for n, path in _checkpoints(folder) if n <= step and not path.is_symlink()]
    if len(found) <= keep:
        return
    good = 0
    for number, path in found:
        if good < keep:
            try:
                _require_good(path, number)
                good += 1
            except (DamagedCheckpoint, CheckpointError, OSError) as fault:
                say(f"checkpoint: {path} is damaged and does not count among those kept: {fault}")
            continue
        _read_back.pop(path, None)
        rubbish = folder / f".tmp-{path.name}"
        try:
            # Renamed first: a kill while the files go must not leave what looks like a damaged checkpoint.
            os.rename(path, rubbish)
            atomic_files.remove(rubbish)
        except OSError as error:  # the save itself is complete
            say(f"checkpoint: {path} is old and could not be removed: {error}")


def _require_good(path: Path, step: int) -> None:
    names = (snapshot.MODEL, snapshot.STATE, snapshot.META)
    stamp = tuple((status.st_size, status.st_mtime_ns) for status in (os.stat(path / name) for name in names))
    if _read_back.get(path) != stamp:
        snapshot.verify(path, step)
        _read_back[path] = stamp


# ------------------------------------------------------------------------------------------------------- load


def load_newest(
    folder: str | Path, *, expect: Callable[[dict], None] | None = None, say: Say = say_line
) -> Checkpoint | None:
    """The checkpoint that `latest` names, else the newest good one; None where there has never been one.

    Each one passed over is said in one line. `expect(meta)` is called for the one chosen; what it raises is
    passed on, since another config is no damage and an older checkpoint would not help. Raises
    CheckpointError if checkpoints are there and none can be used, or if one is in a newer format.
    """
    folder = Path(folder)
    try:
        candidates = _checkpoints(folder)
        named = _latest(folder, say)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"checkpoints in {folder} cannot be listed: {error}. {atomic_files.advice(error)}"
        ) from error
    if named is not None:
        if named not in [number for number, _ in candidates]:
            # Gone. That is to be said: it may be all there was.
            candidates.append((named, folder / f"step_{named:08d}"))
        candidates.sort(key=lambda candidate: candidate[0] != named)
    faults = []
    for number, path in candidates:
        try:
            loaded = snapshot.parse(path, *snapshot.verify(path, number))
        except DamagedCheckpoint as fault:
            faults.append(f"{path.name}: {fault}")
            say(f"checkpoint: {path} cannot be used: {fault}")
            continue
        if faults:
            say(f"checkpoint: continuing from {path.name} instead")
        if expect is not None:
            expect(loaded.meta)
        return loaded
    if not faults:
        return None
    raise CheckpointError(
        "\n  ".join([f"none of the checkpoints in {folder} can be used:", *faults])
        + "\nNothing was changed. Bring one of them back, or move the folder away to start over from step 0."
    )


def load(path: str | Path) -> Checkpoint:
    """The one checkpoint in folder `path`, whatever its name. Raises CheckpointError if it is not good."""
    path = Path(path)
    try:
        return snapshot.parse(path, *snapshot.verify(path))
    except DamagedCheckpoint as fault:
        raise CheckpointError(f"checkpoint {path} cannot be used: {fault}") from fault


def good_checkpoints(folder: str | Path, say: Say = say_line) -> list[tuple[int, Path]]:
    """(step, folder) of every good checkpoint, ascending; each one that is not is said in one line.

    Reads all of each from the disk. No folder, no checkpoint: an empty list. Raises CheckpointError for one in a newer
    format, or a folder that cannot be listed.
    """
    folder = Path(folder)
    try:
        candidates = _checkpoints(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"checkpoints in {folder} cannot be listed: {error}. {atomic_files.advice(error)}"
        ) from error
    return [(number, path) for number, path in sorted(candidates) if _is_good(path, number, say)]


def _is_good(path: Path, step: int, say: Say) -> bool:
    try:
        snapshot.verify(path, step)
    except DamagedCheckpoint as fault:
        say(f"checkpoint: {path} cannot be used: {fault}")
        return False
    return True


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of all that claim to be checkpoints, newest first; a hidden one if it stands alone."""
    matches = [match for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    plain = {match[1] for match in matches if match[0] == match[1]}
    found = [
        (int(match[2]), folder / match[0])
        for match in matches
        if match[0] == match[1] or match[1] not in plain
    ]
    return sorted(found, reverse=True)


def _latest(folder: Path, say: Say) -> int | None:
    """The step `latest` names; None if there is no such file, or it holds no checkpoint's name."""
    path = folder / LATEST
    try:
        with open(path, "rb") as stream:
            text = stream.read(100).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        say(f"checkpoint: {path} cannot be read ({error}); looking for the newest good one")
        return None
    match = _NAME.fullmatch(text)
    if match is None or match[0] != match[1]:  # never a path: "../elsewhere" stops here
        say(f"checkpoint: {path} says {text!r}, not a checkpoint's name; looking for the newest good one")
        return None
    return int(match[2])


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
