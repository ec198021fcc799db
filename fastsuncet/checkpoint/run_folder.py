"""The folder of a run: only one process group uses it at a time, and status.json says how the run stands."""

import contextlib
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from fastsuncet.distributed.collectives import broadcast_json, gather_json
from fastsuncet.distributed.place import Place, explain_error
from fastsuncet.errors import CheckpointError, ConfigError, FastSuncetError, NumericalError, Preempted
from pipelines import atomic_files
from pipelines.data_errors import DataError
from pipelines.output import say_line

Json = TypeVar("Json")
T = TypeVar("T")
LOCK = ".running"
ERRORS = {kind.exit_code: kind for kind in (ConfigError, DataError, NumericalError, CheckpointError)}


def on_rank_0(place: Place, function: Callable[[], Json]) -> Json:
    """Return `function()` of rank 0, a JSON value, on every rank. An error there is one of its exit code on the others.

    Ranks that each looked at the disk could see different files.
    """
    return broadcast_json(on_every_rank(function if place.first else lambda: None))


def on_every_rank(function: Callable[[], T]) -> T:
    """Return each rank's own `function()`. An error on one rank is one of its exit code on the others. Collective."""
    value = own = failed = None
    try:
        value = function()
    except Exception as error:
        own, failed = error, [str(error), getattr(error, "exit_code", None)]
    for rank, failure in enumerate(gather_json(failed)):
        if failure is not None:
            message, code = failure
            raise own or ERRORS.get(code, CheckpointError)(f"rank {rank}: {message}")
    return cast(T, value)


def require_same(values: Mapping[str, Any], kind: type[FastSuncetError] | type[DataError]) -> None:
    """Raise an error of `kind` on every rank, which names the first of `values` that differs, with its ranks and hosts.

    Ranks that were not started alike would each train a network of their own, and no collective would notice: a config
    or a list of labels can be copied to the machines' own disks. The values are of JSON's types. Collective.
    """
    (host, ours), *others = gather_json([socket.gethostname(), values])
    for rank, (there, theirs) in enumerate(others, 1):
        different = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        if different:
            key, more = different[0], f" ({len(different) - 1} more differ)" if different[1:] else ""
            raise kind(
                f"the ranks were not started alike. {key}{more}:\n"
                f"  {shown(ours.get(key))} on rank 0, host {host}\n"
                f"  {shown(theirs.get(key))} on rank {rank}, host {there}\n"
                "Start every rank with the same command, config, lists, weights, program and versions"
            )


def shown(value: Any) -> str:
    """Return a value as a message has it, a digest cut short."""
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 60 else repr(value)


@contextlib.contextmanager
def disk_errors(path: Path, setting: str = "logging.folder") -> Iterator[None]:
    """Raise CheckpointError, with what to do, for an OSError inside, while `path` is written, which `setting` names."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error}. {atomic_files.advice(error, setting)}"
        ) from error


def refuse_existing(output: Path, force: bool | None) -> None:
    """Raise ConfigError for something at `output` that --force, None where there is none, does not let be replaced.

    Raises as `require_writable`.
    """
    with disk_errors(output, "--output"):
        if not force and atomic_files.exists(output):
            remedy = "remove it" if force is None else "add --force to replace it"
            raise ConfigError(f"--output {output} exists. Choose another name, or {remedy}")
    require_writable(output, "--output")


def require_writable(path: Path, setting: str = "logging.folder") -> None:
    """Raise CheckpointError where `path`, which `setting` names, cannot be written: before the work, not after it."""
    with disk_errors(path, setting):
        folder = next(folder for folder in path.absolute().parents if atomic_files.exists(folder))
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"can this folder be written to?")


@contextlib.contextmanager
def lock_folder(folder: Path, place: Place) -> Iterator[bool]:
    """Make `folder` and lock it as long as this process lives; yield False on all ranks if another process has it."""
    with contextlib.ExitStack() as stack:

        def remove_empty() -> None:  # of a run that was refused
            with contextlib.suppress(OSError):  # also where it was moved or removed
                if os.listdir(folder) == [LOCK] and atomic_files.lost_lock() is None:
                    os.unlink(folder / LOCK)
                    os.rmdir(folder)

        def lock() -> bool:
            with disk_errors(folder):
                atomic_files.make_folder(folder)
                held = stack.enter_context(atomic_files.exclusive(folder / LOCK))
                if held:
                    stack.callback(remove_empty)
                    holder = f"process {os.getpid()} on {socket.gethostname()}\n"
                    (folder / LOCK).write_text(holder, encoding="utf-8")
                return held

        yield on_rank_0(place, lock)


@contextlib.contextmanager
def exclusive_run_folder(folder: Path, place: Place) -> Iterator[None]:
    """Hold the run's folder as long as this process lives. CheckpointError on all ranks if another process holds it.

    Two runs in one folder would move each other's metrics aside and continue from each other's checkpoints.
    """
    with lock_folder(folder, place) as locked:
        if not locked:
            holder = b""
            with contextlib.suppress(OSError):
                holder = atomic_files.read_bytes(folder / LOCK, 512)
            found = re.match(rb"process \d+ on [\w.-]+$", holder)
            who = f", {found[0].decode()}" if found else ""
            raise CheckpointError(
                f"another process is running in {folder}{who}: stop it, or give this run another write_tag"
            )
        yield


def require_run_folder() -> None:
    """Raise CheckpointError if a folder that this process has locked was removed, moved, replaced or unmounted."""
    if lost := atomic_files.lost_lock():
        raise CheckpointError(
            f"{lost.parent} was removed, moved, replaced or unmounted while the run used it ({lost.name} is gone). "
            "Nothing was saved there since. Bring the folder back: the same command continues from its newest "
            "checkpoint"
        )


class RunStatus:
    """status.json: how the run stood when it last wrote, for launchers and people. Rank 0 writes it."""

    def __init__(self, path: Path, place: Place):
        self.path, self.place = path, place

    @contextlib.contextmanager
    def recording(self, step: Callable[[], int | None] = lambda: None) -> Iterator[None]:
        """Write "running" now and, when the block is left, how the run ended and after which `step()`."""
        self.write("running", step())
        try:
            yield
        except Preempted as stop:
            self.write("preempted", step(), str(stop))
            raise
        # Whatever ended the run, the file must not go on saying that it runs.
        except BaseException as error:
            error = explain_error(error)
            message = (str(error) or type(error).__name__).splitlines()[0]
            self.write("failed", step(), message, getattr(error, "exit_code", None))
            raise error
        self.write("done", step())

    def write(self, state: str, step: int | None, message: str = "", code: int | None = None) -> None:
        """Write `state` (running, done, preempted or failed) and `step`, the updates done or None before a start.

        `code` is the exit code of what failed, None where it is not known.
        """
        if not self.place.first or not self.path.parent.exists() or atomic_files.lost_lock():
            return
        record = {"state": state, "step": step, "world_size": self.place.world_size, "message": message}
        record["exit_code"] = {"done": 0, "preempted": Preempted.exit_code}.get(state, code)
        text = atomic_files.as_json(record)
        try:
            atomic_files.replace(self.path, text)
        except OSError as error:
            # Do not raise: a full disk ends the run at its next save, or has ended it, with a message of its own.
            try:
                with open(self.path, "r+b") as stream:  # it has room where the last record is
                    stream.write(text)
                    stream.truncate()
            except OSError:
                say_line(f"status: {self.path} cannot be written: {error}")
