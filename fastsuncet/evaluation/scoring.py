"""From scores to an accuracy: what all evaluations count alike, and the labeled images that they may learn from.

Shapes: Q query images, C classes.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.collectives import sum_over_ranks
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import NumericalError
from pipelines.data_errors import DataError

_SHOWN = 5  # classes or images told in a message; the rest are counted


@dataclass(frozen=True)
class Measured:
    """One evaluation's outcome, the same on every rank."""

    metrics: dict[str, float]  # shares of the images, 0 to 1; "top1" first
    images: int  # evaluated, each once
    setting: dict[str, Any]  # the numbers that define it
    notes: tuple[str, ...] = field(default=())  # what a person should know of the number


def standard_error(share: float, images: int) -> float:
    """Of an accuracy over `images` independent images: binomial. It says nothing of another seed's run."""
    return math.sqrt(share * (1 - share) / images)


def correct_in_top(scores: Tensor, truth: Tensor, ks: tuple[int, ...] = (1, 5)) -> Tensor:
    """How many rows have the true class among their k highest scores, (len(ks),) int64; scores (Q, C), truth (Q,).

    Of equal scores the lower class goes first, as argmax has it on a CPU; so a model that says the same of all classes
    is not right by luck of a sort. Raises NumericalError for scores that are not finite: NaN compares with nothing.
    """
    if not torch.isfinite(scores).all():
        raise NumericalError(
            "the network's outputs are not finite numbers: its weights or BatchNorm statistics overflow on these images"
        )
    own = scores.gather(1, truth[:, None])
    lower = torch.arange(scores.shape[1], device=scores.device) < truth[:, None]
    ahead = ((scores > own) | ((scores == own) & lower)).sum(1)
    return torch.stack([(ahead < k).sum() for k in ks])


def accuracies(scores: Tensor, truth: Tensor, images: int) -> dict[str, float]:
    """{"top1": ..., "top5": ...} of `images` images, over all ranks; scores (q, C) and truth (q,) are this rank's own.

    Collective: every rank calls it, with its own rows of the images and all of them together each once.
    """
    top1, top5 = sum_over_ranks(correct_in_top(scores, truth)).tolist()
    return {"top1": top1 / images, "top5": top5 / images}


def own_rows(place: Place) -> slice:
    """The rows that this rank scores, of rows that every rank has."""
    return slice(place.rank, None, place.world_size)


def true_labels(images: Images, place: Place) -> Tensor:
    """The validation images' labels, (Q,) int64 on the device. Raises DataError where one has none."""
    labels = images.validation.labels
    unlabeled = np.flatnonzero(labels < 0)
    if len(unlabeled):
        names = ", ".join(images.validation.name(int(i)) for i in unlabeled[:_SHOWN])
        raise DataError(
            f"{len(unlabeled)} of the {len(labels)} validation images have no label ({names}): an accuracy counts all "
            "of them. data.validation names a folder with a folder for each class"
        )
    return torch.from_numpy(labels).to(place.device)


def supports(images: Images, config: Config) -> np.ndarray:
    """The labeled training images that can be read, int64 ascending, at least one of every validation image's class.

    Raises ConfigErrors where the config names no labeled image, DataError for a class without one.
    """
    if config.data.split.kind == "none":
        raise config.error(
            "data.split.kind",
            "this evaluation learns from labeled training images, and none are named here. For example "
            "data.split.kind=all for every training image, or the split that other runs are compared on",
        )
    chosen = images.split.indices
    chosen = chosen[~np.isin(chosen, list(images.train.bad))]
    labeled = np.bincount(images.train.labels[chosen], minlength=len(images.train.classes))
    asked = np.bincount(
        images.validation.labels[images.validation.labels >= 0], minlength=len(images.train.classes)
    )
    empty = np.flatnonzero((labeled == 0) & (asked > 0))
    if len(empty):
        names = ", ".join(images.train.classes[int(c)] for c in empty[:_SHOWN])
        more = f" and {len(empty) - _SHOWN} more" if len(empty) > _SHOWN else ""
        raise DataError(
            f"{len(empty)} of {len(labeled)} classes have no labeled training image ({names}{more}): no classifier can "
            f"name them, and {asked[empty].sum():,} validation images would count as wrong. The labels: {images.split}"
        )
    return chosen


def labels_record(images: Images, config: Config) -> dict[str, Any]:
    """What a result says of the labels: how they were chosen, which share of the training images, how many."""
    split = config.data.split
    share = (
        round(len(images.split.indices) / len(images.train), 4) if split.fraction is None else split.fraction
    )
    record = {"kind": split.kind, "fraction": share, "count": len(images.split.indices)}
    if split.seed or split.kind in ("names", "csv"):  # kind and share alone do not say which images
        record["names"] = images.split.fingerprint[:12]
    return record
