"""A transfer: each cell of a shard, then for every complete grid the choice, the retraining and the result.

A cell is a learning rate with a weight decay. It is trained once, and its record is read from then on. Its folder is
below one whose name is a digest of all else that its number depends on, so a cell of other settings is never mistaken
for one of these. The result holds a metric for each data set evaluated so far:

"metrics": {"cifar10": 0.976, "cifar100": 0.855, "voc07": 0.851}        top-1, top-1, 11-point mAP
"chosen":  {"cifar10": {"lr": 0.01, "weight_decay": 1e-5, "validation": 0.974, ...}, ...}
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastsuncet.checkpoint.run_folder import disk_errors, lock_folder
from fastsuncet.config import Config
from fastsuncet.config.schema import FinetuneSection, LoggingSection
from fastsuncet.distributed.place import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import NumericalError
from fastsuncet.evaluation.encoder import Encoder, load_chosen
from fastsuncet.evaluation.finetuning.data_sets import TransferTask, open_task
from fastsuncet.evaluation.finetuning.fit import FineTuning, fit
from fastsuncet.evaluation.finetuning.record import (
    KEYS,
    config_values,
    indices_digest,
    module_digest,
    read_record,
    resolve_batch,
    sizes,
    with_sizes,
    write_record,
)
from fastsuncet.evaluation.scoring import require_finite
from fastsuncet.metrics.results import FOLDER, asked, name_of, read_result, send_results, write_result
from fastsuncet.versions import versions
from pipelines import atomic_files
from pipelines.datasets.index import ImageIndex
from pipelines.output import duration, say_line
from pipelines.sampling.augmentation import Center

CellResult = dict[str, Any]  # a cell's result, as its JSON file holds it
PER_CELL = ("finetune.lr", "finetune.weight_decay")
FROM_RETRAINED = ("lr", "weight_decay", "weight_decay_over_lr", "train_images", "images", "classes")
RUNNING = "    skipped: another process is running this cell"


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


def best(records: Mapping[Cell, CellResult]) -> Cell | None:
    """Return the cell of the highest validation metric, the first of equal ones. None where all diverged."""
    finite = [cell for cell, record in records.items() if record["metric"] is not None]
    return max(finite, key=lambda cell: records[cell]["metric"], default=None)


def table(cells: Sequence[Cell], records: Mapping[Cell, CellResult], chosen: Cell | None) -> list[str]:
    """Return lines: a row per learning rate, a column per weight decay, in percent; the chosen cell with a star.

    A dot stands for a cell that is not finished, `nan` for one that diverged.
    """
    decays = list(dict.fromkeys(cell.decay for cell in cells))

    def entry(cell: Cell) -> str:
        if cell not in records:
            return ". "
        value = records[cell]["metric"]
        return f"{'nan' if value is None else format(100 * value, '.2f')}{'*' if cell == chosen else ' '}"

    head = f"{'lr  /  wd':>10}" + "".join(f"{decay:>9.3g} " for decay in decays)
    rates = dict.fromkeys(cell.lr for cell in cells)
    rows = [f"{lr:>10.3g}" + "".join(f"{entry(Cell(lr, decay)):>10}" for decay in decays) for lr in rates]
    return [head, *rows]


@dataclass(frozen=True, eq=False)
class DatasetGrid:
    """The grid of one data set: what its cells have in common."""

    config: Config  # of `open_grid`: each cell sets its own finetune.lr and finetune.weight_decay
    asked: dict[str, Any]  # `asked` of the config as it was before: a sweep knows the result by it
    place: Place
    encoder: Encoder
    task: TransferTask
    identity: dict[str, Any]  # all that a cell's number depends on besides rate and weight decay
    folder: Path
    signals: SignalFlag

    def finished(self) -> dict[Cell, CellResult]:
        """Return the records of the finished cells, in the grid's order. Raises CheckpointError for a damaged one."""
        paths = {cell: self.folder / cell.name / "cell.json" for cell in grid(self.config)}
        found = {cell: read_record(path, self.identity, self.place) for cell, path in paths.items()}
        return {cell: record for cell, record in found.items() if record is not None}

    def run(self, cell: Cell, *, retrain: bool = False) -> tuple[CellResult | None, bool]:
        """Train the cell and measure it on the validation images; `retrain`: train it on both, and test it. Collective.

        Return (the record, whether it was made just now); (None, False) if another process is at it. A cell whose loss
        became NaN or infinite is finished too, with the metric None: at the top of a grid of learning rates that is a
        result and not an error.
        """
        task, path = self.task, self.folder / cell.name / "cell.json"
        chosen, index, evaluated = task.train, task.images, task.validation
        if retrain:
            path = self.folder / f"selected-{cell.name}" / "selected.json"
            chosen, index, evaluated = task.both, task.test, np.arange(len(task.test))
        with lock_folder(path.parent, self.place) as locked:
            if not locked:
                return None, False
            checkpoints, record = path.parent / "fit", read_record(path, self.identity, self.place)
            new = record is None
            if record is None:
                began = time.monotonic()
                record = {
                    **{"lr": cell.lr, "weight_decay": cell.decay, "weight_decay_over_lr": cell.weight_decay},
                    **{"train_images": len(chosen), "images": len(evaluated)},
                    **self._measured(cell, chosen, index, evaluated, checkpoints),
                    "seconds": round(time.monotonic() - began, 1),
                }
                write_record(path, record, self.identity, self.place)
            if self.place.first:
                # 56 cells' checkpoints of a ResNet-50 would be 10 GB. A kill after the record was written leaves some.
                atomic_files.remove(checkpoints)
            return record, new

    def _measured(
        self, cell: Cell, chosen: np.ndarray, index: ImageIndex, evaluated: np.ndarray, checkpoints: Path
    ) -> CellResult:
        """Train on the images `chosen` of the task, and return what is measured on those `evaluated` of `index`."""
        config, t = with_sizes(self.config, lr=cell.lr, weight_decay=cell.weight_decay), self.config.transfer
        # The trackers get the result: a cell's own files go with its checkpoints.
        config = config.model_copy(update={"logging": LoggingSection(log_every=config.logging.log_every)})
        images, a = (self.task.images, chosen), config.data.augmentation
        options = {"steps": t.steps, "bn_momentum": batchnorm_momentum(len(chosen), sizes(config)[0])}
        also = {**options, "data": self.identity}
        tuning = FineTuning(self.encoder, *images, config, self.place, checkpoints, also=also, **options)
        try:
            logits, _ = fit(tuning, index, evaluated, self.signals, Center(t.size, t.resize, a.mean, a.std))
            require_finite(logits)
        except NumericalError as error:
            return {"metric": None, "classes": {}, "diverged": str(error).splitlines()[0].split(". ")[0]}
        metric, classes = self.task.metric(logits.cpu().numpy(), index, evaluated)
        return {"metric": metric, "classes": classes, "diverged": None}


def batchnorm_momentum(images: int, batch: int) -> float:
    """Return torch's BatchNorm momentum: the fraction of the running statistics that a batch replaces.

    SimCLR's max(1 - 10/s, 0.9), with s steps an epoch, is TensorFlow's, the fraction that is kept.
    """
    return 1 - max(1 - 10 * batch / images, 0.9)


def open_grid(
    config: Config, place: Place, encoder: Encoder, task: TransferTask, folder: Path, signals: SignalFlag
) -> DatasetGrid:
    """Return the grid of one data set, below `folder`. Raises ConfigErrors for a batch that does not fit.

    All cells are fine-tuned by SimCLR's protocol, and pixels are as in training.
    """
    batch = resolve_batch(config, "transfer", len(task.train), f" of {task.name}", place.world_size, passes=1)
    t, a = config.transfer, config.data.augmentation
    section = FinetuneSection(head="zero", batch_size=batch, momentum=t.momentum, crop_scale=(0.08, 1.0))
    views = replace(a, size=t.size, flip=0.5, crop_ratio=(3 / 4, 4 / 3))
    data = config.data.model_copy(update={"augmentation": views})
    written = asked(config, "transfer")
    config = config.model_copy(update={"finetune": section, "data": data})
    identity = {
        "dataset": task.name,
        "encoder": module_digest(encoder.module),
        "images": task.images.fingerprint(),
        "test": task.test.fingerprint(),
        "train": len(task.train),
        "validation": indices_digest(task.validation),
        "processes": place.world_size,
        "steps": t.steps,
        "resize": t.resize,
        **config_values(config, (key for key in KEYS if key not in PER_CELL)),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    folder /= f"{task.name}-{digest}"
    return DatasetGrid(config, written, place, encoder, task, identity, folder, signals)


def open_grids(
    config: Config, place: Place, where: Path | None, step: int | None, signals: SignalFlag
) -> list[DatasetGrid]:
    """Return a grid for each data set, all of them before the first cell: a missing one is then reported at once."""
    encoder = next(load_chosen(place, config, where, step))
    name = Path(encoder.source).stem if encoder.step is None else f"step_{encoder.step:08d}"
    folder = config.run_folder / "transfer" / f"{name}-{module_digest(encoder.module)[:8]}"
    tasks = [open_task(name, config, place) for name in config.transfer.datasets]
    grids = [open_grid(config, place, encoder, task, folder, signals) for task in tasks]
    if place.first:
        steps, batch = config.transfer.steps, grids[0].config.finetune.batch_size
        say_line(f"encoder    {encoder.name}, {encoder.method or 'method unknown'}, {encoder.source}")
        say_line(f"cells      {len(grid(config))} per data set, {steps:,} steps of {batch:,} images each")
        for task, dataset in zip(tasks, grids):
            say_line(
                f"{task.name:<10} {len(task.train):,} images to train on, {len(task.validation):,} to choose on, "
                f"{len(task.test):,} to test on; {dataset.folder}"
            )
    return grids


def run_grids(grids: Sequence[DatasetGrid], shard: tuple[int, int]) -> None:
    """Run the shard's cells one after the other, then choose for every data set whose cells are all finished.

    Raises Preempted once a signal came: one between two cells stops the next cell after its first update. Raises
    NumericalError, after all other data sets have their result, for those that have none.
    """
    say = grids[0].place.say
    every = [(dataset, cell) for dataset in grids for cell in grid(dataset.config)]
    number, count = shard
    mine = every[number - 1 :: count]  # every cell is in one shard; their sizes differ by one at most
    done = {(dataset, cell) for dataset in grids for cell in dataset.finished()}
    before = len(done.intersection(mine))
    say(f"part       {number}/{count}: {len(mine)} of {len(every)} cells, {before} of them done before")
    seconds = []  # of the cells trained now
    for number, (dataset, cell) in enumerate(mine, 1):
        say(f"cell {number}/{len(mine)}  {dataset.task.name}, {cell}")
        record, new = dataset.run(cell)
        if record is None:
            say(RUNNING)
            continue
        text = f"diverged: {record['diverged']}"
        if record["metric"] is not None:
            text = f"{dataset.task.title} {100 * record['metric']:.2f} % in {record['seconds']:,.0f} s"
        if new:
            seconds.append(record["seconds"])
            if left := sum(item not in done for item in mine[number:]):
                text += f"; {left} left, about {duration(left * sum(seconds) / len(seconds))}"
        say(f"    {text}" if new else f"    done before: {text}")
    diverged = []
    for dataset in grids:
        try:
            conclude(dataset)
        except NumericalError as error:  # noqa: PERF203 - a grid takes far longer
            diverged.append(str(error))
    if diverged:
        raise NumericalError("\n".join(diverged))


def conclude(dataset: DatasetGrid) -> None:
    """Print the grid of one data set; once it is complete, retrain its best cell and evaluate it.

    Collective. Raises NumericalError where every cell diverged, or the retraining did.
    """
    task, place, cells = dataset.task, dataset.place, grid(dataset.config)
    records = dataset.finished()
    missing, say = len(cells) - len(records), place.say
    chosen = None if missing else best(records)
    say(f"\n{task.name}: {task.title} on {len(task.validation):,} validation images, in %")
    say(*table(cells, records, chosen))
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
    say(f"chosen: {chosen}; now trained on all {len(task.both):,} images")
    record, _ = dataset.run(chosen, retrain=True)
    if record is None:
        say(RUNNING)
        return
    if record["metric"] is None:
        raise NumericalError(
            f"{task.name}, {chosen}: the retraining diverged: {record['diverged']}; replace this rate in "
            "transfer.learning_rates by a lower one"
        )
    say(f"    {task.title} {100 * record['metric']:.2f} % of {record['images']:,} test images")
    if place.first:
        written = save_result(dataset, records[chosen], record)
        send_results(dataset.config, [written])
        say(f"    written to {written}")


def save_result(dataset: DatasetGrid, validated: CellResult, retrained: CellResult) -> Path:
    """Add a data set's metric to those of the others in the result's file; return the file. On one rank only.

    Processes that evaluate other data sets at the same moment read and write under the same lock, so no metric is lost.
    `labels` is empty: a transfer learns from all labels of another data set. Raises CheckpointError.
    """
    config, name = dataset.config, dataset.task.name
    run, t, a = config.run_folder, config.transfer, config.data.augmentation
    record = {
        "kind": "transfer",
        "metrics": {name: retrained["metric"]},
        "images": retrained["images"],
        "labels": {},
        "encoder": dataset.encoder.record(),
        "setting": {
            **{key: getattr(t, key) for key in ("steps", "momentum", "size", "resize", "validation")},
            "batch": config.finetune.batch_size,
            "mean": list(a.mean),
            "std": list(a.std),
            **{key: getattr(config.meta, key) for key in ("precision", "seed")},
            "processes": dataset.place.world_size,
            "learning_rates": sorted(t.learning_rates),
            "weight_decays": sorted(t.weight_decays),
        },
        "asked": dataset.asked,
        "chosen": {
            name: {
                "metric": dataset.task.title,
                **{key: retrained[key] for key in FROM_RETRAINED},
                "validation": validated["metric"],
                "validation_images": validated["images"],
                "folder": str(dataset.folder),
            }
        },
        "run": run.name,
        "versions": versions(),
    }
    folder = run / FOLDER
    with disk_errors(folder):
        atomic_files.make_folder(folder)
        # Another process holds the lock while it writes a small file.
        with atomic_files.exclusive(folder / ".transfer", wait=True):
            # Not by the old record's own name: that is another one after the run was moved.
            path = folder / f"{name_of(run, record)}.json"
            if path.exists():
                old = read_result(path)
                # A file or a fine-tuning of this name can have had other weights.
                if old["encoder"].get("sha256") in (None, dataset.encoder.sha256):
                    record |= {key: old[key] | record[key] for key in ("metrics", "chosen")}
            record["images"] = sum(chosen["images"] for chosen in record["chosen"].values())
            return write_result(run, record)
