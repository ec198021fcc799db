"""The cells of one data set's grid: each is trained once, and its record read from then on.

A cell's folder is below one whose name is a digest of all that its number depends on besides learning rate and weight
decay: encoder, images, steps, batch, world size. So a cell of other settings is never mistaken for one of these. A
record is one JSON file, which rank 0 writes and reads for all ranks.
"""

import copy
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from fastsuncet.checkpoint import atomic_files
from fastsuncet.checkpoint.run_folder import disk_errors, lock_folder, on_rank_0
from fastsuncet.config import Config
from fastsuncet.distributed.launch import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import CheckpointError, NumericalError
from fastsuncet.evaluation.encoder import Encoder
from fastsuncet.evaluation.supervised.fine_tuning import FineTuning, FitSettings, fit, resolve_batch
from fastsuncet.evaluation.supervised.identity import fit_identity, indices_digest, module_digest
from fastsuncet.evaluation.transfer_grid.grid import Cell, Record
from fastsuncet.evaluation.transfer_grid.tasks import TransferTask
from pipelines.datasets.index import ImageIndex

PER_CELL = ("lr", "weight_decay", "bn_momentum")
NOT_IN_IDENTITY = (*PER_CELL, "save_every")


@dataclass(frozen=True, eq=False)
class DatasetGrid:
    """The grid of one data set: what its cells have in common."""

    config: Config
    place: Place
    encoder: Encoder
    task: TransferTask
    settings: FitSettings  # of all cells; each sets its own lr, weight_decay and bn_momentum
    identity: Record  # all that a cell's number depends on besides lr and weight decay
    folder: Path
    signals: SignalFlag

    def finished(self, cells: Sequence[Cell]) -> dict[Cell, Record]:
        """Return the records of the finished ones among `cells`. Raises CheckpointError for a damaged one."""
        paths = [self.folder / cell.name / "cell.json" for cell in cells]
        records = on_rank_0(self.place, lambda: [self._read(path) for path in paths])
        return {cell: record for cell, record in zip(cells, records, strict=True) if record is not None}

    def run(self, cell: Cell) -> tuple[Record | None, bool]:
        """Return (the cell's record, whether it was trained just now); (None, False) if another process trains it.

        A cell whose loss became NaN or infinite is finished too, without a validation metric: at the top of a grid of
        learning rates that is a result and not an error.
        """

        def train(folder: Path) -> Record:
            task, problem = self.task, None
            try:
                metric = self._fit(cell, folder, task.train, task.images, task.validation)
            except NumericalError as error:
                metric, problem = None, str(error).splitlines()[0].split(". ")[0]
            return {"validation": metric, "images": len(task.validation), "diverged": problem}

        return self._once(cell, self.folder / cell.name / "cell.json", train)

    def retrain(self, cell: Cell) -> tuple[Record | None, bool]:
        """Train the chosen cell on training and validation images, and evaluate it on the test images; as `run`."""

        def train(folder: Path) -> Record:
            both, test = self.task.both, self.task.test
            metric = self._fit(cell, folder, both, test, np.arange(len(test)))
            return {"test": metric, "images": len(test), "train_images": len(both)}

        return self._once(cell, self.folder / f"selected-{cell.name}" / "selected.json", train)

    def _once(self, cell: Cell, path: Path, train: Callable[[Path], Record]) -> tuple[Record | None, bool]:
        """Return the record in `path`, and whether `train` had to make it; (None, False) if another process does."""
        checkpoints = path.parent / "fit"
        with lock_folder(path.parent, self.place) as locked:
            if not locked:
                return None, False
            record = on_rank_0(self.place, lambda: self._read(path))
            new = record is None
            if record is None:
                began = time.monotonic()
                values = {
                    "lr": cell.lr,
                    "weight_decay": cell.decay,
                    "weight_decay_over_lr": cell.weight_decay,
                }
                record = {**values, **train(checkpoints), "seconds": round(time.monotonic() - began, 1)}
                record["identity"] = self.identity
            if self.place.first:
                if new:
                    with disk_errors(path):
                        atomic_files.replace(path, json.dumps(record, indent=1).encode() + b"\n")
                # 56 cells' checkpoints of a ResNet-50 would be 10 GB. A kill after the record was written leaves some.
                atomic_files.remove(checkpoints)
            return record, new

    def _read(self, path: Path) -> Record | None:
        try:
            record = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the result of a cell, {path}, cannot be read ({error}): remove it"
            ) from error
        if not isinstance(record, dict) or record.get("identity") != self.identity:
            raise CheckpointError(f"{path} has other settings than its folder's name says: remove it")
        return record

    def _fit(
        self, cell: Cell, folder: Path, chosen: np.ndarray, index: ImageIndex, evaluated: np.ndarray
    ) -> float:
        """Return the metric, on the images `evaluated` of `index`, of `cell` trained on `chosen`. Collective."""
        momentum = batchnorm_momentum(len(chosen), self.settings.batch)
        own = {"lr": cell.lr, "weight_decay": cell.weight_decay, "bn_momentum": momentum}
        # fit trains the module it is given, and every cell begins with the same weights.
        encoder = replace(self.encoder, module=copy.deepcopy(self.encoder.module))
        images, where = (self.task.images, chosen), (self.place, folder, self.config)
        identity = fit_identity({**self.identity, **own}, encoder, *images, self.config)
        task = FineTuning(encoder, *images, replace(self.settings, **own), *where, identity)
        logits = fit(task, index, evaluated, self.signals)[0].cpu().numpy()
        if not np.isfinite(logits).all():
            raise NumericalError(f"{self.task.name}, {cell.name}: the outputs are not finite numbers")
        return self.task.metric(logits, index, evaluated)


def open_grid(
    config: Config, place: Place, encoder: Encoder, task: TransferTask, folder: Path, signals: SignalFlag
) -> DatasetGrid:
    """Return the grid of one data set, below `folder`. Raises ConfigErrors for a batch that does not fit."""
    t, view = config.transfer, config.data.augmentation
    batch = resolve_batch(config, "transfer", len(task.train), f" of {task.name}", place.world_size, passes=1)
    settings = FitSettings(
        steps=t.steps,
        batch=batch,
        lr=0.0,
        momentum=t.momentum,
        nesterov=True,
        weight_decay=0.0,
        size=t.size,
        resize=t.resize,
        crop_scale=(0.08, 1.0),
        mean=view.mean,
        std=view.std,
        num_classes=len(task.images.classes),
        loss=task.loss,
        bn_momentum=None,
        seed=config.meta.seed,
        precision=config.meta.precision,
        accumulate=1,
    )
    identity = {
        "dataset": task.name,
        "encoder": module_digest(encoder.module),
        "images": task.images.fingerprint(),
        "test": task.test.fingerprint(),
        "train": len(task.train),
        "validation": indices_digest(task.validation),
        "processes": place.world_size,
        **{key: value for key, value in asdict(settings).items() if key not in NOT_IN_IDENTITY},
    }
    identity = json.loads(json.dumps(identity))  # as a record gives it back, with lists for tuples
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    dataset = folder / f"{task.name}-{digest}"
    return DatasetGrid(config, place, encoder, task, settings, identity, dataset, signals)


def batchnorm_momentum(images: int, batch: int) -> float:
    """Return torch's BatchNorm momentum: the fraction of the running statistics that a batch replaces.

    SimCLR's max(1 - 10/s, 0.9), with s steps an epoch, is TensorFlow's, the fraction that is kept.
    """
    return 1 - max(1 - 10 * batch / images, 0.9)
