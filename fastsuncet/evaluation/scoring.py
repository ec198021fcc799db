"""What a score says, and which labels count: what all evaluations share.

Shapes: Q images to classify, C classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsuncet.config import Config
from fastsuncet.config.rules import FILES
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.place import Place
from fastsuncet.errors import NumericalError
from fastsuncet.evaluation.encoder import Encoder
from fastsuncet.metrics.results import asked
from fastsuncet.versions import versions
from pipelines.data_errors import DataError
from pipelines.output import first_five

LEARNED = "the network has learned from these labels: the accuracy on other images is lower, perhaps by far"
FEW = 5  # with fewer labels of a class, some folds of a cross-validation have none of it


@dataclass(frozen=True)
class Measured:
    """The outcome of one evaluation, the same on every rank."""

    metrics: dict[str, float]  # shares of the images, 0 to 1; "top1" first
    images: int  # evaluated
    setting: dict[str, Any]  # the numbers that define the evaluation
    notes: tuple[str, ...]  # what a reader of the number should know
    predicted: Tensor  # int64, the class of each image; every repeat of a cross-validation counts
    truth: Tensor  # int64, the true class of the same
    learned: int = 0  # labels, where it was measured on those that the network has learned from


def measured(
    scores: Tensor,  # (Q, C)
    truth: Tensor,  # (Q,)
    setting: dict[str, Any],
    notes: tuple[str, ...] = (),
) -> Measured:
    """Return the top-1 accuracy of scores, and the top-5 accuracy if it says anything, with more than 5 classes.

    Of equal scores the lower class comes first, so that a model of constant output is not correct by the luck of a
    sort. Raises NumericalError for scores that are not finite.
    """
    require_finite(scores)
    numbers, own = torch.arange(scores.shape[1], device=scores.device), scores.gather(1, truth[:, None])
    ahead = ((scores > own) | ((scores == own) & (numbers < truth[:, None]))).sum(1)
    # argmax on a GPU takes any of equal scores.
    predicted = torch.where(scores == scores.amax(1, keepdim=True), numbers, scores.shape[1]).amin(1)
    metrics = {"top1": share_right(predicted, truth)}
    if scores.shape[1] > 5:
        metrics["top5"] = int((ahead < 5).sum()) / len(truth)
    return Measured(metrics, len(truth), setting, notes, predicted, truth)


def require_finite(*outputs: Tensor) -> None:
    """Raise NumericalError unless all values of `outputs` are finite numbers."""
    if not all(torch.isfinite(rows).all() for rows in outputs):
        raise NumericalError(
            "the network's outputs are not finite numbers: its weights or BatchNorm statistics overflow on these images"
        )


def share_right(predicted: Tensor, truth: Tensor) -> float:
    """Return the share of equal entries, an accuracy."""
    return int((predicted == truth).sum()) / len(truth)


def per_class(predicted: Tensor, truth: Tensor, classes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what a result records of each class that has images: their number, accuracy, and predicted classes."""
    both = torch.stack([truth, predicted]).cpu().numpy()
    pairs, counts = np.unique(both, axis=1, return_counts=True)  # sorted
    found: dict[str, dict[str, Any]] = {}
    for true, other, count in zip(*pairs.tolist(), counts.tolist()):
        of = found.setdefault(classes[int(true)], {"images": 0, "accuracy": 0.0, "predicted": {}})
        of["images"] += count
        of["predicted"][classes[other]] = count
    for name, of in found.items():
        of["accuracy"] = of["predicted"].get(name, 0) / of["images"]
    return found


def standard_error(share: float, images: int) -> float:
    """Return the binomial standard error of an accuracy over independent images. It does not cover other seeds."""
    return math.sqrt(share * (1 - share) / images)


def wilson_interval(right: float, images: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of independent images (Wilson 1927): useful from few images on."""
    z, share = 1.96, right / images
    center, scale = share + z * z / (2 * images), 1 + z * z / images
    half = z * math.sqrt(share * (1 - share) / images + z * z / (4 * images * images))
    return max(0.0, (center - half) / scale), min(1.0, (center + half) / scale)


def label_notes(images: Images) -> list[str]:
    """Return a sentence on the classes that have no labeled image, or without validation images only few; or none."""
    counts, classes = label_counts(images), images.train.classes
    if images.held_out is None:
        few = np.flatnonzero((counts > 0) & (counts < FEW))
        names = first_five([classes[int(i)] for i in few])
        verb, each = ("class has", "it") if len(few) == 1 else ("classes have", "each")
        note = f"{len(few)} {verb} fewer than {FEW} labels ({names}): this tells nearly nothing of {each}"
        note += ", and a single label is not judged" if (counts[few] == 1).any() else ""
        return [note] if len(few) else []
    truth = images.held_out.labels
    asked = np.bincount(truth[truth >= 0], minlength=len(classes))
    empty = np.flatnonzero((counts == 0) & (asked > 0))
    names = first_five([classes[int(i)] for i in empty])
    note = f"{len(empty)} of {len(classes)} classes have no labeled image ({names}): no classifier can predict them"
    note += f", and their {asked[empty].sum():,} validation images count as wrong"
    return [note] if len(empty) else []


def true_labels(images: Images, place: Place) -> Tensor:
    """Return the validation images' labels, (Q,) int64 on the device. Raises DataError for an image without one."""
    labels = images.validation.labels
    unlabeled = np.flatnonzero(labels < 0)
    if len(unlabeled):
        names = first_five([images.validation.name(int(i)) for i in unlabeled])
        raise DataError(
            f"{len(unlabeled)} of the {len(labels)} validation images have no label ({names}), and an accuracy counts "
            "all of them. Set data.validation to a folder that has a folder for each class"
        )
    return torch.from_numpy(labels).to(place.device)


def require_split(config: Config) -> None:
    """Raise ConfigErrors where the config selects no labeled images."""
    if config.data.split.kind == "none":
        raise config.error(
            "data.split.kind",
            "this command learns from labeled training images, and the config selects none. Set data.split.kind=all "
            "to use every training image, or the split of the runs to compare with. Images without labels need a CSV "
            "with the header file,label: data.kind=csv data.csv=labels.csv data.split.kind=csv",
        )


def supports(images: Images, config: Config) -> np.ndarray:
    """Return the labeled training images that can be read, int64 ascending: one or more of each class to recognize.

    Raises ConfigErrors where the config selects no labeled images, DataError for a class without one.
    """
    require_split(config)
    if images.held_out is not None and (notes := label_notes(images)):
        raise DataError(
            f"{notes[0]}: label one of each, or validate on images of the others. Labels: {images.split}"
        )
    return labeled(images)


def labeled(images: Images) -> np.ndarray:
    """Return the labeled training images that can be read, int64 ascending."""
    chosen = images.split.indices
    return chosen[~np.isin(chosen, list(images.train.bad))]


def result_record(
    kind: str, measured: Measured, encoder: Encoder, images: Images, config: Config
) -> dict[str, Any]:
    """Return the record of an evaluation, which `write_result` takes."""
    split, setting = config.data.split, dict(measured.setting)
    share, count = split.fraction, len(labeled(images))
    share = round(count / len(images.train), 4) if share is None else share
    labels = {"kind": split.kind, "fraction": share, "count": count}
    # Kind and share alone do not identify the images.
    if split.seed or split.kind in ("names", "csv"):
        labels["names"] = images.split.fingerprint[:12]
    if images.held_out is not None and config.data.kind in FILES:
        setting["validation"] = images.held_out.fingerprint()[:12]  # two folders are two results
    return {
        "kind": kind,
        "metrics": measured.metrics,
        "images": measured.images,
        "labels": labels,
        "encoder": encoder.record(),
        "setting": setting,
        "asked": asked(config, kind),
        "classes": per_class(measured.predicted, measured.truth, images.train.classes),
        "run": config.run_folder.name,
        "versions": versions(),
        **({"learned": measured.learned} if measured.learned else {}),
    }


def label_counts(images: Images) -> np.ndarray:
    """Return how many of the `labeled` images each class has, int64 (C,)."""
    return np.bincount(images.train.labels[labeled(images)], minlength=len(images.train.classes))


def require_two_labels(images: Images) -> None:
    """Raise DataError where no class has two labels."""
    if label_counts(images).max(initial=0) < 2:
        raise DataError(
            f"no class has two labels, so no label can be left out to judge by. Labels: {images.split}"
        )
