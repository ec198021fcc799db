"""When supervision ends: at a step known before the run, or once its loss has plateaued (paper, appendix E)."""

import math
from statistics import median

import torch
from torch import Tensor

from fastsuncet.config import Arithmetic, Config
from fastsuncet.distributed.collectives import all_gather_rows


class PlateauRule:
    """Decides, from the mean supervised loss of each epoch, when to switch supervision off.

    It switches off once the median loss of the last P epochs has failed, for P epochs, to come a fraction g below its
    lowest value before them; or once that median is below a fraction g of the first epoch's loss. Never before 2 P
    epochs. `epochs` is P, at least 1; `gain` is g, in (0, 1].

    Medians, because one epoch of few labels is noisy (5 % on the recorded curves of tests/training). The second half is
    for cross-entropy, which has no floor and keeps falling by a fraction on memorized images.
    """

    def __init__(self, epochs: int, gain: float):
        self.epochs, self.gain = epochs, gain
        self.means: list[float] = []  # the finite ones so far, oldest first: the rule's whole state

    def add(self, mean: float) -> bool:
        """Take the mean supervised loss of one more epoch. True: switch off from the next epoch on."""
        if not math.isfinite(mean):  # the loop refuses such a loss and names its images
            return False
        self.means.append(mean)
        means, span = self.means, self.epochs
        if len(means) < 2 * span:
            return False
        smooth = [median(means[end - span : end]) for end in range(span, len(means) + 1)]
        stuck = min(smooth[-span:]) >= (1 - self.gain) * min(smooth[:-span])
        return stuck or smooth[-1] < self.gain * means[0]


class Supervision:
    """`on(step)`: whether the labeled images are learned from at `step`, the same on all ranks.

    With `supervised_epochs: plateau` the answer depends on the losses so far, so it is part of a checkpoint. That costs
    one sync with the device per epoch, while supervision is on.
    """

    def __init__(self, config: Config, arithmetic: Arithmetic, rank: int, device: torch.device):
        c = config.criterion
        self.arithmetic, self.rank = arithmetic, rank
        plateau = c.supervised_epochs == "plateau"
        self.rule = PlateauRule(c.plateau_epochs, c.plateau_gain) if plateau else None
        self.ended: int | None = None  # the first step without supervision, once the rule has decided
        self.sum = torch.zeros((), dtype=torch.float64, device=device)  # of this rank's losses in this epoch

    def on(self, step: int) -> bool:
        """Whether `step` has labeled images."""
        return step < (self.arithmetic.supervised_steps if self.ended is None else self.ended)

    def add(self, loss: Tensor, step: int) -> bool:
        """Take the supervised loss of `step`, on the device. True: it was the last step with supervision."""
        if self.rule is None or self.ended is not None:
            return False
        self.sum += loss
        if (step + 1) % self.arithmetic.steps_per_epoch:
            return False
        mean = all_gather_rows(self.sum[None]).mean() / self.arithmetic.steps_per_epoch
        self.sum.zero_()
        if self.rule.add(mean.item()):
            self.ended = step + 1
        return self.ended is not None

    def state(self) -> dict:
        """Return plain values for a checkpoint. Collective: the sums of all ranks are gathered."""
        if self.rule is None:
            return {}
        sums = all_gather_rows(self.sum[None]).tolist()
        return {"means": list(self.rule.means), "sums": sums, "ended": self.ended}

    def restore(self, state: dict) -> None:
        """Continue from `state`. On another number of ranks each takes the mean of the interrupted epoch's sums."""
        if self.rule is None:
            return
        self.rule.means = list(state["means"])
        sums, world_size = state["sums"], self.arithmetic.world_size
        self.sum.fill_(sums[self.rank] if len(sums) == world_size else sum(sums) / len(sums))
        self.ended = state["ended"]
