"""What all evaluations share: counting correct predictions, and the labeled images that they learn from.

Shapes: Q query images, C classes.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.collectives import sum_over_ranks
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import NumericalError
from pipelines.data_errors import DataError, listed


@dataclass(frozen=True)
class Measured:
    """The outcome of one evaluation, the same on every rank."""

    metrics: dict[str, float]  # shares of the images, 0 to 1; "top1" first
    images: int  # evaluated, each once
    setting: dict[str, Any]  # the numbers that define the evaluation
    notes: tuple[str, ...] = ()  # what a reader of the number should know


def standard_error(share: float, images: int) -> float:
    """Return the binomial standard error of an accuracy over independent images. It does not cover other seeds."""
    return math.sqrt(share * (1 - share) / images)


def correct_in_top(scores: Tensor, truth: Tensor) -> Tensor:
    """Count rows with the true class among the 1 and 5 highest scores, (2,) int64; scores (Q, C), truth (Q,).

    Of equal scores the lower class comes first, as in argmax on a CPU, so that a model of constant output is not
    correct by the luck of a sort. Raises NumericalError for scores that are not finite.
    """
    if not torch.isfinite(scores).all():
        raise NumericalError(
            "the network's outputs are not finite numbers: its weights or BatchNorm statistics overflow on these images"
        )
    own = scores.gather(1, truth[:, None])
    lower = torch.arange(scores.shape[1], device=scores.device) < truth[:, None]
    ahead = ((scores > own) | ((scores == own) & lower)).sum(1)
    return torch.stack([(ahead < k).sum() for k in (1, 5)])


def accuracies(scores: Tensor, truth: Tensor, place: Place) -> dict[str, float]:
    """Return {"top1": ..., "top5": ...} over all ranks, from this rank's rows of the scores (q, C), and truth (Q,).

    Collective: the rows are those of `own_rows`, so together the ranks hold each image once.
    """
    top1, top5 = sum_over_ranks(correct_in_top(scores, truth[own_rows(place)])).tolist()
    return {"top1": top1 / len(truth), "top5": top5 / len(truth)}


def own_rows(place: Place) -> slice:
    """Return the rows that this rank scores, of rows that every rank has."""
    return slice(place.rank, None, place.world_size)


def true_labels(images: Images, place: Place) -> Tensor:
    """Return the validation images' labels, (Q,) int64 on the device. Raises DataError for an image without one."""
    labels = images.validation.labels
    unlabeled = np.flatnonzero(labels < 0)
    if len(unlabeled):
        names = listed([images.validation.name(int(i)) for i in unlabeled])
        raise DataError(
            f"{len(unlabeled)} of the {len(labels)} validation images have no label ({names}), and an accuracy counts "
            "all of them. Set data.validation to a folder that has a folder for each class"
        )
    return torch.from_numpy(labels).to(place.device)


def supports(images: Images, config: Config) -> np.ndarray:
    """Return the labeled training images that can be read, int64 ascending: one or more of each class to recognize.

    Raises ConfigErrors where the config selects no labeled images, DataError for a class without one.
    """
    if config.data.split.kind == "none":
        raise config.error(
            "data.split.kind",
            "this evaluation learns from labeled training images, and the config selects none. Set "
            "data.split.kind=all to use every training image, or the split of the runs to compare with",
        )
    chosen, classes = labeled(images), len(images.train.classes)
    if images.held_out is None:
        return chosen
    truth = images.validation.labels
    learned = np.bincount(images.train.labels[chosen], minlength=classes)
    asked = np.bincount(truth[truth >= 0], minlength=classes)
    empty = np.flatnonzero((learned == 0) & (asked > 0))
    if len(empty):
        raise DataError(
            f"{len(empty)} of {classes} classes have no labeled training image ({class_names(images, empty)}): no "
            f"classifier can predict them, and {asked[empty].sum():,} validation images would count as wrong. Labels: "
            f"{images.split}"
        )
    return chosen


def class_names(images: Images, classes: np.ndarray) -> str:
    """Return the names of the first few classes, and how many more there are."""
    return listed([images.train.classes[int(c)] for c in classes])


def labeled(images: Images) -> np.ndarray:
    """Return the labeled training images that can be read, int64 ascending."""
    chosen = images.split.indices
    return chosen[~np.isin(chosen, list(images.train.bad))]


def labels_record(images: Images, config: Config) -> dict[str, Any]:
    """Return what a result records of the labels: how they were chosen, their share of the images, how many."""
    split = config.data.split
    share, count = split.fraction, len(images.split.indices)
    share = round(count / len(images.train), 4) if share is None else share
    record = {"kind": split.kind, "fraction": share, "count": count}
    # Kind and share alone do not identify the images.
    if split.seed or split.kind in ("names", "csv"):
        record["names"] = images.split.fingerprint[:12]
    return record
