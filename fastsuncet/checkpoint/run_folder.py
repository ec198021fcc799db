"""The folder of a run: only one process group uses it at a time, and status.json says how the run stands."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from fastsuncet.checkpoint import atomic_files
from fastsuncet.console import say_line
from fastsuncet.distributed import launch
from fastsuncet.distributed.collectives import broadcast_json
from fastsuncet.errors import CheckpointError


@contextlib.contextmanager
def exclusive_run_folder(folder: Path, place: launch.Place) -> Iterator[None]:
    """Hold the run's folder as long as this process lives. CheckpointError on all ranks if another process holds it.

    Two runs in one folder would move each other's metrics aside and continue from each other's checkpoints.
    """
    with contextlib.ExitStack() as stack:
        problem = None
        if place.first:
            try:
                atomic_files.make_folder(folder)
                if not stack.enter_context(atomic_files.exclusive(folder / ".running")):
                    problem = (
                        f"another process is running in {folder}: stop it, or give this run another write_tag"
                    )
            except OSError as error:
                problem = f"{folder} cannot be written: {error}. {atomic_files.advice(error)}"
        problem = broadcast_json(problem)
        if problem is not None:
            raise CheckpointError(problem)
        yield


class RunStatus:
    """status.json: how the run stood when it last wrote, for launchers and people. Rank 0 writes it atomically."""

    def __init__(self, path: Path, place: launch.Place):
        self.path, self.place = path, place

    def write(self, state: str, step: int | None, message: str = "") -> None:
        """Write `state` (running, done, preempted or failed) and `step`, the updates done or None before a start."""
        if not self.place.first or not self.path.parent.exists():
            return
        record = {"state": state, "step": step, "world_size": self.place.world_size, "message": message}
        try:
            atomic_files.replace(self.path, json.dumps(record, indent=1).encode() + b"\n")
        except OSError as error:
            # Do not raise: a full disk ends the run at its next save, or has ended it, with a message of its own.
            say_line(f"status: {self.path} cannot be written: {error}")
