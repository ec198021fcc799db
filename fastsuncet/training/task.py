"""What a `Trainer` trains: a stream of batches, a step, a schedule, an evaluation, and what a checkpoint says."""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fastsuncet.config import Config
from fastsuncet.errors import ConfigError
from fastsuncet.metrics.interval import DataTimer
from pipelines.backend import lack_of_gpu_memory

BatchType = TypeVar("BatchType")
SPEED = ("lr", "views_per_second", "data_wait", "peak_memory_gb", "replaced_images")  # columns of metrics.csv
COST = ("views", "updates", "petaflops", "seconds")


class Stream(Protocol):
    """Where a task's batches come from."""

    @property
    def replaced(self) -> set[int]:
        """The images that this rank could not decode and replaced by others."""
        ...

    def files(self, step: int, rank: int, role: str) -> list[str]:
        """Return the names of the images that one rank saw at `step` in one role."""
        ...


class TrainingTask(ABC, Generic[BatchType]):
    """What pretraining.py and evaluation/finetuning/fit.py implement: `Pretraining` and `FineTuning`."""

    config: Config
    steps: int  # updates in all
    lr: Callable[[int], float]  # learning rate of a step; there is no scheduler to save
    stream: Stream
    model: nn.Module  # what a checkpoint holds
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    terms: tuple[str, str]  # names of the two losses of `train_step`; "none" for one that the method has not
    value_count = 2  # of `train_step`: the losses, and possibly the norm of the gradient of each
    roles: tuple[str, str]  # of the images of each term, in the stream
    columns: tuple[str, ...]  # of metrics.csv, without "step"
    steps_per_epoch: int
    batch_key: str  # of the config: the images of an update
    pieces_key: str  # of the config: passes them in pieces
    log_every: int  # updates per metrics line
    save_every: tuple[int, ...]  # updates; the last update and a stop are saved too
    keep: int  # newest checkpoints that stay on the disk
    keep_at_end: int  # the same, once the last one is written
    evaluate_every = 0  # updates, 0 for never; the last update is evaluated too
    ledger_key = "ledger"  # of the run's ledger in a checkpoint's meta
    chosen: Mapping[str, Any] = {}  # what was chosen for this hardware: the first line of metrics.jsonl
    world_size_note: str  # printed when a run continues on another number of processes

    @abstractmethod
    def batch(self, step: int, timer: DataTimer) -> BatchType:
        """Return what this rank learns from at `step`; `timer` measures how long training waited for it."""

    @abstractmethod
    def train_step(self, batch: BatchType, lr: float) -> Tensor:
        """Make one update; return the `value_count` values: losses, then norms, on the device. No host sync."""

    @abstractmethod
    def cost(self, step: int) -> tuple[int, int]:
        """Return the views of the update of `step` and their multiply-adds, over all ranks."""

    def after_step(self, step: int, values: Tensor) -> str | None:
        """Take the `values` of `train_step`; return a message for the user, if there is one."""

    def evaluate(self, bad: set[int], before_batch: Callable[[], None]) -> dict[str, float]:
        """Evaluate the model without the images `bad`; return the metrics of a "knn" line. Collective.

        `before_batch` raises Preempted once a stop was requested; all ranks call it equally often.
        """
        return {}

    @abstractmethod
    def meta(self, epoch: float) -> dict[str, Any]:
        """Return what a checkpoint says about the run, JSON types only."""

    @abstractmethod
    def check_resume_compatible(self, meta: dict[str, Any]) -> None:
        """Raise CheckpointError, naming each difference, if a checkpoint's `meta` is that of another run."""

    def close(self) -> None:
        """Free what must not outlive the process group. Called at the end of a run, however it ends."""

    def begin(self) -> None:
        """Prepare a run that has no checkpoint. Collective."""

    def state(self) -> dict[str, Any]:
        """Return plain values that a checkpoint keeps for `restore`. Collective."""
        return {}

    def restore(self, values: dict[str, Any]) -> None:
        """Continue from the values of `state`."""


@contextmanager
def within_memory(task: TrainingTask) -> Iterator[None]:
    """Raise ConfigError, with the key and its line, in place of torch's error where the GPU has too little memory."""
    try:
        yield
    except RuntimeError as error:
        if (reason := lack_of_gpu_memory(error)) is None:
            raise
        # A notebook keeps the error and with it these frames, whose activations the next, smaller batch would lack.
        traceback.clear_frames(error.__traceback__)
        raise ConfigError(
            f"{task.config.where(task.batch_key)} does not fit the GPU's memory: {reason}. Lower it, or set "
            f"{task.pieces_key} to pass the batch in pieces"
        ) from error
