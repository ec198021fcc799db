"""One fine-tuning: what its settings are, where it lives, and its number, trained for or read."""

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
from fastsuncet.checkpoint.run_folder import exclusive_run_folder
from fastsuncet.config import Config, PerRank
from fastsuncet.console import Say
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.collectives import broadcast_json
from fastsuncet.distributed.launch import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import CheckpointError
from fastsuncet.evaluation.encoder import Encoder
from fastsuncet.evaluation.features import view_size
from fastsuncet.evaluation.scoring import accuracies, labels_record, own_rows
from fastsuncet.evaluation.supervised.fit import FitResult, FitSetting, fit
from fastsuncet.evaluation.supervised.state import identity_of, refuse_changed
from fastsuncet.metrics.results import write_result
from pipelines.data_errors import DataError

RESULT = "result.json"  # in the folder of a finished fine-tuning
SAVES = 20  # of one fine-tuning, at most: a kill costs a twentieth of it


def labeled(images: Images) -> np.ndarray:
    """The labeled training images that can be read, int64 ascending."""
    chosen = images.split.indices
    return chosen[~np.isin(chosen, list(images.train.bad))]


def settings(config: Config, images: Images, place: Place) -> FitSetting:
    """The numbers of the config's fine-tuning on `images`.

    Raises ConfigErrors, at the key's line, for labels that are not there and a batch that does not fit them; DataError
    where a share of the images drew none.
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
    batch = f.batch_size
    batch = batch.per_rank * place.world_size if isinstance(batch, PerRank) else batch
    parts = place.world_size * f.accumulate
    processes = "1 process" if place.world_size == 1 else f"{place.world_size} processes"
    if batch < 1 or batch % parts:
        raise config.error(
            "finetune.batch_size",
            f"{batch:,} images cannot be shared by {processes} in {f.accumulate} passes each (finetune.accumulate): a "
            f"multiple of {parts} can, such as {max(1, round(batch / parts)) * parts:,}",
        )
    if count < batch:
        fits = count // parts * parts
        advice = f"at most {fits:,}" if fits else f"and no batch can: {processes}, {f.accumulate} passes"
        raise config.error(
            "finetune.batch_size", f"{count:,} labeled images do not fill a batch of {batch:,}: {advice}"
        )
    size, resize = view_size(a.size)
    return FitSetting(
        steps=f.epochs * (count // batch),
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
        # Every epoch, but of a few labels an epoch is an update or two, and a ResNet-50's checkpoint 0.2 GB.
        save_every=max(count // batch, -(-f.epochs * (count // batch) // SAVES)),
    )


@dataclass(frozen=True, eq=False)
class Job:
    """An encoder to fine-tune, and with which numbers."""

    config: Config
    place: Place
    images: Images
    encoder: Encoder
    setting: FitSetting
    tag_suffix: bool  # one of several: finetune.write_tag alone would not tell them apart

    @property
    def folder(self) -> Path:
        """RUN/finetune/TAG: the labels' and the checkpoint's names, unless finetune.write_tag says another."""
        named = self.config.finetune.write_tag
        parts = [named or labels_tag(self.config)]
        if named is None or self.tag_suffix:
            parts.append(encoder_tag(self.encoder, self.config.run_folder))
        return self.config.run_folder / "finetune" / "-".join(parts)

    def numbers(self) -> dict[str, Any]:
        """What decides the weights, under the names that the config has for it."""
        s, a = self.setting, self.config.data.augmentation
        return {
            "finetune.epochs": self.config.finetune.epochs,
            "finetune.batch_size": s.batch,
            "finetune.lr": s.lr,
            "finetune.momentum": s.momentum,
            "finetune.nesterov": s.nesterov,
            "finetune.weight_decay": s.weight_decay,
            "finetune.accumulate": s.accumulate,
            "finetune.crop_scale": list(s.crop_scale),
            "data.augmentation.size": a.size,
            "data.augmentation.flip": a.flip,
            "data.augmentation.crop_ratio": list(a.crop_ratio),
            "data.augmentation.mean": list(a.mean),
            "data.augmentation.std": list(a.std),
            "meta.seed": s.seed,
            "meta.precision": s.precision,
        }

    @property
    def validation(self) -> str:
        """Which images the accuracy is counted on."""
        return self.images.validation.fingerprint()

    def run(
        self, truth: Tensor, signals: SignalFlag, heading: Sequence[str], say: Say
    ) -> tuple[dict[str, Any], Path | None, bool]:
        """(the record, the file of results it is in on rank 0, whether it was trained for just now). Collective.

        `truth` (N,) are the validation images' labels; of `heading` only two lines are said where nothing is trained.
        What has ended on other validation images is counted on these without another update. Raises CheckpointError
        where the folder was begun with other settings, and what `fit` raises.
        """
        remedy = "Set these back, or keep both: finetune.write_tag=ANOTHER_NAME. To begin again, remove that folder."
        indices = labeled(self.images)
        identity = identity_of(self.numbers(), self.encoder, self.images.train, indices, self.config)
        with exclusive_run_folder(self.folder, self.place):
            record = self._finished(identity, remedy)
            fresh = record is None
            for line in heading if fresh else heading[:2]:
                say(line)
            if fresh:
                validation = np.arange(len(truth))
                done = fit(
                    self.encoder,
                    self.images.train,
                    indices,
                    self.images.validation,
                    validation,
                    self.setting,
                    self.place,
                    self.folder,
                    self.config,
                    signals=signals,
                    identity=self.numbers(),
                    remedy=remedy,
                )
                record = self._record(done, truth)
                self._write(identity, record)
            written = write_result(self.config.run_folder, record) if self.place.first else None
        return record, written, fresh

    def _record(self, done: FitResult, truth: Tensor) -> dict[str, Any]:
        mine, s = own_rows(self.place), self.setting
        # Of two folders of images each has its own number, as in `evaluate`.
        files_of = (
            {"validation": self.validation[:12]} if self.config.data.kind in ("image_folder", "csv") else {}
        )
        metrics = accuracies(done.logits[mine], truth[mine], len(truth))
        if s.num_classes <= 5:
            del metrics["top5"]  # all of them are right
        return {
            "kind": "finetune",
            "metrics": metrics,
            "images": len(truth),
            "labels": labels_record(self.images, self.config),
            "encoder": self.encoder.record(),
            "setting": {
                **{key.split(".")[-1]: value for key, value in self.numbers().items()},
                "batchnorm_images": s.batch // (self.place.world_size * s.accumulate),
                **files_of,
            },
            "finetuned": {
                "folder": str(self.folder),
                "train_loss": done.loss,
                "train_accuracy": done.accuracy,
                "ledger": done.ledger.record(),
            },
            "run": self.config.run_folder.name,
            "versions": versions(),
        }

    def _finished(self, identity: dict[str, Any], remedy: str) -> dict[str, Any] | None:
        """The record of a fine-tuning that has ended and was counted on these images, the same on every rank."""
        record, problem = None, None
        path = self.folder / RESULT
        if self.place.first:
            try:
                kept = json.loads(path.read_bytes())
                refuse_changed(kept["identity"], identity, self.folder, remedy)
                if kept.get("validation") == self.validation:
                    record = kept["record"]
            except FileNotFoundError:
                pass
            except CheckpointError as error:
                problem = str(error)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                problem = (
                    f"{path} is not what a fine-tuning writes ({type(error).__name__}: {error}): remove it"
                )
        record, problem = broadcast_json([record, problem])
        if problem is not None:
            raise CheckpointError(problem)
        return record

    def _write(self, identity: dict[str, Any], record: dict[str, Any]) -> None:
        if not self.place.first:
            return
        path = self.folder / RESULT
        payload = (
            json.dumps(
                {"identity": identity, "validation": self.validation, "record": record}, indent=1
            ).encode()
            + b"\n"
        )
        try:
            atomic_files.replace(path, payload)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written: {error}. {atomic_files.advice(error)}"
            ) from error


def labels_tag(config: Config) -> str:
    """The split in a folder's name: bernoulli0.1, 10percent, all."""
    split = config.data.split
    name = split.kind
    if split.kind == "bernoulli":
        name = f"bernoulli{split.fraction:g}" + (f"-seed{split.seed}" if split.seed else "")
    elif split.file is not None:
        name = Path(split.file).stem
    return _plain(name)


def encoder_tag(encoder: Encoder, run: Path) -> str:
    """The encoder in a folder's name: step_00000400 of this run, other_run-step_00000400, resnet50."""
    source = Path(encoder.source).resolve()
    if encoder.step is None:
        return _plain(source.stem)
    home = source.parent.parent
    tuned = "" if encoder.tuned is None else f"-tuned_{encoder.tuned:08d}"
    name = f"step_{encoder.step:08d}{tuned}"
    return name if home == run.resolve() else _plain(f"{home.name}-{name}")


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or "encoder"
