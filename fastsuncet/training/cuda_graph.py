"""The training step as one CUDA graph: one call launches thousands of kernels, so that the host is never late.

A graph replays kernels on fixed addresses. So each batch is copied into the graph's buffers, and the learning rate is
read from the device. Each kind of step (with labels or without, prototypes frozen or not) has a graph of its own. It is
captured after some steps that ran kernel by kernel, in which libraries choose their algorithms and allocate memory.

No graph has been captured on a GPU yet, so it is tried in another process first (`tuning.verdicts`). A step that can
then not be captured is reported once, and the run goes on without a graph.
"""

import gc
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from fastsuncet.console import Say, say_line
from fastsuncet.data.paired_stream import Batch
from fastsuncet.distributed.collectives import any_rank
from fastsuncet.optim import DeviceLR
from fastsuncet.training.step import StepSettings, train_step

# Steps of each kind before it is captured. DDP times its first ten passes with events, which a capture cannot wait for:
# PyTorch asks for eleven passes before it.
WARMUP, WARMUP_IN_DDP = 3, 11


# Takes a step; returns the graph that repeats it, and the losses that the graph writes.
Capture = Callable[[Callable[[], Tensor]], tuple[torch.cuda.CUDAGraph, Tensor]]


class Step:
    """`step(batch, lr)` is `train_step`, replayed from a graph where there is one.

    The next call overwrites the result.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: DeviceLR,
        setting: StepSettings,
        *,
        graphs: bool,  # meta.cuda_graph
        say: Say = say_line,
        capture: Capture | None = None,  # a fake one, for tests
    ):
        self.network, self.optimizer, self.setting, self.say = network, optimizer, setting, say
        self.capture = capture or capture_on_device
        self.graphs = graphs
        if graphs and capture is None and setting.device.type != "cuda":
            self._disable(f"there is no CUDA device, this is {setting.device.type}")
        self.warmup = WARMUP_IN_DDP if isinstance(network, nn.parallel.DistributedDataParallel) else WARMUP
        self._seen: dict[tuple, int] = {}  # kind of step -> how many ran kernel by kernel
        # kind of step -> graph, the batch it reads, the losses it writes
        self._captured: dict[tuple, tuple[torch.cuda.CUDAGraph, Batch, Tensor]] = {}
        self._lr = torch.zeros((), device=setting.device)

    def __call__(self, batch: Batch, lr: float) -> Tensor:
        """Make one update; return what `train_step` does, (4,), on the device. No host sync."""
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
        """Return what decides which kernels a step launches: its shapes, and whether prototypes are frozen."""
        frozen = self.setting.prototypes is not None and batch.step < self.setting.freeze_steps
        return (*(tuple(x.shape) for x in tensors(batch)), frozen)

    def _capture(self, kind: tuple, batch: Batch) -> None:
        static = replace(
            batch,
            views=tuple(torch.empty_like(view) for view in batch.views),
            labeled=torch.empty_like(batch.labeled),
            labels=torch.empty_like(batch.labels),
        )
        problem = None
        try:
            graph, losses = self.capture(
                lambda: train_step(self.network, self.optimizer, static, self._lr, self.setting)
            )
            self._captured[kind] = (graph, static, losses)
        # Torch raises nothing narrower for what a graph cannot hold.
        except RuntimeError as error:
            self.optimizer.zero_grad(set_to_none=True)
            problem = first_message(error)
        # NCCL wants a collective in all ranks' graphs or in none, so all ranks replay or none does.
        if any_rank(problem is not None):
            self._release()
            self._recover()
            self._disable(problem or "another rank could not capture its step")

    def close(self) -> None:
        """Destroy all graphs. NCCL waits in the end of its process group until no graph holds one of its kernels."""
        self._release()

    def _release(self) -> None:
        """Free all graphs: the kinds of a run follow each other, and none returns.

        Each graph holds the memory of a whole step. A kind that did return would be captured again.
        """
        if self._captured and self.setting.device.type == "cuda":
            torch.cuda.synchronize()  # a replay can be under way
        # Not left to the garbage collector: the traceback of an error keeps what the frames of a run hold.
        for graph, _, _ in self._captured.values():
            graph.reset()
        self._captured.clear()

    def _recover(self) -> None:
        """Make DDP and the scaler forget a step that was not finished, and free what it allocated."""
        if isinstance(self.network, nn.parallel.DistributedDataParallel):
            # Else the next step fails: "Expected to have finished reduction in the prior iteration".
            self.network.reducer._reset_state()
        if self.setting.scaler.is_enabled():
            self.setting.scaler._per_optimizer_states.clear()  # else "step() has already been called since ..."
            # These are in the refused graph's memory, and the next step would use them.
            vars(self.optimizer).pop("grad_scale", None)
            vars(self.optimizer).pop("found_inf", None)
        if self.setting.device.type == "cuda":
            torch.cuda.empty_cache()

    def _disable(self, why: str) -> None:
        self.graphs = False
        self.say(
            f"meta.cuda_graph: training without a graph, each step launches its kernels one by one: {why}"
        )


def tensors(batch: Batch) -> tuple[Tensor, ...]:
    """Return all tensors of a batch that a step reads."""
    return (*batch.views, batch.labeled, batch.labels)


def first_message(error: BaseException) -> str:
    """Return the message of the first error: an operation that cannot be captured makes the capture's end fail too."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


def capture_on_device(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Record what `step` would launch, without running it. RuntimeError for what cannot be recorded, such as a sync.

    It records on the stream of the steps before it, unless that is CUDA's default stream, which cannot be captured:
    autograd runs a parameter's last node on the stream it was created on, and DDP keeps those nodes (`launch.join`).
    """
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
