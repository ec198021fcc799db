"""`fastsuncet train`: from a config to a finished run, or to a message and an exit code.

A run is a folder, <logging.folder>/<logging.write_tag>; the same command continues what is there.

    config.yaml     the resolved config           checkpoints/    step_00012345/ ..., latest
    metrics.jsonl   one line an interval          metrics.csv     the same for a spreadsheet
    status.json     running, done, preempted or failed, and at which step
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from fastsuncet import files, launch
from fastsuncet.communicators import order_launches
from fastsuncet.config import Config
from fastsuncet.data import PairedStream
from fastsuncet.distributed import any_rank, broadcast_json
from fastsuncet.errors import CheckpointError, Preempted
from fastsuncet.images import Images, open_images
from fastsuncet.say import say_line
from fastsuncet.signals import SignalFlag
from fastsuncet.summary import summary
from fastsuncet.train import Trainer


def run(config: Config, arguments: list[str], *, dry_run: bool = False) -> int:
    """Trains as `config` says and returns the exit code; `arguments` start the same command on further ranks.

    `dry_run` finds and checks everything a run needs, prints the resolved config and the plan, and trains nothing.
    """
    if dry_run:
        for line in plan(config):
            say_line(line)
        return 0
    if launch.should_start_ranks(config.meta.device):
        return launch.start_ranks(arguments, config.run_folder / "status.json")
    if config.model.batchnorm_communicator == "own":
        order_launches()
    with launch.join(config.meta.device) as place:
        train(config, place)
    return 0


def train(config: Config, place: launch.Place) -> Trainer:
    """One rank's whole run, on the `place` it has. Raises what ends it other than well; status.json says it too.

    A run that is refused (another config, other images, a second process in its folder) leaves what is there as it is.
    """
    deterministic(config, place)
    folder = config.run_folder
    # From here on a signal is a wish: it is granted before the first step, or at the end of a step.
    with SignalFlag() as signals, alone_in(folder, place):
        images = open_images(config, place, validation=config.evaluation.knn_every_epochs is not None)
        trainer = start(config, place, images, folder)
        status = Status(folder / "status.json", place)
        try:
            if any_rank(signals.requested is not None):
                raise Preempted(
                    f"{signals.requested or 'another rank'}: before a first step; the same command starts it"
                )
            status.write("running", trainer.step)
            trainer.run(signals)
        except Preempted as stop:
            status.write("preempted", trainer.step, str(stop))
            raise
        except BaseException as error:  # whatever ended the run, the file must not go on saying that it runs
            error = launch.in_words(error)
            status.write("failed", trainer.step, (str(error) or type(error).__name__).splitlines()[0])
            raise error
        status.write("done", trainer.step)
        return trainer


@contextlib.contextmanager
def alone_in(folder: Path, place: launch.Place) -> Iterator[None]:
    """Holds the run's folder for as long as this process lives; CheckpointError on all ranks if another one has it.

    Two runs in one folder would move each other's metrics aside and continue from each other's checkpoints.
    """
    with contextlib.ExitStack() as stack:
        problem = None
        if place.first:
            try:
                files.make_folder(folder)
                if not stack.enter_context(files.exclusive(folder / ".running")):
                    problem = (
                        f"another process is running in {folder}: stop it, or give this run another write_tag"
                    )
            except OSError as error:
                problem = f"{folder} cannot be written: {error}. {files.advice(error)}"
        problem = broadcast_json(problem)
        if problem is not None:
            raise CheckpointError(problem)
        yield


def plan(config: Config) -> list[str]:
    """The resolved config, and what it would do here. Raises what would end the run before its first step."""
    device = launch.pick_device(config.meta.device, 0)
    world_size = launch.expected_ranks(config.meta.device)
    place = launch.Place(0, 1, 0, device)
    images = open_images(config, place, validation=config.evaluation.knn_every_epochs is not None)
    arithmetic = config.resolve(world_size, *images.counts())
    stream_notes = PairedStream(config, images.train, images.split.indices, arithmetic, place).notes()
    lines = summary(config, launch.Place(0, world_size, 0, device), images, arithmetic, None)
    return [
        config.to_yaml().rstrip(),
        "",
        *lines,
        *stream_notes,
        "",
        "dry run: everything checks out, nothing was trained",
    ]


def start(config: Config, place: launch.Place, images: Images, folder: Path) -> Trainer:
    """A trainer that stands where the run left off, with its settings written down and said."""
    arithmetic = config.resolve(place.world_size, *images.counts())
    stream = PairedStream(config, images.train, images.split.indices, arithmetic, place)
    trainer = Trainer(config, place, arithmetic, stream, images, folder)
    if place.first:  # only now: a refused run must not overwrite the record of the one it was refused for
        files.replace(folder / "config.yaml", config.to_yaml().encode())
        for line in [*summary(config, place, images, arithmetic, stream), *stream.notes()]:
            say_line(line)
    return trainer


def deterministic(config: Config, place: launch.Place) -> None:
    """Makes a step a function of its inputs, down to the bit, on one kind of machine.

    On a GPU that rules out cuDNN's search for the fastest algorithm, which may choose another one in another life of
    the run, unless `meta.deterministic` is off; and TF32, which would make "fp32" 10-bit. Where torch has no
    deterministic kernel it warns.
    """
    if config.meta.threads is not None:
        torch.set_num_threads(config.meta.threads)
    exact = config.meta.deterministic
    torch.backends.cudnn.benchmark = not exact
    torch.backends.cudnn.deterministic = exact
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False  # NVIDIA's images turn it on by an environment variable
    if place.device.type == "cuda":
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # read when cuBLAS starts, so before a first product
        torch.use_deterministic_algorithms(exact, warn_only=True)
        # By default that also fills every new tensor with NaN before it is written: a pass over each activation.
        torch.utils.deterministic.fill_uninitialized_memory = False


class Status:
    """status.json: the run's last word about itself, for launchers and for people. Written by rank 0, whole or not."""

    def __init__(self, path: Path, place: launch.Place):
        self.path, self.place = path, place

    def write(self, state: str, step: int | None, message: str = "") -> None:
        """`state` is running, done, preempted or failed; `step` the updates done, None if the run never stood."""
        if not self.place.first or not self.path.parent.exists():
            return
        record = {"state": state, "step": step, "world_size": self.place.world_size, "message": message}
        try:
            files.replace(self.path, json.dumps(record, indent=1).encode() + b"\n")
        except OSError as error:
            # A full disk has ended the run already, or will at the next save, with a message of its own.
            say_line(f"status: {self.path} cannot be written: {error}")
