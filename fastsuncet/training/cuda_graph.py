"""The training step as one CUDA graph: thousands of kernels started by one call, so that the host is never late.

A graph replays kernels on fixed addresses. So a batch is copied into buffers of its own, the learning rate is read from
the device, and each kind of step (with labels or without, prototypes at rest or not) has a graph of its own, captured
after some steps that ran kernel by kernel: libraries choose their algorithms and take their memory in those.

Nothing has captured on a card yet: `meta.cuda_graph` is off by default, and whatever refuses is said once and trained
without.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastsuncet.console import Say, say_line
from fastsuncet.data.paired_stream import Batch
from fastsuncet.distributed.collectives import any_rank
from fastsuncet.optim import LARS
from fastsuncet.training.step import Setting, train_step

# Steps of each kind before it is captured. DDP times its first ten passes by events, which nothing can wait for in a
# capture: PyTorch asks for eleven of them before.
WARMUP, WARMUP_IN_DDP = 3, 11


class Step:
    """`step(batch, lr)` is `train_step`, by a graph where there is one. Its result is overwritten by the next call."""

    def __init__(
        self,
        network: nn.Module,
        optimizer: LARS,
        setting: Setting,
        *,
        graphs: bool,  # meta.cuda_graph
        say: Say = say_line,
        capture: Callable[[Callable[[], Tensor]], tuple[Any, Tensor]] | None = None,  # a fake one, for tests
    ):
        self.network, self.optimizer, self.setting, self.say = network, optimizer, setting, say
        self.capture = capture or capture_on_the_device
        self.graphs = graphs
        if graphs and setting.device.type != "cuda" and capture is None:
            self._without(f"there is no CUDA device, this is {setting.device.type}")
        self.warmup = WARMUP_IN_DDP if isinstance(network, nn.parallel.DistributedDataParallel) else WARMUP
        self._seen: dict[tuple, int] = {}  # kind of step -> how many ran kernel by kernel
        self._captured: dict[
            tuple, tuple[Any, Batch, Tensor]
        ] = {}  # -> graph, the batch it reads, what it writes
        self._lr = torch.zeros((), device=setting.device)

    def __call__(self, batch: Batch, lr: float) -> Tensor:
        """One update; the two losses (2,) on the device. No sync."""
        kind = self.kind(batch)
        if self._captured and kind not in self._seen:
            self._release()
        if self.graphs and kind not in self._captured and self._seen.get(kind, 0) >= self.warmup:
            self._capture(kind, batch)
        if kind not in self._captured or not self.graphs:
            self._seen[kind] = self._seen.get(kind, 0) + 1
            return train_step(self.network, self.optimizer, batch, lr, self.setting)
        graph, static, losses = self._captured[kind]
        for ours, theirs in zip(tensors(static), tensors(batch)):
            ours.copy_(theirs, non_blocking=True)
        self._lr.fill_(lr)
        graph.replay()
        return losses

    def kind(self, batch: Batch) -> tuple:
        """What decides which kernels a step starts: the shapes of its images, and whether prototypes move."""
        frozen = self.setting.prototypes is not None and batch.step < self.setting.freeze_steps
        return (*(tuple(x.shape) for x in tensors(batch)), frozen)

    def _capture(self, kind: tuple, batch: Batch) -> None:
        static = replace(
            batch,
            views=tuple(torch.empty_like(view) for view in batch.views),
            labeled=torch.empty_like(batch.labeled),
            labels=torch.empty_like(batch.labels),
        )
        refused, made = None, None
        try:
            made = self.capture(
                lambda: train_step(self.network, self.optimizer, static, self._lr, self.setting)
            )
        except RuntimeError as error:  # torch raises nothing narrower for what a graph cannot hold
            self.optimizer.zero_grad(set_to_none=True)
            refused = first_words(error)
        # NCCL wants a collective in all ranks' graphs or in none: whatever one cannot record, none replays.
        if any_rank(refused is not None):
            self._without(refused or "another rank could not record its step")
        else:
            graph, losses = made
            self._captured[kind] = (graph, static, losses)

    def _release(self) -> None:
        """Lets go of the graphs there are: the kinds of a run follow each other, and none comes back.

        Each holds the memory of a whole step. A kind that did come back would be captured anew.
        """
        if self.setting.device.type == "cuda":
            torch.cuda.synchronize()  # a replay may be under way
        self._captured.clear()

    def _without(self, why: str) -> None:
        self.graphs = False
        self.say(f"cuda graph: none, each step starts its kernels one by one: {why}")


def tensors(batch: Batch) -> tuple[Tensor, ...]:
    """All of a batch that a step reads."""
    return (*batch.views, batch.labeled, batch.labels)


def first_words(error: BaseException) -> str:
    """What went wrong first: an operation that cannot be recorded makes the capture's own end fail as well."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


def capture_on_the_device(step: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    """Records what `step` would start, without running it. RuntimeError for what cannot be recorded, such as a sync.

    On the stream the steps before it ran on, unless that is CUDA's default one, which cannot be captured: autograd runs
    a parameter's last node on the stream it was made on, and DDP keeps those nodes for good (`launch.join`).
    """
    before = torch.cuda.current_stream()
    stream = None if before == torch.cuda.default_stream() else before  # None: one of torch's
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # what it finds, such as a loader's buffers, would be freed in the middle: nothing may be
    try:
        graph = torch.cuda.CUDAGraph()
        # DALI's threads and NCCL's watchdog go on meanwhile. In the default mode whatever they ask of CUDA that a
        # capture cannot hold (memory, whether an event has passed) is refused to them, and ends the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            losses = step()
    finally:
        torch.cuda.set_stream(before)  # up to 2.11 torch stays on the capture's where that fails
        if collecting:
            gc.enable()
    return graph, losses
