"""Sums since the last metrics line, kept on the device until they are read: losses, gradients, and waiting for data.

On a GPU the host runs ahead, so the time it spends in the loader says nothing: it can wait for pixels while the GPU is
busy with earlier steps, which costs nothing. So two events on the training stream enclose the hand-over of a batch. The
GPU reaches the first one when all earlier work is done, and the second one when the pixels are there (DALI and copies
order themselves on this stream). In the time between it does nothing but wait, for a slow loader or a slow host.
"""

import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsuncet.distributed.collectives import all_gather_rows, world_size
from pipelines.atomic_files import MEMORY

# The memory that a container (cgroup v2) is given; "max" has no limit.
LIMIT = Path("/sys/fs/cgroup/memory.max")
T = 2  # loss terms: of the unlabeled images, then of the labeled ones; `methods.terms` names them


class HostEvent:
    """torch.cuda.Event on a CPU, where the host's clock is enough."""

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing: the host is there."""

    def elapsed_time(self, end: "HostEvent") -> float:
        """Return milliseconds."""
        return 1e3 * (end._at - self._at)


class DataTimer:
    """Call `begin()` before a batch is requested and `end()` when it is there; `seconds()` sums the waits.

    Call begin and end on the training stream, outside of a CUDA graph's capture. Neither waits.
    """

    def __init__(self, device: torch.device):
        timed = partial(torch.cuda.Event, enable_timing=True)
        self._new_event: Callable[[], Any] = timed if device.type == "cuda" else HostEvent
        self.restart()

    def restart(self) -> None:
        """Begin a new sum: after a metrics line, or after anything that is not training."""
        self._events: list[tuple[Any, Any]] = []  # two a step

    def begin(self) -> None:
        """Mark where the work of earlier steps ends."""
        self._events.append((self._new_event(), self._new_event()))
        self._events[-1][0].record()

    def end(self) -> None:
        """Mark that the pixels are there."""
        self._events[-1][1].record()

    def seconds(self) -> float:
        """Return the wait since `restart()` in seconds. On a GPU this waits until the last batch's pixels are there."""
        if self._events:
            self._events[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3


class Reading(NamedTuple):
    """An interval of all ranks, on the CPU."""

    sums: Tensor  # (W, V) float64
    first_bad: Tensor  # (W, T) float64
    wait: float  # for data: seconds of the rank that waited longest
    peak_memory: float  # bytes of the rank that has used most


class MetricsInterval:
    """Sums of the losses and of squared norms, and the first step at which each loss was not finite.

    T terms, V values of a step (T losses, then any norms of gradients), W ranks. Only `read` waits for the device, once
    for all values.
    """

    def __init__(self, device: torch.device, values: int):  # V
        self.device = device
        self.sums = torch.zeros(values, dtype=torch.float64, device=device)  # (V,)
        self.first_bad = torch.full((T,), -1.0, dtype=torch.float64, device=device)  # (T,), -1: none
        self.data_timer = DataTimer(device)  # `begin` before a batch is requested, `end` when it is there
        self.restart()

    def restart(self) -> None:
        """Begin a new interval. `first_bad` stays: nothing can be saved after a step with a bad loss."""
        self.sums.zero_()
        self.steps = 0
        self.start_clock()

    def start_clock(self) -> None:
        """Measure speed from now on: after a restart, an evaluation, or anything that is not training."""
        self.views = 0  # over all ranks
        self.data_timer.restart()
        self.started = time.perf_counter()

    def add(self, values: Tensor, step: int, views: int) -> None:
        """Add the (V,) values of `step` and its number of views over all ranks. Does not wait for the device."""
        losses, norms = values[:T], values[T:]
        self.sums[:T] += losses
        # The gradient of the mean over ranks has 1/W of each rank's in its rows: a mean over ranks and another 1/W.
        self.sums[T:] += norms.double().square() / world_size()
        bad = ~torch.isfinite(losses) & (self.first_bad < 0)
        self.first_bad = torch.where(bad, float(step), self.first_bad)
        self.steps += 1
        self.views += views

    def seconds(self) -> float:
        """Return the wall-clock time since `start_clock`."""
        return time.perf_counter() - self.started

    def read(self) -> Reading:
        """Return the interval of all ranks. Waits for the device. A collective: one gather for all values."""
        most = [self.data_timer.seconds(), peak_memory(self.device)]
        most = torch.tensor(most, dtype=torch.float64, device=self.device)
        own = torch.cat([self.sums, self.first_bad, most])[None]  # (1, V + T + 2)
        sums, first_bad, most = all_gather_rows(own).cpu().split([len(self.sums), T, 2], dim=1)
        return Reading(sums, first_bad, *most.amax(0).tolist())

    def restore(self, sums: Tensor, steps: int, rank: int, ranks: int) -> None:
        """Continue an interval from the (W', V) sums in a checkpoint. With another world size, use their mean."""
        self.sums.copy_(sums[rank] if len(sums) == ranks else sums.mean(0))
        self.steps = steps


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has used so far, without waiting for the device.

    On a GPU what torch has allocated at once; on a CPU the resident memory, pixels and libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_of(device: torch.device) -> int:
    """Return the bytes of memory of a GPU, or those that this machine or its container has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return min(MEMORY, int(LIMIT.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # no such file, or "max"
        return MEMORY
