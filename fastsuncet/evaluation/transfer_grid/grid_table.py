"""The grid as people read it: a table of learning rates by weight decays, and a CSV of its cells."""

import csv
import io
from collections.abc import Mapping, Sequence

from fastsuncet.evaluation.transfer_grid.cell_records import Record
from fastsuncet.evaluation.transfer_grid.grid import Cell

COLUMNS = ("learning_rate", "weight_decay", "weight_decay_over_lr", "validation", "images", "diverged")


def best(cells: Sequence[Cell], records: Mapping[Cell, Record]) -> Cell | None:
    """The cell of the highest validation metric; of equal ones the first in the grid. None where all diverged."""
    whole = [cell for cell in cells if records[cell]["validation"] is not None]
    return max(whole, key=lambda cell: records[cell]["validation"], default=None)


def table(cells: Sequence[Cell], records: Mapping[Cell, Record], chosen: Cell | None) -> list[str]:
    """Lines: a row each learning rate, a column each weight decay, in per cent; the chosen cell with a star.

    A dot stands for a cell that is not finished, `nan` for one that diverged.
    """
    rates, decays = (
        list(dict.fromkeys(values)) for values in ([c.lr for c in cells], [c.decay for c in cells])
    )

    def entry(cell: Cell) -> str:
        if cell not in records:
            return ". "
        value = records[cell]["validation"]
        return f"{'nan' if value is None else format(100 * value, '.2f')}{'*' if cell == chosen else ' '}"

    head = f"{'lr  /  wd':>10}" + "".join(f"{decay:>9.3g} " for decay in decays)
    rows = [f"{lr:>10.3g}" + "".join(f"{entry(Cell(lr, decay)):>10}" for decay in decays) for lr in rates]
    return [head, *rows]


def as_csv(cells: Sequence[Cell], records: Mapping[Cell, Record]) -> bytes:
    """One line a finished cell, in the grid's order; a diverged one has no validation metric and says why."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for cell in cells:
        if cell in records:
            record = records[cell]
            rest = [record["validation"], record["images"], record["diverged"]]
            writer.writerow([cell.lr, cell.decay, cell.weight_decay, *rest])
    return text.getvalue().encode()
