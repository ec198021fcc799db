"""The numbers of a transfer as one result of the run: a metric for each data set that has been counted so far.

"metrics": {"cifar10": 0.976, "cifar100": 0.855, "voc07": 0.851}        top-1, top-1, 11-point mAP
"chosen":  {"cifar10": {"lr": 0.01, "weight_decay": 1e-5, "validation": 0.974, ...}, ...}
"""

import time
from collections.abc import Sequence
from pathlib import Path

from fastsuncet.checkpoint import atomic_files
from fastsuncet.checkpoint.format import versions
from fastsuncet.errors import CheckpointError
from fastsuncet.evaluation.transfer_grid.cell import Bench
from fastsuncet.evaluation.transfer_grid.cell_records import Record
from fastsuncet.evaluation.transfer_grid.grid import Cell
from fastsuncet.metrics.results import FOLDER, name_of, read_results, write_result


def keep(one: Bench, cells: Sequence[Cell], compared: Record, counted: Record) -> Path:
    """Puts a data set's number beside those of the others, and returns the file. On one rank alone.

    Data sets can be counted by processes of their own, at the same moment: each reads and writes while it alone holds
    a lock, so that of two writers neither loses the other's number. Raises CheckpointError and ResultError.
    """
    folder = one.config.run_folder / FOLDER
    while True:
        try:
            atomic_files.make_folder(folder)
            with atomic_files.exclusive(folder / ".transfer") as held:
                if held:
                    return _join(one.config.run_folder, outcome(one, cells, compared, counted))
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be written: {error}. {atomic_files.advice(error)}"
            ) from error
        time.sleep(0.1)  # the other one holds it for as long as it takes to write a small file


def _join(run: Path, record: Record) -> Path:
    """Writes `record` with the data sets that the file of its name has beside."""
    others = [old for old in read_results(run) if name_of(run, old) == name_of(run, record)]
    for key in ("metrics", "chosen"):
        record[key] = {**(others[0][key] if others else {}), **record[key]}
    record["images"] = sum(chosen["images"] for chosen in record["chosen"].values())
    return write_result(run, record)


def outcome(one: Bench, cells: Sequence[Cell], compared: Record, counted: Record) -> Record:
    """The result with one data set's number. `labels` is empty: a transfer learns from all of another data set's."""
    common = ("steps", "batch", "momentum", "size", "resize", "precision", "seed", "processes")
    name = one.task.name
    return {
        "kind": "transfer",
        "metrics": {name: counted["test"]},
        "images": counted["images"],
        "labels": {},
        "encoder": one.encoder.record(),
        "setting": {
            **{key: one.identity[key] for key in common},
            "validation": one.config.transfer.validation,
            "learning_rates": sorted({cell.lr for cell in cells}),
            "weight_decays": sorted({cell.decay for cell in cells}),
        },
        "chosen": {
            name: {
                "metric": one.task.title,
                "lr": counted["lr"],
                "weight_decay": counted["weight_decay"],
                "weight_decay_over_lr": counted["weight_decay_over_lr"],
                "validation": compared["validation"],
                "validation_images": compared["images"],
                "train_images": counted["train_images"],
                "images": counted["images"],
                "folder": str(one.folder),
            }
        },
        "run": one.config.run_folder.name,
        "versions": versions(),
    }
