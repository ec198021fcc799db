"""What happened since the last metrics line, kept on the device until somebody asks."""

import time

import torch

from fastsuncet.distributed.collectives import all_gather_rows
from fastsuncet.metrics.data_timer import DataTimer

T = 2  # of unlabeled images and of labeled ones, in this order; `methods.terms` names them


class MetricsInterval:
    """Losses summed on the device, and the first step at which each was not a number. T terms, W ranks.

    Nothing is read from the device until somebody asks, and then once for everything.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.sums = torch.zeros(T, dtype=torch.float64, device=device)  # (T,)
        self.first_bad = torch.full((T,), -1.0, dtype=torch.float64, device=device)  # (T,), -1 = none
        self.data_timer = DataTimer(device)  # `begin` before a batch is asked for, `end` once it is there
        self.restart()

    def restart(self) -> None:
        """Begins a new interval. A step that was bad stays bad: nothing may be saved after it."""
        self.sums.zero_()
        self.steps = 0
        self.start_clock()

    def start_clock(self) -> None:
        """Measures speed from now on: after a restart, an evaluation, or whatever else is no training."""
        self.views = 0  # over all ranks
        self.data_timer.restart()
        self.started = time.perf_counter()

    def add(self, losses: torch.Tensor, step: int, views: int) -> None:
        """Takes the (T,) losses of `step` and its views over all ranks. No sync."""
        self.sums += losses
        bad = ~torch.isfinite(losses) & (self.first_bad < 0)
        self.first_bad = torch.where(bad, float(step), self.first_bad)
        self.steps += 1
        self.views += views

    def seconds(self) -> float:
        """Wall-clock time since `start_clock`."""
        return time.perf_counter() - self.started

    def read(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        """(W, T) sums and (W, T) first bad steps on the CPU, rank by rank; the longest wait, seconds. The one sync."""
        wait = torch.tensor([self.data_timer.seconds()], dtype=torch.float64, device=self.device)
        mine = torch.cat([self.sums, self.first_bad, wait])[None]  # (1, 2T + 1): one gather for everything
        sums, first_bad, waits = all_gather_rows(mine).cpu().split([T, T, 1], dim=1)
        return sums, first_bad, waits.max().item()

    def restore(self, sums: torch.Tensor, steps: int, rank: int, world_size: int) -> None:
        """Takes over the (W', T) sums of an interval that a checkpoint cut; another world size shares their mean."""
        mine = sums[rank] if len(sums) == world_size else sums.mean(0)
        self.sums.copy_(mine)
        self.steps = steps
