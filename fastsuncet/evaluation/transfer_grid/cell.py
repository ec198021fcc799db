"""One cell of the grid: trained where nobody did, read where somebody has. And the chosen one, trained once more.

A cell's folder is below one whose name is a digest of all that its number depends on beside learning rate and weight
decay: encoder, images, steps, batch, world size. So a cell of another setting is never taken for one of this.
"""

import copy
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastsuncet.checkpoint import atomic_files
from fastsuncet.config import Config, PerRank
from fastsuncet.distributed.launch import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import NumericalError
from fastsuncet.evaluation.encoder import Encoder
from fastsuncet.evaluation.supervised.fit import FitSetting, fit
from fastsuncet.evaluation.supervised.state import digest_of
from fastsuncet.evaluation.transfer_grid.cell_records import (
    Record,
    alone,
    read_record,
    read_shared,
    write_bytes,
)
from fastsuncet.evaluation.transfer_grid.grid import Cell
from fastsuncet.evaluation.transfer_grid.tasks import Task

NOT_SHARED = ("lr", "weight_decay", "bn_momentum", "save_every")  # each cell's own, or no matter


@dataclass(frozen=True, eq=False)
class Bench:
    """What the cells of one data set share."""

    config: Config
    place: Place
    encoder: Encoder
    task: Task
    setting: FitSetting  # of all cells; learning rate, decay and BatchNorm's momentum are put in by each
    identity: Record  # all that a cell's number depends on beside lr and weight decay
    folder: Path
    signals: SignalFlag | None = None  # who asks to stop; None: each fit watches by itself

    def finished(self, cells: Sequence[Cell]) -> dict[Cell, Record]:
        """The records of the finished ones among `cells`, the same on every rank; CheckpointError for a damaged one."""
        paths = [self.folder / cell.name / "cell.json" for cell in cells]
        records = read_shared(self.place, lambda: [read_record(path, self.identity) for path in paths])
        return {cell: record for cell, record in zip(cells, records, strict=True) if record is not None}

    def write(self, name: str, payload: bytes) -> None:
        """A file in the data set's folder, whole or not at all. Raises CheckpointError."""
        write_bytes(self.folder / name, payload)

    def run(self, cell: Cell) -> tuple[Record | None, bool]:
        """(record of a cell, whether it was trained just now); (None, False) where another process is at it.

        A cell whose loss stopped being a number is finished too, with no validation metric: at the top of a grid of
        learning rates that is a finding and no fault.
        """

        def train(folder: Path) -> Record:
            try:
                metric, problem = self._fit(cell, folder, self.task.train, None), None
            except NumericalError as error:
                metric, problem = None, str(error).splitlines()[0].split(". ")[0]
            return {"validation": metric, "images": len(self.task.validation), "diverged": problem}

        return self._finished(cell, self.folder / cell.name, "cell.json", train)

    def retrain(self, cell: Cell) -> tuple[Record | None, bool]:
        """The chosen cell trained on training and validation images, and its one look at the test images; as `run`."""

        def train(folder: Path) -> Record:
            metric = self._fit(cell, folder, self.task.both, self.task.test)
            return {"test": metric, "images": len(self.task.test), "train_images": len(self.task.both)}

        return self._finished(cell, self.folder / f"selected-{cell.name}", "selected.json", train)

    def _finished(
        self, cell: Cell, folder: Path, name: str, train: Callable[[Path], Record]
    ) -> tuple[Record | None, bool]:
        with alone(folder, self.place) as held:
            if not held:
                return None, False
            record = read_shared(self.place, lambda: read_record(folder / name, self.identity))
            if record is not None:
                if self.place.first:
                    atomic_files.remove(folder / "fit")  # of a process killed between the two lines below
                return record, False
            began = time.monotonic()
            said = {"lr": cell.lr, "weight_decay": cell.decay, "weight_decay_over_lr": cell.weight_decay}
            record = {**said, **train(folder / "fit"), "seconds": round(time.monotonic() - began, 1)}
            record["identity"] = self.identity
            if self.place.first:
                write_bytes(folder / name, json.dumps(record, indent=1).encode() + b"\n")
                atomic_files.remove(folder / "fit")  # 56 cells' checkpoints of a ResNet-50 would be 10 GB
            return record, True

    def _fit(self, cell: Cell, folder: Path, chosen: np.ndarray, test: Any) -> float:
        """The metric of `cell` trained on `chosen`: on the validation images, or on all of `test`. Collective."""
        task = self.task
        index, asked = (
            (task.images, task.validation) if test is None else (task.test, np.arange(len(task.test)))
        )
        setting = replace(
            self.setting,
            lr=cell.lr,
            weight_decay=cell.weight_decay,
            bn_momentum=batchnorm_momentum(len(chosen), self.setting.batch),
        )
        # fit trains the module it is given, and every cell begins with the same weights.
        encoder = replace(self.encoder, module=copy.deepcopy(self.encoder.module))
        own = {key: getattr(setting, key) for key in ("lr", "weight_decay", "bn_momentum")}
        fitted = fit(
            encoder,
            task.images,
            chosen,
            index,
            asked,
            setting,
            self.place,
            folder,
            self.config,
            signals=self.signals,
            identity={**self.identity, **own},
        )
        logits = fitted.logits.cpu().numpy()
        if not np.isfinite(logits).all():
            raise NumericalError(f"{task.name}, {cell.name}: the outputs are not finite numbers")
        return task.metric(logits, index, asked)


def bench(
    config: Config,
    place: Place,
    encoder: Encoder,
    task: Task,
    folder: Path,
    signals: SignalFlag | None = None,
) -> Bench:
    """The bench of one data set below `folder`. Raises ConfigErrors for a batch its images or ranks do not fill."""
    t, view = config.transfer, config.data.augmentation
    batch = t.batch_size
    batch = batch.per_rank * place.world_size if isinstance(batch, PerRank) else batch
    if batch < 1 or batch % place.world_size:
        raise config.error(
            "transfer.batch_size", f"must be a multiple of the {place.world_size} processes, 1 or more"
        )
    if batch > len(task.train):
        raise config.error(
            "transfer.batch_size",
            f"must be at most {len(task.train)}: {task.name} has that many images to train a cell on",
        )
    setting = FitSetting(
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
        "encoder": digest_of(encoder.module),
        "images": task.images.fingerprint(),
        "test": task.test.fingerprint(),
        "train": len(task.train),
        "validation": hashlib.sha256(task.validation.astype("<i8").tobytes()).hexdigest(),
        "processes": place.world_size,
        **{key: value for key, value in asdict(setting).items() if key not in NOT_SHARED},
    }
    identity = json.loads(json.dumps(identity))
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    return Bench(config, place, encoder, task, setting, identity, folder / f"{task.name}-{digest}", signals)


def batchnorm_momentum(images: int, batch: int) -> float:
    """Torch's BatchNorm momentum: the share of the running statistics that a batch replaces.

    SimCLR's max(1 - 10/s, 0.9), with s steps an epoch, is TensorFlow's, the share that is kept.
    """
    return 1 - max(1 - 10 * batch / images, 0.9)
