"""One fine-tuning of `fastsuncet finetune`: settings, folder, messages, and its accuracy, newly trained or read.

Without validation images it is measured by folds of the labels: RUN/finetune/TAG/folds/1 to 5 hold a network each.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsuncet.checkpoint.run_folder import exclusive_run_folder
from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.data.learned_labels import write_tuned_labels
from fastsuncet.distributed.place import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.evaluation.calibration import FOLDS, Calibration, calibrate, out_of_fold
from fastsuncet.evaluation.confusion import write_with_picture, written
from fastsuncet.evaluation.encoder import Encoder
from fastsuncet.evaluation.finetuning.fit import FineTuning, fit
from fastsuncet.evaluation.finetuning.frozen import measure_frozen
from fastsuncet.evaluation.finetuning.record import (
    config_values,
    deciding,
    fit_identity,
    labels_digest,
    read_record,
    resolve_batch,
    sizes,
    with_sizes,
    write_record,
)
from fastsuncet.evaluation.scoring import (
    label_notes,
    labeled,
    measured,
    require_split,
    require_two_labels,
    result_record,
    standard_error,
    true_labels,
    wilson_interval,
)
from fastsuncet.metrics.results import send_results
from fastsuncet.models.flops import classifier_macs, petaflops
from fastsuncet.training.summary import device_name
from fastsuncet.training.trainer import Trainer
from pipelines.data_errors import DataError
from pipelines.output import counted

RESULT = "result.json"  # in the folder of a finished fine-tuning
LEAST_UPDATES = 300  # of a fine-tuning that starts from the linear classifier: few labels make short epochs
# Accuracies of the frozen encoder in a record, and their names in its line.
FROZEN = {"linear": "linear", "knn": "k-NN", "knn_random_crops": "k-NN of random crops"}
LEARNED = 0.9  # of the training crops: with fewer right, the training has not fitted the labels


def resolve_sizes(config: Config, images: Images, place: Place) -> Config:
    """Return the config with batch size and rate of its fine-tuning on `images` as numbers.

    Raises ConfigErrors for labels that are not there and a batch that does not fit them, DataError where a fraction of
    the images selected none.
    """
    require_split(config)
    chosen, f = labeled(images), config.finetune
    if not len(chosen):
        raise DataError(f"there is no labeled image to fine-tune on: {images.split}")
    if images.held_out is None:
        require_two_labels(images)
        least, parts = len(chosen) - -(-len(chosen) // FOLDS), place.world_size * f.accumulate
        if least < parts:
            raise DataError(
                f"{least} labeled images, as many as a fold leaves, are too few for {parts} processes and passes: "
                "label more, or set data.validation"
            )
    batch = resolve_batch(config, "finetune", len(chosen), "", place.world_size, f.accumulate)
    return with_sizes(config, batch_size=batch, lr=0.05 * batch / 256 if f.lr is None else f.lr)


def updates(config: Config, count: int) -> int:
    """Return the updates of a fine-tuning on `count` images, with the config of `resolve_sizes`."""
    f = config.finetune
    steps = f.epochs * (count // sizes(config)[0])
    return max(steps, LEAST_UPDATES) if f.head == "linear" else steps


@dataclass(frozen=True, eq=False)
class FineTuningJob:
    """An encoder to fine-tune, and with which settings."""

    config: Config  # of `resolve_sizes`
    asked: dict[str, Any]  # `asked` of the config as it was before: a sweep knows the result by it
    place: Place
    images: Images
    encoder: Encoder
    several: bool  # checkpoints are fine-tuned, so finetune.write_tag alone does not name a folder
    learned: int = 0  # where folds of the labels judge: those that the encoder has learned from

    @property
    def folder(self) -> Path:
        """RUN/finetune/TAG: the names of labels and checkpoint, or finetune.write_tag."""
        named = self.config.finetune.write_tag
        parts = [named or labels_tag(self.config)]
        if named is None or self.several:
            parts.append(encoder_tag(self.encoder, self.config.run_folder))
        return self.config.run_folder / "finetune" / "-".join(parts)

    def run(self, signals: SignalFlag, *, brief: bool) -> dict[str, Any]:
        """Train and measure, or read what was; print it, write and send its result; return its record. Collective.

        A finished network is evaluated on other validation images without another update. `brief`: the heading is what
        differs between the checkpoints of one command. Raises CheckpointError where the folder was begun with other
        settings, and what `fit` raises.
        """
        images, held_out, config = self.images, self.images.held_out, self.config
        judged = "folds" if held_out is None else held_out.fingerprint()
        identity = fit_identity(config, self.encoder, images.train, labeled(images))
        with exclusive_run_folder(self.folder, self.place):
            kept = read_record(self.folder / RESULT, identity, self.place)
            done = kept is not None and kept.get("validation") == judged
            self.place.say(*heading(self, brief=brief or done))
            if kept is None or not done:
                if self.place.first:
                    start = self.encoder.lies_at, self.encoder.supervised
                    write_tuned_labels(self.folder, images, labeled(images), *start)
                logits, trainer, frozen = self._fit(images, config, self.folder, signals)
                if held_out is None:
                    logits, truth, frozen = self._fit_folds(signals)
                else:
                    truth = true_labels(images, self.place)
                kept = {"validation": judged, "record": self._record(logits, truth, trainer, frozen)}
                write_record(self.folder / RESULT, kept, identity, self.place)
            # As they are named now: with those of a run that was moved since, it would be a second result.
            run = config.run_folder
            now = {"encoder": self.encoder.record(), "run": run.name, "asked": self.asked}
            record = kept["record"] | now
            accuracy, *more = accuracy_lines(record)
            self.place.say(accuracy + " (done before)" * done, *more)
            if self.place.first:
                result = write_with_picture(run, record)
                self.place.say(*written(result))
                send_results(config, [result])
        return record

    def _fit(
        self, images: Images, config: Config, folder: Path, signals: SignalFlag
    ) -> tuple[Tensor, Trainer, dict[str, float]]:
        """Return (logits of the validation images, the trainer, accuracies of the frozen encoder)."""
        chosen, held_out, frozen = labeled(images), images.held_out, None
        steps = updates(config, len(chosen))
        if config.finetune.head == "linear":
            frozen = measure_frozen(self.encoder, images, config, self.place, steps)
        where, options = (config, self.place, folder), {"steps": steps, "frozen": frozen}
        task = FineTuning(self.encoder, images.train, chosen, *where, **options)
        evaluated = np.arange(0 if held_out is None else len(held_out))
        logits, trainer = fit(task, held_out, evaluated, signals)
        return logits, trainer, {} if frozen is None else frozen.accuracies

    def _fit_folds(self, signals: SignalFlag) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Return logits (n, C) and classes (n,) of the labeled images that can be left out, by networks without them.

        And the mean accuracies of the frozen encoder. A fold that is trained is not trained again, only evaluated.
        """
        images, chosen, found = self.images, labeled(self.images), []
        parts = self.place.world_size * self.config.finetune.accumulate
        batch, _ = sizes(self.config)

        def classify(learned: Tensor, left_out: Tensor) -> Tensor:
            ours, theirs = (chosen[mask.cpu().numpy()] for mask in (learned, left_out))
            self.place.say(
                f"fold     {len(found) + 1} of {FOLDS}: {len(ours):,} images to learn from, {len(theirs):,} left out"
            )
            counts = np.bincount(images.train.labels[ours], minlength=len(images.train.classes))
            split = replace(images.split, indices=ours, per_class=counts)
            fold = Images(images.train, split, images.train.take(theirs))
            config = with_sizes(self.config, batch_size=min(batch, max(1, len(ours) // parts) * parts))
            folder = self.folder / "folds" / f"{len(found) + 1}"
            logits, _, accuracies = self._fit(fold, config, folder, signals)
            found.append((len(theirs), accuracies))
            return logits

        labels = torch.from_numpy(images.train.labels[chosen]).to(self.place.device)
        numbers, logits = out_of_fold(labels, classify)
        means = {key: sum(n * each[key] for n, each in found) / len(numbers) for key in found[0][1]}
        return logits, labels[numbers], means

    def _record(
        self, logits: Tensor, truth: Tensor, trainer: Trainer, frozen: dict[str, float]
    ) -> dict[str, Any]:
        f, images = self.config.finetune, self.images
        values = config_values(self.config, deciding(self.config))
        setting = {key.split(".")[-1]: value for key, value in values.items()}
        setting["batchnorm_images"] = sizes(self.config)[0] // (self.place.world_size * f.accumulate)
        if images.held_out is None:
            setting["folds"] = FOLDS
        outcome = replace(measured(logits, truth, setting), learned=self.learned)
        return {
            **result_record("finetune", outcome, self.encoder, images, self.config),
            "finetuned": {
                "folder": str(self.folder),
                "labels": labels_digest(images.train, labeled(images)),
                "train_loss": trainer.means[0],
                "train_accuracy": trainer.means[1],
                "ledger": trainer.ledger.record(),
            },
            **({"frozen": frozen} if frozen else {}),
            "calibration": calibrate(logits, truth)._asdict(),
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
    """Return what is fine-tuned and how; `brief`: only what."""
    f, encoder, place, size = job.config.finetune, job.encoder, job.place, job.config.data.augmentation.size
    step = "" if encoder.step is None else f"step {encoder.step:,}"
    epoch = "" if encoder.epoch is None else f"epoch {encoder.epoch:.4g}"
    about = ", ".join(filter(None, (step, epoch, encoder.method, encoder.name, f"{encoder.stem} stem")))
    lines = [f"finetune {job.folder}", f"encoder  {encoder.source} ({about})"]
    if brief:
        return lines
    count, (batch, lr) = len(labeled(job.images)), sizes(job.config)
    steps, an_epoch = updates(job.config, count), count // batch
    sharing = f"{counted(place.world_size, 'process')}, {counted(f.accumulate, 'pass')} each"
    normed = batch // (place.world_size * f.accumulate)
    momentum = f"{'Nesterov ' if f.nesterov else ''}momentum {f.momentum:g}"
    macs = classifier_macs(encoder.name, encoder.stem, size, encoder.width, len(job.images.train.classes))
    lines += [
        f"labels   {job.images.split}",
        f"batch    {batch:,} images on {sharing}: {normed:,} at a time, as many as a BatchNorm sees",
        f"steps    {steps:,} in {steps / an_epoch:.4g} epochs of {an_epoch * batch:,} images, drawn anew for each",
    ]
    if f.head == "linear":
        what = f"the linear classifier of the frozen features; at least {LEAST_UPDATES} steps"
        lines.append(f"start    {what}; the result is the mean of first and last weights")
    lines += [
        f"SGD      lr {lr:g} to 0 along half a cosine, {momentum}, weight decay {f.weight_decay:g}",
        f"compute  {petaflops(macs * steps * batch):.4g} petaFLOPs at 6 x {macs / 1e9:.4g} GMAC an image",
    ]
    if job.images.held_out is None:
        what = (
            f"without validation images {FOLDS} more networks are trained, each without a fifth of the labels"
        )
        lines.append(f"folds    {what}. It takes about {FOLDS + 1} times as long as the network alone")
    device = f"{device_name(job.config, place)}, {job.config.meta.precision}, torch {torch.__version__}"
    notes = [f"note     {note}" for note in label_notes(job.images)]
    return [*lines, f"device   {device}", *notes]


def accuracy_lines(record: dict[str, Any]) -> list[str]:
    """Return a record's accuracy, those of the frozen encoder on the same images, and what to change if it is poor."""
    metrics, images, tuned = record["metrics"], record["images"], record["finetuned"]
    error = f"images, standard error {100 * standard_error(metrics['top1'], images):.2f}"
    if "folds" in record["setting"]:
        low, high = (100 * x for x in wilson_interval(metrics["top1"] * images, images))
        error = f"labeled images, each left out once, 95 % interval {low:.1f} to {high:.1f}"
    parts = [f"{100 * metrics['top1']:.2f} % of {images:,} {error}"]
    if "top5" in metrics:
        parts.append(f"top 5 {100 * metrics['top5']:.2f} %")
    parts.append(f"on the training crops {100 * tuned['train_accuracy']:.1f} %")
    calibration = Calibration(**record["calibration"]).said_of(images)
    lines = [f"top 1    {'; '.join(parts)}", f"calibration  {calibration}"]
    if count := record.get("learned"):
        lines.append(
            f"note     the encoder has learned from {count:,} of these labels before: the accuracy on other images is "
            "lower, perhaps by far. Hold out labels that no run learns from (data.validation) to know it"
        )
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
