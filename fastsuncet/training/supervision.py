"""When supervision ends: at a step known before the run, or once its loss has plateaued (paper, appendix E)."""

import torch

from fastsuncet.config import Arithmetic, Config
from fastsuncet.distributed.collectives import all_gather_rows
from fastsuncet.training.plateau import PlateauRule


class Supervision:
    """`on(step)`: whether the labeled images are learned from at `step`. All ranks say the same.

    With `supervised_epochs: plateau` the answer hangs on the losses so far, so it is part of a checkpoint: a run that
    was stopped ends its supervision at the same step as one that was not. The price is one sync with the device an
    epoch, while supervision is on.
    """

    def __init__(self, config: Config, arithmetic: Arithmetic, rank: int, device: torch.device):
        c = config.criterion
        self.arithmetic, self.rank = arithmetic, rank
        self.rule = None
        if c.supervised_epochs == "plateau":
            self.rule = PlateauRule(c.plateau_epochs, c.plateau_gain)
        self.ended: int | None = None  # the first step without, once the rule has spoken
        self.sum = torch.zeros((), dtype=torch.float64, device=device)  # of this rank's losses in this epoch

    def on(self, step: int) -> bool:
        """Whether `step` has labeled images."""
        return step < (self.arithmetic.supervised_steps if self.ended is None else self.ended)

    def add(self, loss: torch.Tensor, step: int) -> bool:
        """Takes the supervised loss of `step`, on the device. True: it was the last step with supervision."""
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
        """Plain values for a checkpoint; every rank asks, since the losses of all are gathered."""
        if self.rule is None:
            return {}
        return {
            "means": self.rule.state(),
            "sums": all_gather_rows(self.sum[None]).tolist(),
            "ended": self.ended,
        }

    def restore(self, state: dict) -> None:
        """Continues from `state`; on another number of ranks each takes the mean of the interrupted epoch's sums."""
        if self.rule is None or not state:
            return
        self.rule.restore(state["means"])
        sums, world_size = state["sums"], self.arithmetic.world_size
        self.sum.fill_(sums[self.rank] if len(sums) == world_size else sum(sums) / len(sums))
        self.ended = state["ended"]
