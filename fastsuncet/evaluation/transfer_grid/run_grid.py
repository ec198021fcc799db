"""A transfer: each cell of a shard, then for every complete grid the choice, the retraining and the result.

The result holds a metric for each data set that has been evaluated so far:

"metrics": {"cifar10": 0.976, "cifar100": 0.855, "voc07": 0.851}        top-1, top-1, 11-point mAP
"chosen":  {"cifar10": {"lr": 0.01, "weight_decay": 1e-5, "validation": 0.974, ...}, ...}
"""

import time
from collections.abc import Sequence
from pathlib import Path

from fastsuncet.checkpoint import atomic_files
from fastsuncet.checkpoint.format import versions
from fastsuncet.checkpoint.run_folder import disk_errors
from fastsuncet.config import Config
from fastsuncet.console import Say, say_line
from fastsuncet.distributed.collectives import any_rank
from fastsuncet.distributed.launch import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import NumericalError, Preempted
from fastsuncet.evaluation.encoder import Encoder, choose_on_one_rank, load_encoder
from fastsuncet.evaluation.supervised.identity import module_digest
from fastsuncet.evaluation.transfer_grid.cell import DatasetGrid, open_grid
from fastsuncet.evaluation.transfer_grid.grid import Cell, Record, as_csv, best, grid, shard_of, table
from fastsuncet.evaluation.transfer_grid.tasks import open_task
from fastsuncet.metrics.results import FOLDER, name_of, read_results, write_result

IN_RESULT = ("steps", "batch", "momentum", "size", "resize", "precision", "seed", "processes")
FROM_RETRAINED = ("lr", "weight_decay", "weight_decay_over_lr", "train_images", "images")


def open_grids(
    config: Config, place: Place, where: Path | None, step: int | None, signals: SignalFlag
) -> list[DatasetGrid]:
    """Return a grid for each data set, all of them before the first cell: a missing one is then reported at once."""
    (chosen,) = choose_on_one_rank(place, where or config.run_folder, step, False)
    encoder = load_encoder(chosen, config)
    folder = config.run_folder / "transfer" / encoder_tag(encoder)
    tasks = [open_task(name, config, place) for name in config.transfer.datasets]
    grids = [open_grid(config, place, encoder, task, folder, signals) for task in tasks]
    if place.first:
        steps, batch = config.transfer.steps, grids[0].settings.batch
        say_line(f"encoder    {encoder.name}, {encoder.method or 'method unknown'}, {encoder.source}")
        say_line(f"cells      {len(grid(config))} per data set, {steps:,} steps of {batch:,} images each")
        for task, dataset in zip(tasks, grids):
            say_line(
                f"{task.name:<10} {len(task.train):,} images to train on, {len(task.validation):,} to choose on, "
                f"{len(task.test):,} to test on; {dataset.folder}"
            )
    return grids


def encoder_tag(encoder: Encoder) -> str:
    """Return a folder's name for these weights: their step or file, and a digest of their values."""
    name = Path(encoder.source).stem if encoder.step is None else f"step_{encoder.step:08d}"
    return f"{name}-{module_digest(encoder.module)[:8]}"


def run_grids(
    grids: Sequence[DatasetGrid], cells: Sequence[Cell], shard: tuple[int, int], signals: SignalFlag
) -> None:
    """Run the shard's cells one after the other, then choose for every data set whose cells are all finished.

    Raises Preempted once a signal came, between cells as well as within one.
    """
    say = say_line if grids[0].place.first else (lambda line: None)
    every = [(dataset, cell) for dataset in grids for cell in cells]
    mine = shard_of(every, *shard)
    done = {(dataset, cell) for dataset in grids for cell in dataset.finished(cells)}
    before = f", {len(done.intersection(mine))} of them done before" if done.intersection(mine) else ""
    say(f"part       {shard[0]}/{shard[1]}: {len(mine)} of {len(every)} cells{before}")
    seconds = []  # of the cells trained now
    for number, (dataset, cell) in enumerate(mine, 1):
        stop_if_requested(signals)
        values = f"lr {cell.lr:.3g}, weight decay {cell.decay:.3g}/lr"
        say(f"cell {number}/{len(mine)}  {dataset.task.name}, {values}")
        record, new = dataset.run(cell)
        remaining = ""
        if record is not None and new:
            seconds.append(record["seconds"])
            left = sum(item not in done for item in mine[number:])
            remaining = f"; {left} left, {about(left * sum(seconds) / len(seconds))}" if left else ""
        say(f"    {cell_outcome(dataset, record, new)}{remaining}")
    for dataset in grids:
        stop_if_requested(signals)
        conclude(dataset, cells, say)


def stop_if_requested(signals: SignalFlag) -> None:
    """Raise Preempted on every rank once a signal came to any of them."""
    if any_rank(signals.requested is not None):
        asked = signals.requested or "another rank"
        raise Preempted(f"{asked}: stopped between two cells; the same command continues the grid")


def cell_outcome(dataset: DatasetGrid, record: Record | None, new: bool) -> str:
    """Return the outcome of a cell as text."""
    if record is None:
        return "skipped: another process is running this cell"
    before = "" if new else "done before: "
    if record["validation"] is None:
        return f"{before}diverged: {record['diverged']}"
    return f"{before}{dataset.task.title} {100 * record['validation']:.2f} % in {record['seconds']:,.0f} s"


def about(seconds: float) -> str:
    """Return a duration as text: "about 1 h 20 min"."""
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours:
        return f"about {hours} h {minutes} min"
    return f"about {minutes} min" if seconds >= 90 else f"about {seconds:.0f} s"


def conclude(dataset: DatasetGrid, cells: Sequence[Cell], say: Say) -> None:
    """Print and write the grid of one data set; once it is complete, retrain its best cell and evaluate it.

    Collective. Raises NumericalError where every cell diverged, or the retraining did.
    """
    task, place = dataset.task, dataset.place
    records = dataset.finished(cells)
    missing = len(cells) - len(records)
    chosen = None if missing else best(cells, records)
    say(f"\n{task.name}: {task.title} on {len(task.validation):,} validation images, in %")
    for line in table(cells, records, chosen):
        say(line)
    if place.first:
        with disk_errors(dataset.folder / "grid.csv"):
            atomic_files.replace(dataset.folder / "grid.csv", as_csv(cells, records))
    if missing:
        say(
            f"{missing} of {len(cells)} cells are not finished. The process that finishes the last one chooses; the "
            "same command without --cell runs all that are left"
        )
        return
    if chosen is None:
        raise NumericalError(
            f"{task.name}: every cell of the grid diverged; try lower transfer.learning_rates"
        )
    values = f"lr {chosen.lr:.3g}, weight decay {chosen.decay:.3g}/lr"
    say(f"chosen: {values}; now trained on all {len(task.both):,} images")
    record, _ = dataset.retrain(chosen)
    if record is None:
        say("    skipped: another process is running this cell")
        return
    say(f"    {task.title} {100 * record['test']:.2f} % of {record['images']:,} test images")
    if place.first:
        say(f"    written to {save_result(dataset, cells, records[chosen], record)}")


def save_result(dataset: DatasetGrid, cells: Sequence[Cell], validated: Record, retrained: Record) -> Path:
    """Add a data set's metric to those of the others in the result's file; return the file. On one rank only.

    Processes that evaluate other data sets at the same moment read and write under the same lock, so no metric is lost.
    `labels` is empty: a transfer learns from all labels of another data set. Raises CheckpointError and ResultError.
    """
    run, name = dataset.config.run_folder, dataset.task.name
    record = {
        "kind": "transfer",
        "metrics": {name: retrained["test"]},
        "images": retrained["images"],
        "labels": {},
        "encoder": dataset.encoder.record(),
        "setting": {
            **{key: dataset.identity[key] for key in IN_RESULT},
            "validation": dataset.config.transfer.validation,
            "learning_rates": sorted({cell.lr for cell in cells}),
            "weight_decays": sorted({cell.decay for cell in cells}),
        },
        "chosen": {
            name: {
                "metric": dataset.task.title,
                **{key: retrained[key] for key in FROM_RETRAINED},
                "validation": validated["validation"],
                "validation_images": validated["images"],
                "folder": str(dataset.folder),
            }
        },
        "run": run.name,
        "versions": versions(),
    }
    folder = run / FOLDER
    while True:
        with disk_errors(folder):
            atomic_files.make_folder(folder)
            with atomic_files.exclusive(folder / ".transfer") as locked:
                if locked:
                    others = [old for old in read_results(run) if name_of(run, old) == name_of(run, record)]
                    for key in ("metrics", "chosen"):
                        record[key] = {**(others[0][key] if others else {}), **record[key]}
                    record["images"] = sum(chosen["images"] for chosen in record["chosen"].values())
                    return write_result(run, record)
        time.sleep(0.1)  # the other process holds the lock while it writes a small file
