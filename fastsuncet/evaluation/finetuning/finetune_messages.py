"""The messages of `fastsuncet finetune`: what it is about to do, and the accuracy it found."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastsuncet.evaluation.finetuning.job import FineTuningJob, labeled
from fastsuncet.evaluation.scoring import standard_error
from fastsuncet.models.flops import classifier_macs, petaflops
from fastsuncet.training.summary import device_name

SHOWN = 5  # classes that a message names; the rest are counted


def heading(job: FineTuningJob, *, brief: bool) -> list[str]:
    """Return lines of "name    what". `brief`: only what differs between the checkpoints of one command."""
    s, encoder, place = job.settings, job.encoder, job.place
    known = [
        None if encoder.step is None else f"step {encoder.step:,}, ",
        None if encoder.epoch is None else f"epoch {encoder.epoch:.4g}, ",
        None if encoder.method is None else f"{encoder.method}; ",
    ]
    origin = "".join(part for part in known if part)
    lines = [
        ("finetune", f"{job.folder}"),
        ("encoder", f"{encoder.source} ({origin}{encoder.name}, {encoder.stem} stem)"),
    ]
    if brief:
        return [f"{name:<9}{text}" for name, text in lines]
    count, parts = len(labeled(job.images)), place.world_size * s.accumulate
    ranks = "1 process" if place.world_size == 1 else f"{place.world_size} processes"
    passes = "" if s.accumulate == 1 else f", in {s.accumulate} passes"
    left_over = count % s.batch
    over = f" (each leaves out {left_over:,} images, drawn anew)" if left_over else ""
    decay = f"weight decay {s.weight_decay:g}" if s.weight_decay else "no weight decay"
    momentum = f"{'Nesterov ' if s.nesterov else ''}momentum {s.momentum:g}"
    macs = classifier_macs(encoder.name, encoder.stem, s.size, encoder.width, s.num_classes)
    epochs = job.config.finetune.epochs
    cost = petaflops(macs, s.steps * s.batch)
    lines += [
        ("labels", f"{job.images.split}"),
        ("batch", f"{s.batch:,} images on {ranks}{passes}; BatchNorm over {s.batch // parts:,} of them"),
        ("steps", f"{count // s.batch:,} an epoch{over}, {s.steps:,} in {epochs} epochs"),
        ("SGD", f"lr {s.lr:g} to 0 along half a cosine, {momentum}, {decay}"),
        ("compute", f"{cost:.4g} petaFLOPs at 6 x {macs / 1e9:.4g} GMAC an image"),
        ("device", f"{device_name(place)}, {s.precision}, torch {torch.__version__}"),
    ]
    return [*(f"{name:<9}{text}" for name, text in lines), *unlabeled_classes(job)]


def unlabeled_classes(job: FineTuningJob) -> list[str]:
    """Return a line that names the classes without a labeled image, if there are any."""
    classes = job.images.train.classes
    found = np.bincount(job.images.train.labels[labeled(job.images)], minlength=len(classes))
    empty = np.flatnonzero(found == 0)
    if not len(empty):
        return []
    names = ", ".join(classes[int(c)] for c in empty[:SHOWN])
    more = f" and {len(empty) - SHOWN} more" if len(empty) > SHOWN else ""
    missed = int(np.isin(job.validation.labels, empty).sum())
    return [
        f"{len(empty)} of {len(classes)} classes have no labeled image ({names}{more}): their {missed:,} validation "
        "images will count as wrong"
    ]


def accuracy_line(record: dict[str, Any]) -> str:
    """Return a record's accuracy as one line."""
    metrics, images, tuned = record["metrics"], record["images"], record["finetuned"]
    error = standard_error(metrics["top1"], images)
    parts = [f"{100 * metrics['top1']:.2f} % of {images:,} images, standard error {100 * error:.2f}"]
    if "top5" in metrics:
        parts.append(f"top 5 {100 * metrics['top5']:.2f} %")
    parts.append(f"on the training crops {100 * tuned['train_accuracy']:.1f} %")
    return f"top 1    {'; '.join(parts)}"


def accuracy_table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of several checkpoints, a line each."""
    lines = [f"{'step':>10} {'epoch':>8} {'top 1':>8} {'top 5':>8}"]
    for record in records:
        encoder, metrics = record["encoder"], record["metrics"]
        epoch = "" if encoder["epoch"] is None else f"{encoder['epoch']:.4g}"
        top5 = f"{100 * metrics['top5']:.2f}" if "top5" in metrics else ""
        lines.append(f"{encoder['step'] or 0:>10,} {epoch:>8} {100 * metrics['top1']:>8.2f} {top5:>8}")
    return lines
