"""One fine-tuning of `fastsuncet finetune`: its settings, its folder, and its accuracy, newly trained or read."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fastsuncet.checkpoint import atomic_files
from fastsuncet.checkpoint.format import versions
from fastsuncet.checkpoint.run_folder import disk_errors, exclusive_run_folder, on_rank_0
from fastsuncet.config import Config
from fastsuncet.config.rules import FILES
from fastsuncet.console import Say
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.launch import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import CheckpointError
from fastsuncet.evaluation.encoder import Encoder
from fastsuncet.evaluation.features import view_size
from fastsuncet.evaluation.scoring import accuracies, labels_record, own_rows
from fastsuncet.evaluation.supervised.fine_tuning import FineTuning, FitSettings, fit, resolve_batch
from fastsuncet.evaluation.supervised.identity import config_values, fit_identity, refuse_changed
from fastsuncet.metrics.results import write_result
from fastsuncet.training.trainer import Trainer
from pipelines.data_errors import DataError
from pipelines.datasets.index import ImageIndex

RESULT = "result.json"  # in the folder of a finished fine-tuning
SAVES = 20  # per fine-tuning, at most: a kill then costs a twentieth of it
REMEDY = "Set these back, or keep both: finetune.write_tag=ANOTHER_NAME. To begin again, remove that folder."
# What decides the weights. batch_size and lr are resolved: they can depend on the number of processes.
KEYS = (
    *("finetune.epochs", "finetune.batch_size", "finetune.lr", "finetune.momentum", "finetune.nesterov"),
    *("finetune.weight_decay", "finetune.accumulate", "finetune.crop_scale"),
    *("data.augmentation.size", "data.augmentation.flip", "data.augmentation.crop_ratio"),
    *("data.augmentation.mean", "data.augmentation.std", "meta.seed", "meta.precision"),
)


def labeled(images: Images) -> np.ndarray:
    """Return the labeled training images that can be read, int64 ascending."""
    chosen = images.split.indices
    return chosen[~np.isin(chosen, list(images.train.bad))]


def fit_settings(config: Config, images: Images, place: Place) -> FitSettings:
    """Return the numbers of the config's fine-tuning on `images`.

    Raises ConfigErrors, at the key's line, for labels that are not there and a batch that does not fit them; DataError
    where a fraction of the images selected none.
    """
    if config.data.split.kind == "none":
        raise config.error(
            "data.split.kind",
            "fine-tuning learns from labeled training images, and none are named here. For example "
            "data.split.kind=all for every training image, or the split that other runs are compared on",
        )
    count = len(labeled(images))
    if not count:
        raise DataError(f"there is no labeled image to fine-tune on: {images.split}")
    f, a = config.finetune, config.data.augmentation
    batch = resolve_batch(config, "finetune", count, "", place.world_size, f.accumulate)
    steps = f.epochs * (count // batch)
    size, resize = view_size(a.size)
    return FitSettings(
        steps=steps,
        batch=batch,
        lr=0.05 * batch / 256 if f.lr is None else f.lr,
        momentum=f.momentum,
        nesterov=f.nesterov,
        weight_decay=f.weight_decay,
        size=size,
        resize=resize,
        crop_scale=f.crop_scale,
        mean=a.mean,
        std=a.std,
        num_classes=len(images.train.classes),
        loss="softmax",
        bn_momentum=None,
        seed=config.meta.seed,
        precision=config.meta.precision,
        accumulate=f.accumulate,
        flip=a.flip,
        crop_ratio=a.crop_ratio,
        # Every epoch, unless that is too often: with few labels an epoch is an update or two.
        save_every=max(count // batch, -(-steps // SAVES)),
    )


@dataclass(frozen=True, eq=False)
class FineTuningJob:
    """An encoder to fine-tune, and with which settings."""

    config: Config
    place: Place
    images: Images
    encoder: Encoder
    settings: FitSettings
    tag_suffix: (
        bool  # one of several checkpoints, whose folders finetune.write_tag alone would not tell apart
    )

    @property
    def folder(self) -> Path:
        """RUN/finetune/TAG: the names of labels and checkpoint, or finetune.write_tag."""
        named = self.config.finetune.write_tag
        parts = [named or labels_tag(self.config)]
        if named is None or self.tag_suffix:
            parts.append(encoder_tag(self.encoder, self.config.run_folder))
        return self.config.run_folder / "finetune" / "-".join(parts)

    @property
    def validation(self) -> ImageIndex:
        """The images to evaluate on."""
        assert self.images.validation is not None  # the command opens them
        return self.images.validation

    def values(self) -> dict[str, Any]:
        """Return what decides the weights, by the config's keys."""
        resolved = {"finetune.batch_size": self.settings.batch, "finetune.lr": self.settings.lr}
        return config_values(self.config, KEYS) | resolved

    def run(
        self, truth: Tensor, signals: SignalFlag, heading: Sequence[str], say: Say
    ) -> tuple[dict[str, Any], Path | None, bool]:
        """Return (the record, its result file on rank 0, whether it was trained just now). Collective.

        `truth` (N,) are the validation images' labels. Only two lines of `heading` are printed where nothing is
        trained. A finished network is evaluated on other validation images without another update. Raises
        CheckpointError where the folder was begun with other settings, and what `fit` raises.
        """
        indices = labeled(self.images)
        identity = fit_identity(self.values(), self.encoder, self.images.train, indices, self.config)
        with exclusive_run_folder(self.folder, self.place):
            record = on_rank_0(self.place, lambda: self._read_result(identity))
            new = record is None
            for line in heading if new else heading[:2]:
                say(line)
            if record is None:
                images = (self.images.train, indices)
                where = (self.place, self.folder, self.config)
                task = FineTuning(self.encoder, *images, self.settings, *where, identity, REMEDY)
                logits, trainer = fit(task, self.validation, np.arange(len(truth)), signals)
                record = self._record(logits, truth, trainer)
                if self.place.first:
                    self._write_result(identity, record)
            written = write_result(self.config.run_folder, record) if self.place.first else None
        return record, written, new

    def _record(self, logits: Tensor, truth: Tensor, trainer: Trainer) -> dict[str, Any]:
        rows, s = own_rows(self.place), self.settings
        metrics = accuracies(logits[rows], truth[rows], len(truth))
        if s.num_classes <= 5:
            del metrics["top5"]  # always 1
        setting = {key.split(".")[-1]: value for key, value in self.values().items()}
        setting["batchnorm_images"] = s.batch // (self.place.world_size * s.accumulate)
        if self.config.data.kind in FILES:
            setting["validation"] = self.validation.fingerprint()[:12]  # two folders are two results
        return {
            "kind": "finetune",
            "metrics": metrics,
            "images": len(truth),
            "labels": labels_record(self.images, self.config),
            "encoder": self.encoder.record(),
            "setting": setting,
            "finetuned": {
                "folder": str(self.folder),
                "train_loss": trainer.means[0],
                "train_accuracy": trainer.means[1],
                "ledger": trainer.ledger.record(),
            },
            "run": self.config.run_folder.name,
            "versions": versions(),
        }

    def _read_result(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        """Return the record of a fine-tuning that has ended and was evaluated on these validation images."""
        path = self.folder / RESULT
        try:
            kept = json.loads(path.read_bytes())
            refuse_changed(kept["identity"], identity, self.folder, REMEDY)
            same_images = kept.get("validation") == self.validation.fingerprint()
            return kept["record"] if same_images else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is not a fine-tuning's result ({type(error).__name__}: {error}): remove it"
            ) from error

    def _write_result(self, identity: dict[str, Any], record: dict[str, Any]) -> None:
        validation = self.validation.fingerprint()
        payload = {"identity": identity, "validation": validation, "record": record}
        with disk_errors(self.folder / RESULT):
            atomic_files.replace(self.folder / RESULT, json.dumps(payload, indent=1).encode() + b"\n")


def labels_tag(config: Config) -> str:
    """Return the split as part of a folder's name: bernoulli0.1, 10percent, all."""
    split = config.data.split
    name = split.kind
    if split.kind == "bernoulli":
        name = f"bernoulli{split.fraction:g}" + (f"-seed{split.seed}" if split.seed else "")
    elif split.file is not None:
        name = Path(split.file).stem
    return _file_name(name)


def encoder_tag(encoder: Encoder, run: Path) -> str:
    """Return the encoder as part of a folder's name: step_00000400, other_run-step_00000400, resnet50."""
    source = Path(encoder.source).resolve()
    if encoder.step is None:
        return _file_name(source.stem)
    home = source.parent.parent
    tuned = "" if encoder.tuned is None else f"-tuned_{encoder.tuned:08d}"
    name = f"step_{encoder.step:08d}{tuned}"
    return name if home == run.resolve() else _file_name(f"{home.name}-{name}")


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or "encoder"
