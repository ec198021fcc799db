"""The grid of a transfer: every learning rate with every weight decay, its shards, and its table of results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastsuncet.config import Config

CellResult = dict[str, Any]  # a cell's result, as its JSON file holds it


@dataclass(frozen=True)
class Cell:
    """One pair of the grid."""

    lr: float
    decay: float  # as the grid has it

    @property
    def weight_decay(self) -> float:
        """The optimizer's weight decay: the grid's value divided by the learning rate (paper, appendix C).

        A step of SGD then shrinks weights by lr x (decay / lr): by the same fraction whatever the learning rate.
        """
        return self.decay / self.lr

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"lr{self.lr:.6g}-wd{self.decay:.6g}"

    def __str__(self) -> str:
        return f"lr {self.lr:.3g}, weight decay {self.decay:.3g}/lr"


def grid(config: Config) -> tuple[Cell, ...]:
    """Return the cells in the order they are run: by learning rate, then by weight decay, as the config lists them."""
    t = config.transfer
    return tuple(Cell(lr, decay) for lr in t.learning_rates for decay in t.weight_decays)


def best(cells: Sequence[Cell], records: Mapping[Cell, CellResult]) -> Cell | None:
    """Return the cell of the highest validation metric, the first of equal ones. None where all diverged."""
    finite = [cell for cell in cells if records[cell]["metric"] is not None]
    return max(finite, key=lambda cell: records[cell]["metric"], default=None)


def table(cells: Sequence[Cell], records: Mapping[Cell, CellResult], chosen: Cell | None) -> list[str]:
    """Return lines: a row per learning rate, a column per weight decay, in percent; the chosen cell with a star.

    A dot stands for a cell that is not finished, `nan` for one that diverged.
    """
    rates = list(dict.fromkeys(cell.lr for cell in cells))
    decays = list(dict.fromkeys(cell.decay for cell in cells))

    def entry(cell: Cell) -> str:
        if cell not in records:
            return ". "
        value = records[cell]["metric"]
        return f"{'nan' if value is None else format(100 * value, '.2f')}{'*' if cell == chosen else ' '}"

    head = f"{'lr  /  wd':>10}" + "".join(f"{decay:>9.3g} " for decay in decays)
    rows = [f"{lr:>10.3g}" + "".join(f"{entry(Cell(lr, decay)):>10}" for decay in decays) for lr in rates]
    return [head, *rows]
