"""Sums since the last metrics line, kept on the device until they are read."""

import time

import torch
from torch import Tensor

from fastsuncet.distributed.collectives import all_gather_rows
from fastsuncet.metrics.data_timer import DataTimer

T = 2  # loss terms: of the unlabeled images, then of the labeled ones; `methods.terms` names them


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
