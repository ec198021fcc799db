"""The numbers of a transfer as one result of the run: a metric for each data set that has been counted so far.

"metrics": {"cifar10": 0.976, "cifar100": 0.855, "voc07": 0.851}        top-1, top-1, 11-point mAP
"chosen":  {"cifar10": {"lr": 0.01, "weight_decay": 1e-5, "validation": 0.974, ...}, ...}
"""

from collections.abc import Sequence
from pathlib import Path

from fastsuncet.results import FOLDER, name_of, read_results, write_result
from fastsuncet.snapshot import versions
from fastsuncet.transfer.cells import Bench
from fastsuncet.transfer.grid import Cell
from fastsuncet.transfer.records import Record


def keep(one: Bench, cells: Sequence[Cell], compared: Record, counted: Record) -> Path:
    """Puts a data set's number beside those of the others, and returns the file. On one rank alone.

    Data sets can be counted by processes of their own, at the same moment: what was read is looked at again after
    writing, so that of two writers neither loses the other's number.
    """
    run = one.config.run_folder
    record = outcome(one, cells, compared, counted)
    while True:
        others = [old for old in read_results(run) if name_of(run, old) == name_of(run, record)]
        for key in ("metrics", "chosen"):
            record[key] = {**(others[0][key] if others else {}), **record[key]}
        record["images"] = sum(chosen["images"] for chosen in record["chosen"].values())
        if others and all(others[0][key] == record[key] for key in ("metrics", "chosen")):
            return run / FOLDER / f"{name_of(run, record)}.json"
        write_result(run, record)


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
