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

from fastsuncet.checkpoint.run_folder import on_every_rank
from fastsuncet.config import Config
from fastsuncet.data.dataset import rank_0_first
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation.scoring import per_class, share_right
from fastsuncet.paths import typed_path
from pipelines.data_errors import DataError
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.label_splits import draw_held_out, labeled_split
from pipelines.datasets.published import cifar, part_size, voc07

RECALLS = 11  # 0, 0.1, ..., 1: those of VOC 2007's average precision
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

    def opened(*parts: str) -> ImageIndex:
        def read(first: bool) -> ImageIndex:
            if voc:
                return voc07(root, *parts)
            return cifar(name, root, train="train" in parts, download=t.download and first)

        index = rank_0_first(place, read)
        index.require_good()  # accuracies are comparable only on the same images
        return index

    images, test = opened("train", "val"), opened("test")
    if voc:
        validation = np.arange(on_every_rank(lambda: part_size(root, "train")), len(images))
    else:  # the same images whatever the run's seed
        validation = draw_held_out(images, labeled_split(images, "all"), t.validation, seed=0)
    train = np.setdiff1d(np.arange(len(images)), validation)
    title, metric = ("11-point mAP", mean_ap) if voc else ("top-1", top1)
    return TransferTask(name, images, train, validation, test, title, metric)


def top1(logits: np.ndarray, index: ImageIndex, numbers: np.ndarray) -> tuple[float, dict[str, Any]]:
    """Return the fraction of images whose highest logit is their class's; of equal logits the first counts."""
    predicted, truth = torch.from_numpy(logits.argmax(1)), torch.from_numpy(index.labels[numbers])
    return share_right(predicted, truth), per_class(predicted, truth, index.classes)


def mean_ap(logits: np.ndarray, index: ImageIndex, numbers: np.ndarray) -> tuple[float, dict[str, Any]]:
    """Return VOC 2007's mean average precision, 0 to 1; a class without positive images has none of its own.

    Raises DataError where no class has a positive image.
    """
    assert index.presence is not None
    each = [average_precision(*pair) for pair in zip(logits.T, index.presence[numbers].T, strict=True)]
    known = {name: value for name, value in zip(index.classes, each, strict=True) if not np.isnan(value)}
    if not known:
        raise DataError(f"{index.root}: no class is in any of the {len(numbers)} images to test on")
    classes = {name: {"average_precision": value} for name, value in known.items()}
    return float(np.nanmean(each)), classes


def average_precision(scores: np.ndarray, presence: np.ndarray) -> float:
    """Return the mean over recalls t = 0, 0.1, ..., 1 of the highest precision at recall >= t; NaN without positives.

    `scores` (N,) float; `presence` (N,): 1 the class is there, -1 it is not, 0 difficult, which is left out. Images of
    equal score are counted together: precision and recall belong to a threshold, so the order of the images cannot
    change the number. (VOC's own program takes them in the order of its sort.)
    """
    asked = presence != 0
    scores, there = scores[asked], presence[asked] > 0
    positives = int(there.sum())
    if positives == 0:
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    last = np.append(ranked[1:] != ranked[:-1], True)  # the last image of each group of equal scores
    found = np.cumsum(there[order])[last]
    precision = found / (np.flatnonzero(last) + 1)
    # From the right: each threshold gets the best precision of itself and of all thresholds of higher recall.
    best = np.maximum.accumulate(precision[::-1])[::-1]
    # Integers, because in floats 3 * 0.1 is more than 0.3, the recall of three of ten positives.
    wanted = np.searchsorted((RECALLS - 1) * found, np.arange(RECALLS) * positives)
    return float(best[wanted].mean())
