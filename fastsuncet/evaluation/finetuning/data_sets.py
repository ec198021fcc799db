"""The data sets an encoder is transferred to: their images, the parts to choose and to test on, their metric.

task        chooses on                                     tests on       by
cifar10     a stratified part of the training images       10,000 test    top-1
cifar100    the same                                       10,000 test    top-1
voc07       val, trained on train                          4,952 test     11-point mAP
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastsuncet.config import Config
from fastsuncet.data.dataset import rank_0_first
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation.mean_ap import mean_average_precision
from fastsuncet.evaluation.scoring import confusion_of, per_class, share_right
from fastsuncet.paths import typed_path
from pipelines.data_errors import DataError
from pipelines.datasets.cifar import cifar
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.voc07 import part_of, voc07
from pipelines.sampling.augmentation import uniform

# Takes logits (N, classes), and the index and N numbers of their images; returns the metric, and what a result says of
# each class.
Metric = Callable[[np.ndarray, ImageIndex, np.ndarray], tuple[float, dict[str, Any]]]


@dataclass(frozen=True, eq=False)
class TransferTask:
    """One data set."""

    name: str
    images: ImageIndex  # to train on and to choose on
    train: np.ndarray  # int64, ascending: numbers in `images` that a cell is trained on
    validation: np.ndarray  # int64, ascending: those that the cells are compared on
    test: ImageIndex
    title: str  # the metric's name in messages and results
    metric: Metric

    @property
    def both(self) -> np.ndarray:
        """Training and validation images, ascending: what the chosen cell is retrained on."""
        return np.union1d(self.train, self.validation)


def open_task(name: str, config: Config, place: Place) -> TransferTask:
    """Find the images of data set `name` below transfer.root. Raises DataError on every rank if on any."""
    t = config.transfer
    assert t.root is not None  # the command checks it
    root = typed_path(t.root)
    root = root / name if (root / name).is_dir() else root
    voc = name == "voc07"

    def opened(part: str) -> ImageIndex:
        def read(first: bool) -> ImageIndex:
            if voc:
                return voc07(root, part)
            return cifar(name, root, train=part != "test", download=t.download and first)

        index = rank_0_first(place, read)
        index.require_good()  # accuracies are comparable only on the same images
        return index

    images, test = opened("trainval"), opened("test")
    if voc:
        train, validation = np.sort(part_of(images, "train")), np.sort(part_of(images, "val"))
        if both := np.intersect1d(train, validation).tolist():
            raise DataError(
                f"{images.path(both[0])} is in train and in val: val must be separate to choose on"
            )
        return TransferTask(name, images, train, validation, test, "11-point mAP", mean_ap)
    train, validation = stratified(images, t.validation)
    return TransferTask(name, images, train, validation, test, "top-1", top1)


def stratified(index: ImageIndex, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split images into (the rest, about `fraction` of every class), int64 ascending, whatever the run's seed.

    Of a class with n images, fraction x n rounded go to the second part, at least one and at most n - 1. Raises
    DataError for a class with fewer than two images.
    """
    draws = uniform(0, "transfer/validation", (0, 0, 0, 0), len(index))
    held = []
    for label, name in enumerate(index.classes):
        members = np.flatnonzero(index.labels == label)
        if len(members) < 2:
            raise DataError(
                f"class {name} has {len(members)} training images: 2 or more are needed to choose on"
            )
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        held.append(members[np.argsort(draws[members], kind="stable")[:count]])
    validation = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(index)), validation), validation


def top1(logits: np.ndarray, index: ImageIndex, numbers: np.ndarray) -> tuple[float, dict[str, Any]]:
    """Return the fraction of images whose highest logit is their class's; of equal logits the first counts."""
    predicted, truth = torch.from_numpy(logits.argmax(1)), torch.from_numpy(index.labels[numbers])
    confusion = confusion_of(predicted, truth, len(index.classes))
    return share_right(confusion), per_class(confusion, index.classes)


def mean_ap(logits: np.ndarray, index: ImageIndex, numbers: np.ndarray) -> tuple[float, dict[str, Any]]:
    """Return VOC 2007's mean average precision, 0 to 1; a class without positive images has none of its own."""
    assert index.presence is not None
    mean, each = mean_average_precision(logits, index.presence[numbers])
    known = zip(index.classes, each.tolist(), strict=True)
    return mean, {name: {"average_precision": value} for name, value in known if not np.isnan(value)}
