"""The grid of a transfer: every learning rate with every weight decay, and whose turn which cell is."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastsuncet.config import Config
from fastsuncet.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """One pair of the grid."""

    lr: float
    decay: float  # as the grid has it

    @property
    def weight_decay(self) -> float:
        """What the optimizer is given: the grid's value divided by the learning rate (paper, appendix C).

        A step of SGD then shrinks weights by lr x (decay / lr): by the same share whatever the learning rate.
        """
        return self.decay / self.lr

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"lr{self.lr:.6g}-wd{self.decay:.6g}"


def grid(config: Config) -> tuple[Cell, ...]:
    """The cells in the order they are run: by learning rate, then by weight decay, as the config lists them.

    Raises ConfigErrors for a learning rate of 0, which weight decays cannot be divided by, and for a cell twice.
    """
    rates, decays = config.transfer.learning_rates, config.transfer.weight_decays
    if min(rates) <= 0:
        raise config.error(
            "transfer.learning_rates", "must be above 0: weight decays are divided by the learning rate"
        )
    cells = tuple(Cell(lr, decay) for lr in rates for decay in decays)
    if len({cell.name for cell in cells}) < len(cells):
        key = "learning_rates" if len({f"{lr:.6g}" for lr in rates}) < len(rates) else "weight_decays"
        raise config.error(f"transfer.{key}", "has a value twice: each cell of the grid is run once")
    return cells


def read_share(text: str) -> tuple[int, int]:
    """(I, N) of "I/N", share I of N, counted from 1. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    part, parts = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= part <= parts:
        raise ConfigError(
            f"--cell is I/N, share I of N counted from 1, such as 3/8, not {text!r}. In a Slurm job of --array=1-8 "
            "that is --cell $SLURM_ARRAY_TASK_ID/8"
        )
    return part, parts


def share_of(items: Sequence[T], part: int, parts: int) -> Sequence[T]:
    """Share `part` (from 1) of `parts`: every item is in exactly one, and their sizes differ by one at most."""
    return items[part - 1 :: parts]
