"""Sums since the last metrics line, kept on the device until they are read: losses, and how long it waited for data.

On a GPU the host runs ahead, so the time it spends in the loader says nothing: it can wait for pixels while the GPU is
busy with earlier steps, which costs nothing. So two events on the training stream enclose the hand-over of a batch. The
GPU reaches the first one when all earlier work is done, and the second one when the pixels are there (DALI and copies
order themselves on this stream). In the time between it does nothing but wait, for a slow loader or a slow host.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastsuncet.distributed.collectives import all_gather_rows

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

    def __init__(
        self, device: torch.device, *, new_event: Callable[[], Any] | None = None
    ):  # a fake, for tests
        on_device = partial(torch.cuda.Event, enable_timing=True) if device.type == "cuda" else HostEvent
        self._new_event = new_event or on_device
        self._events: list[tuple[Any, Any]] = []  # two a step, used again after a restart
        self.restart()

    def restart(self) -> None:
        """Begin a new sum: after a metrics line, or after anything that is not training."""
        self._steps = 0

    def begin(self) -> None:
        """Mark where the work of earlier steps ends."""
        if self._steps == len(self._events):
            self._events.append((self._new_event(), self._new_event()))
        self._events[self._steps][0].record()

    def end(self) -> None:
        """Mark that the pixels are there."""
        self._events[self._steps][1].record()
        self._steps += 1

    def seconds(self) -> float:
        """Return the wait since `restart()` in seconds. On a GPU this waits until the last batch's pixels are there."""
        used = self._events[: self._steps]
        if used:
            used[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in used) / 1e3


class MetricsInterval:
    """Sums of the losses, and the first step at which each was not finite. T terms, W ranks.

    Only `read` waits for the device, once for all values.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.sums = torch.zeros(T, dtype=torch.float64, device=device)  # (T,)
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

    def add(self, losses: Tensor, step: int, views: int) -> None:
        """Add the (T,) losses of `step` and its number of views over all ranks. Does not wait for the device."""
        self.sums += losses
        bad = ~torch.isfinite(losses) & (self.first_bad < 0)
        self.first_bad = torch.where(bad, float(step), self.first_bad)
        self.steps += 1
        self.views += views

    def seconds(self) -> float:
        """Return the wall-clock time since `start_clock`."""
        return time.perf_counter() - self.started

    def read(self) -> tuple[Tensor, Tensor, float]:
        """Return (W, T) sums and (W, T) first bad steps on the CPU, and the longest wait for data of a rank in seconds.

        Waits for the device. A collective: one gather for all values.
        """
        wait = torch.tensor([self.data_timer.seconds()], dtype=torch.float64, device=self.device)
        own = torch.cat([self.sums, self.first_bad, wait])[None]  # (1, 2T + 1)
        sums, first_bad, waits = all_gather_rows(own).cpu().split([T, T, 1], dim=1)
        return sums, first_bad, waits.max().item()

    def restore(self, sums: Tensor, steps: int, rank: int, world_size: int) -> None:
        """Continue an interval from the (W', T) sums in a checkpoint. With another world size, use their mean."""
        self.sums.copy_(sums[rank] if len(sums) == world_size else sums.mean(0))
        self.steps = steps
