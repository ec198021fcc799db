"""What a fine-tuning says: what it is about to do, in a run's columns, and the number it found."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastsuncet.evaluation.finetuning.job import Job, labeled
from fastsuncet.evaluation.scoring import standard_error
from fastsuncet.models.flops import classifier_macs, petaflops
from fastsuncet.training.summary import device_name

SHOWN = 5  # classes told by name; the rest are counted


def heading(job: Job, *, brief: bool) -> list[str]:
    """Lines of "name    what". `brief`: only what differs between the checkpoints of one command."""
    s, encoder, place, config = job.setting, job.encoder, job.place, job.config
    stands = "" if encoder.step is None else f"step {encoder.step:,}, "
    epoch = "" if encoder.epoch is None else f"epoch {encoder.epoch:.4g}, "
    method = "" if encoder.method is None else f"{encoder.method}; "
    lines = [
        ("finetune", f"{job.folder}"),
        ("encoder", f"{encoder.source} ({stands}{epoch}{method}{encoder.name}, {encoder.stem} stem)"),
    ]
    if not brief:
        count, parts = len(labeled(job.images)), place.world_size * s.accumulate
        ranks = "1 process" if place.world_size == 1 else f"{place.world_size} processes"
        passes = "" if s.accumulate == 1 else f", in {s.accumulate} passes"
        over = f" (which leaves {count % s.batch:,} images out, drawn anew)" if count % s.batch else ""
        decay = f"weight decay {s.weight_decay:g}" if s.weight_decay else "no weight decay"
        macs = classifier_macs(encoder.name, encoder.stem, s.size, encoder.width, s.num_classes)
        lines += [
            ("labels", f"{job.images.split}"),
            ("batch", f"{s.batch:,} images on {ranks}{passes}; BatchNorm over {s.batch // parts:,} of them"),
            ("steps", f"{count // s.batch:,} an epoch{over}, {s.steps:,} in {config.finetune.epochs} epochs"),
            (
                "SGD",
                f"lr {s.lr:g} to 0 along half a cosine, {'Nesterov ' if s.nesterov else ''}momentum {s.momentum:g}, "
                f"{decay}",
            ),
            (
                "compute",
                f"{petaflops(macs, s.steps * s.batch):.4g} petaFLOPs at 6 x {macs / 1e9:.4g} GMAC an image",
            ),
            ("device", f"{device_name(place)}, {s.precision}, torch {torch.__version__}"),
        ]
    told = [f"{name:<9}{text}" for name, text in lines]
    return told if brief else [*told, *notes(job)]


def notes(job: Job) -> list[str]:
    """What a person should know of the labels: classes without any, images that never fill a batch."""
    classes = job.images.train.classes
    found = np.bincount(job.images.train.labels[labeled(job.images)], minlength=len(classes))
    empty = np.flatnonzero(found == 0)
    if not len(empty):
        return []
    names = ", ".join(classes[int(c)] for c in empty[:SHOWN])
    more = f" and {len(empty) - SHOWN} more" if len(empty) > SHOWN else ""
    missed = int(np.isin(job.images.validation.labels, empty).sum())
    return [
        f"{len(empty)} of {len(classes)} classes have no labeled image ({names}{more}): their {missed:,} validation "
        "images will count as wrong"
    ]


def number(record: dict[str, Any]) -> str:
    """A record's accuracy as a person would quote it."""
    metrics, images, tuned = record["metrics"], record["images"], record["finetuned"]
    error = standard_error(metrics["top1"], images)
    parts = [f"{100 * metrics['top1']:.2f} % of {images:,} images, standard error {100 * error:.2f}"]
    if "top5" in metrics:
        parts.append(f"top 5 {100 * metrics['top5']:.2f} %")
    parts.append(f"on the training crops {100 * tuned['train_accuracy']:.1f} %")
    return f"top 1    {'; '.join(parts)}"


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Several checkpoints side by side, a line each."""
    lines = [f"{'step':>10} {'epoch':>8} {'top 1':>8} {'top 5':>8}"]
    for record in records:
        encoder, metrics = record["encoder"], record["metrics"]
        epoch = "" if encoder["epoch"] is None else f"{encoder['epoch']:.4g}"
        top5 = f"{100 * metrics['top5']:.2f}" if "top5" in metrics else ""
        lines.append(f"{encoder['step'] or 0:>10,} {epoch:>8} {100 * metrics['top1']:>8.2f} {top5:>8}")
    return lines
