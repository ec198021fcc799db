"""The training step as one CUDA graph: one call launches thousands of kernels, so that the host is never late.

A graph replays kernels on fixed addresses. So each batch is copied into the graph's buffers, and the learning rate is
read from the device. Each kind of step (with labels or without, prototypes frozen or not) has a graph of its own,
captured after some steps that ran kernel by kernel. A step that cannot be captured is reported once, and the run goes
on without a graph.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from fastsuncet.data.paired_stream import Batch
from fastsuncet.distributed.collectives import any_rank
from fastsuncet.optim import DeviceLR
from fastsuncet.training.step import StepMethod, train_step
from pipelines.output import Say, say_line

# Steps of each kind before it is captured. DDP times its first ten passes with events, which a capture cannot wait for:
# PyTorch asks for eleven passes before it.
WARMUP, WARMUP_IN_DDP = 3, 11
# Since this version a capture that fails gives its memory back (pytorch#190348, in main from 20 July 2026: after the
# branch of 2.13 and before that of 2.14). Before, the allocator believes that the capture goes on.
FREES_FAILED_CAPTURES = "2.14"


class GraphedStep:
    """`step(batch, lr)` is `train_step`, replayed from a graph once there is one; a call overwrites the last result."""

    def __init__(self, network: nn.Module, optimizer: DeviceLR, method: StepMethod, say: Say = say_line):
        self.network, self.optimizer, self.method, self.say = network, optimizer, method, say
        self.warmup = WARMUP_IN_DDP if isinstance(network, nn.parallel.DistributedDataParallel) else WARMUP
        self.refused = False  # a step could not be captured, and none is tried again
        self.kind: tuple | None = None  # of the newest step
        self.plain_steps = 0  # of this kind, so far
        # Of this kind: the graph, the batch that it reads, the losses that it writes.
        self.captured: tuple[torch.cuda.CUDAGraph, Batch, Tensor] | None = None

    def __call__(self, batch: Batch, lr: float) -> Tensor:
        # What decides which kernels a step launches.
        frozen = self.method.prototypes is not None and batch.step < self.method.freeze_steps
        if (kind := (*(tuple(x.shape) for x in tensors(batch)), frozen)) != self.kind:
            self.close()  # the kinds of a run follow each other, and a graph holds the memory of a whole step
            self.kind, self.plain_steps = kind, 0
        if self.captured is None and self.plain_steps >= self.warmup and not self.refused:
            self._capture(batch)
        if self.captured is None:
            self.plain_steps += 1
            return train_step(self.network, self.optimizer, batch, lr, self.method)
        graph, static, losses = self.captured
        for ours, theirs in zip(tensors(static), tensors(batch)):
            ours.copy_(theirs, non_blocking=True)
        self.optimizer.set_lr(lr)
        graph.replay()
        return losses

    def _capture(self, batch: Batch) -> None:
        *views, labeled, labels = map(torch.empty_like, tensors(batch))
        static = replace(batch, views=tuple(views), labeled=labeled, labels=labels)
        problem = None
        try:
            # The rate is read from its own tensor, so a replay has that of the present step.
            graph, losses = capture_on_device(
                lambda: train_step(self.network, self.optimizer, static, self.method.lr, self.method),
                self.method.device,
            )
            self.captured = (graph, static, losses)
        # Torch raises nothing narrower for what a graph cannot hold.
        except RuntimeError as error:
            self.optimizer.zero_grad(set_to_none=True)
            problem = first_message(error)
        # NCCL wants a collective in all ranks' graphs or in none, so all ranks replay or none does.
        if any_rank(problem is not None):
            self.close()
            self._recover()
            self.refused = True
            why = problem or "another rank could not capture its step"
            if self.method.device.type == "cuda" and TorchVersion(torch.__version__) < FREES_FAILED_CAPTURES:
                why += (
                    f". After that torch before {FREES_FAILED_CAPTURES} frees no images of later steps: memory will "
                    f"run out, so continue with torch {FREES_FAILED_CAPTURES}"
                )
            self.say(
                f"meta.cuda_graph: training without a graph, each step launches its kernels one by one: {why}"
            )

    def close(self) -> None:
        """Destroy the graph. NCCL waits in the end of its process group until no graph holds one of its kernels.

        A replay under way is not waited for: CUDA destroys its graph after it, and it never ends if another rank died.
        """
        if self.captured is not None:
            # Not left to the garbage collector: the traceback of an error keeps what the frames of a run hold.
            self.captured[0].reset()
            self.captured = None

    def _recover(self) -> None:
        """Make DDP and the scaler forget a step that was not finished, and free what it allocated."""
        if isinstance(self.network, nn.parallel.DistributedDataParallel):
            # Else the next step fails: "Expected to have finished reduction in the prior iteration".
            self.network.reducer._reset_state()
        if self.method.scaler.is_enabled():
            self.method.scaler._per_optimizer_states.clear()  # else "step() has already been called since ..."
            # These are in the refused graph's memory, and the next step would use them.
            vars(self.optimizer).pop("grad_scale", None)
            vars(self.optimizer).pop("found_inf", None)
        if self.method.device.type == "cuda":
            torch.cuda.empty_cache()


def tensors(batch: Batch) -> tuple[Tensor, ...]:
    return (*batch.views, batch.labeled, batch.labels)


def first_message(error: BaseException) -> str:
    """Return the message of the first error: an operation that cannot be captured makes the capture's end fail too."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


def capture_on_device(step: Callable[[], Any], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record what `step` would launch, without running it; return the graph and what `step` returned.

    It records on the stream of the steps before it (`place.work_stream`), unless that is CUDA's default stream, which
    cannot be captured. Raises RuntimeError for what cannot be recorded, such as a sync.
    """
    # Beside a GPU, a step on the CPU would run during the capture, on an unwritten batch, and no replay would train.
    if device.type != "cuda":
        raise RuntimeError(f"the step is on {device.type}, not on a CUDA device")
    before = torch.cuda.current_stream()
    stream = None if before == torch.cuda.default_stream() else before  # None: one of torch's
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # garbage, such as a loader's buffers, must not be freed during the capture
    graph = torch.cuda.CUDAGraph()
    try:
        # DALI's threads and NCCL's watchdog go on meanwhile. In the default mode CUDA would refuse them what a capture
        # cannot hold (memory, the state of an event), and that would end the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            losses = step()
    except BaseException:
        graph.reset()  # gives back the memory of the step, which the error's traceback would keep
        raise
    finally:
        torch.cuda.set_stream(before)  # up to 2.11 torch stays on the capture's stream after a failure
        if collecting:
            gc.enable()
    return graph, losses
