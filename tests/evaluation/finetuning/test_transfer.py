"""The grid of a transfer: its values, its shards, the choice, its table."""

import re

import numpy as np
import pytest

from fastsuncet.cli import main
from fastsuncet.config import load_config
from fastsuncet.evaluation.finetuning.transfer import Cell, batchnorm_momentum, best, grid, table
from tests.support.runs import CONFIGS

DEMO = str(CONFIGS / "digits_demo.yaml")
CELL = "--cell: is I/N with 1 <= I <= N, such as 3/8"
FOUR = ("transfer.learning_rates=[0.1,0.01]", "transfer.weight_decays=[0,0.001]")


def cells_of(*overrides: str) -> tuple[Cell, ...]:
    return grid(load_config(DEMO, overrides))


def test_grid_is_the_papers_seven_by_eight():
    cells = cells_of()
    rates, decays = sorted({cell.lr for cell in cells}), sorted({cell.decay for cell in cells})
    assert len(cells) == 56 and len(rates) == 7 and len(decays) == 8
    assert (rates[0], rates[-1], decays[0], decays[1], decays[-1]) == (1e-4, 0.1, 0, 1e-6, 1e-3)
    for values in (rates, decays[1:]):
        steps = np.diff(np.log10(values))
        assert np.allclose(steps, 0.5, atol=1e-12), "not evenly spaced in the logarithm"


def test_batchnorm_momentum_is_simclrs_in_torchs_convention():
    assert batchnorm_momentum(45_000, 256) == pytest.approx(2560 / 45_000)  # s = 175.8: 1 - 10/s is 0.943
    assert batchnorm_momentum(2_501, 256) == pytest.approx(0.1)  # s = 9.8: 0.9 is more


def test_table_shows_the_best_the_diverged_and_the_missing_cell():
    cells = cells_of(*FOUR)
    records = {cell: {"metric": value} for cell, value in zip(cells, [0.5, None, 0.75, 0.75])}
    assert best(records) == cells[2] == Cell(0.01, 0), "of equal ones the first"
    assert best({cell: {"metric": None} for cell in cells}) is None
    del records[cells[3]]
    assert table(cells, records, cells[2]) == [
        " lr  /  wd        0     0.001 ",
        "       0.1    50.00       nan ",
        "      0.01    75.00*        . ",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("transfer.root=null", "transfer.root.*must name the folder that holds the data sets"),
        ("transfer.resize=200", "transfer.resize.*must not be below transfer.size"),
        *((f"--cell={wrong}", CELL) for wrong in ("0/4", "5/4", "1", "a/b")),
    ],
)
def test_transfer_that_cannot_run_is_refused_with_exit_code_2(tmp_path, capsys, override, message):
    where = [f"logging.folder={tmp_path}", f"transfer.root={tmp_path}", "meta.device=cpu"]
    assert main(["transfer", DEMO, *where, override]) == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
    assert not (tmp_path / "digits_demo" / "results").exists()
