"""One fine-tuning of `fastsuncet finetune`: settings, folder, messages, and its accuracy, newly trained or read."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsuncet.checkpoint.run_folder import exclusive_run_folder
from fastsuncet.config import Config
from fastsuncet.config.rules import FILES
from fastsuncet.console import Say
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.launch import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.evaluation.encoder import Encoder
from fastsuncet.evaluation.features import view_size
from fastsuncet.evaluation.frozen import Frozen, measure_frozen
from fastsuncet.evaluation.scoring import (
    accuracies,
    class_names,
    labeled,
    labels_record,
    own_rows,
    standard_error,
)
from fastsuncet.evaluation.supervised.fine_tuning import FineTuning, FitSettings, fit, resolve_batch
from fastsuncet.evaluation.supervised.identity import config_values, fit_identity, record_once
from fastsuncet.metrics.results import write_result
from fastsuncet.models.flops import classifier_macs, petaflops
from fastsuncet.training.summary import device_name
from fastsuncet.training.trainer import Trainer
from fastsuncet.versions import versions
from pipelines.data_errors import DataError

RESULT = "result.json"  # in the folder of a finished fine-tuning
LEAST_UPDATES = 300  # of a fine-tuning that starts from the linear classifier: few labels make short epochs
# Accuracies of the frozen encoder in a record, and their names in its line.
FROZEN = {"linear": "linear", "knn": "k-NN", "knn_random_crops": "k-NN of random crops"}
LEARNED = 0.9  # of the training crops: with fewer right, the training has not fitted the labels
SAVES = 20  # per fine-tuning, at most: a kill then costs a twentieth of it
REMEDY = "Set these back, or keep both: finetune.write_tag=ANOTHER_NAME. To begin again, remove that folder."
# What decides the weights. batch_size and lr are resolved: they can depend on the number of processes.
KEYS = (
    *(
        "finetune.head",
        "finetune.epochs",
        "finetune.batch_size",
        "finetune.lr",
        "finetune.momentum",
        "finetune.nesterov",
    ),
    *("finetune.weight_decay", "finetune.accumulate", "finetune.crop_scale"),
    *("data.augmentation.size", "data.augmentation.flip", "data.augmentation.crop_ratio"),
    *("data.augmentation.mean", "data.augmentation.std", "meta.seed", "meta.precision"),
)


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
    steps = max(steps, LEAST_UPDATES) if f.head == "linear" else steps
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
        num_classes=len(images.train.classes),
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
    several: bool  # checkpoints are fine-tuned, so finetune.write_tag alone does not name a folder

    @property
    def folder(self) -> Path:
        """RUN/finetune/TAG: the names of labels and checkpoint, or finetune.write_tag."""
        named = self.config.finetune.write_tag
        parts = [named or labels_tag(self.config)]
        if named is None or self.several:
            parts.append(encoder_tag(self.encoder, self.config.run_folder))
        return self.config.run_folder / "finetune" / "-".join(parts)

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
        images, validation = self.images, self.images.validation
        fingerprint = validation.fingerprint()
        train = (images.train, labeled(images))
        identity = fit_identity(self.values(), self.encoder, *train, self.config)

        def make() -> dict[str, Any]:
            for line in heading:
                say(line)
            where, frozen = (self.place, self.folder, self.config), None
            if self.config.finetune.head == "linear":
                network = self.encoder.module.to(self.place.device)
                frozen = measure_frozen(network, images, truth, self.config, self.place)
            task = FineTuning(self.encoder, *train, self.settings, *where, identity, REMEDY, frozen)
            logits, trainer = fit(task, validation, np.arange(len(truth)), signals)
            return {"validation": fingerprint, "record": self._record(logits, truth, trainer, frozen)}

        def usable(kept: dict[str, Any]) -> bool:
            return "record" in kept and kept.get("validation") == fingerprint

        with exclusive_run_folder(self.folder, self.place):
            where = (self.folder / RESULT, identity, self.place)
            kept, new = record_once(*where, make, REMEDY, usable)
            for line in () if new else heading[:2]:
                say(line)
            # As they are named now: with those of a run that was moved since, it would be a second result.
            record = kept["record"] | {"encoder": self.encoder.record(), "run": self.config.run_folder.name}
            written = write_result(self.config.run_folder, record) if self.place.first else None
        return record, written, new

    def _record(
        self, logits: Tensor, truth: Tensor, trainer: Trainer, frozen: Frozen | None
    ) -> dict[str, Any]:
        s = self.settings
        metrics = accuracies(logits[own_rows(self.place)], truth, self.place)
        if s.num_classes <= 5:
            del metrics["top5"]  # always 1
        setting = {key.split(".")[-1]: value for key, value in self.values().items()}
        setting["batchnorm_images"] = s.batch // (self.place.world_size * s.accumulate)
        if self.config.data.kind in FILES:
            setting["validation"] = self.images.validation.fingerprint()[:12]  # two folders are two results
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
            **({} if frozen is None else {"frozen": {key: getattr(frozen, key) for key in FROZEN}}),
            "run": self.config.run_folder.name,
            "versions": versions(),
        }


def labels_tag(config: Config) -> str:
    """Return the split as part of a folder's name: bernoulli0.1, stratified100-seed1, 10percent, all."""
    split = config.data.split
    if split.kind in ("bernoulli", "stratified"):
        amount = f"{split.fraction:g}" if split.kind == "bernoulli" else split.images
        return f"{split.kind}{amount}" + (f"-seed{split.seed}" if split.seed else "")
    return _file_name(split.kind if split.file is None else Path(split.file).stem)


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


def heading(job: FineTuningJob, *, brief: bool) -> list[str]:
    """Return what is fine-tuned and how. `brief`: only what differs between the checkpoints of one command."""
    s, encoder, place = job.settings, job.encoder, job.place
    origin = "" if encoder.step is None else f"step {encoder.step:,}, "
    origin += "" if encoder.epoch is None else f"epoch {encoder.epoch:.4g}, "
    origin += "" if encoder.method is None else f"{encoder.method}; "
    network = f"{encoder.source} ({origin}{encoder.name}, {encoder.stem} stem)"
    lines = [f"finetune {job.folder}", f"encoder  {network}"]
    if brief:
        return lines
    count, parts = len(labeled(job.images)), place.world_size * s.accumulate
    ranks = "1 process" if place.world_size == 1 else f"{place.world_size} processes"
    passes = "" if s.accumulate == 1 else f", in {s.accumulate} passes"
    left_over = count % s.batch
    over = f" (each leaves out {left_over:,} images, drawn anew)" if left_over else ""
    decay = f"weight decay {s.weight_decay:g}" if s.weight_decay else "no weight decay"
    momentum = f"{'Nesterov ' if s.nesterov else ''}momentum {s.momentum:g}"
    macs = classifier_macs(encoder.name, encoder.stem, s.size, encoder.width, s.num_classes)
    epochs = s.steps / (count // s.batch)
    start = "the linear classifier of the frozen features; the result is the mean of first and last weights"
    cost = petaflops(macs, s.steps * s.batch)
    return [
        *lines,
        f"labels   {job.images.split}",
        f"batch    {s.batch:,} images on {ranks}{passes}; BatchNorm over {s.batch // parts:,} of them",
        f"steps    {count // s.batch:,} an epoch{over}, {s.steps:,} in {epochs:.4g} epochs",
        *([f"start    {start}"] if job.config.finetune.head == "linear" else []),
        f"SGD      lr {s.lr:g} to 0 along half a cosine, {momentum}, {decay}",
        f"compute  {cost:.4g} petaFLOPs at 6 x {macs / 1e9:.4g} GMAC an image",
        f"device   {device_name(place)}, {job.config.meta.precision}, torch {torch.__version__}",
        *unlabeled_classes(job),
    ]


def unlabeled_classes(job: FineTuningJob) -> list[str]:
    """Return a line that names the classes without a labeled image, if there are any."""
    classes = job.images.train.classes
    found = np.bincount(job.images.train.labels[labeled(job.images)], minlength=len(classes))
    empty = np.flatnonzero(found == 0)
    if not len(empty):
        return []
    names = class_names(job.images, empty)
    missed = int(np.isin(job.images.validation.labels, empty).sum())
    return [
        f"{len(empty)} of {len(classes)} classes have no labeled image ({names}): their {missed:,} validation "
        "images will count as wrong"
    ]


def accuracy_lines(record: dict[str, Any]) -> list[str]:
    """Return a record's accuracy, those of the frozen encoder on the same images, and what to change if it is poor."""
    metrics, images, tuned = record["metrics"], record["images"], record["finetuned"]
    error = standard_error(metrics["top1"], images)
    parts = [f"{100 * metrics['top1']:.2f} % of {images:,} images, standard error {100 * error:.2f}"]
    if "top5" in metrics:
        parts.append(f"top 5 {100 * metrics['top5']:.2f} %")
    parts.append(f"on the training crops {100 * tuned['train_accuracy']:.1f} %")
    lines = [f"top 1    {'; '.join(parts)}"]
    if (frozen := record.get("frozen")) is None:
        return lines
    others = ", ".join(f"{name} {100 * frozen[key]:.2f} %" for key, name in FROZEN.items())
    lines.append(f"frozen   {others}, on the same images")
    if metrics["top1"] < frozen["linear"]:
        lines.append(
            "note     fine-tuning lost against the linear classifier, which `fastsuncet predict` takes. A lower "
            "finetune.lr or a larger lower bound of finetune.crop_scale keeps more of it"
        )
    if tuned["train_accuracy"] < LEARNED:
        lines.append(
            f"note     less than {100 * LEARNED:.0f} % of the training crops are right at the end: raise "
            "finetune.epochs, finetune.lr, or the lower bound of finetune.crop_scale"
        )
    return lines


def accuracy_table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of several checkpoints, a line each."""
    lines = [f"{'step':>10} {'epoch':>8} {'top 1':>8} {'top 5':>8}"]
    for record in records:
        encoder, metrics = record["encoder"], record["metrics"]
        epoch = "" if encoder["epoch"] is None else f"{encoder['epoch']:.4g}"
        top5 = f"{100 * metrics['top5']:.2f}" if "top5" in metrics else ""
        lines.append(f"{encoder['step'] or 0:>10,} {epoch:>8} {100 * metrics['top1']:>8.2f} {top5:>8}")
    return lines
