"""The data sets an encoder is transferred to: their images, the parts that choose and that count, their metric.

task        chooses on                                     counts on      by
cifar10     a stratified share of the training images      10,000 test    top-1
cifar100    the same                                       10,000 test    top-1
voc07       val, trained on train                          4,952 test     11-point mAP
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastsuncet.config import Config
from fastsuncet.data.dataset import on_one_rank_first
from fastsuncet.distributed.launch import Place
from fastsuncet.evaluation.mean_ap import mean_average_precision
from pipelines.data_errors import DataError
from pipelines.datasets.cifar import cifar
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.voc07 import part_of, voc07
from pipelines.sampling.augmentation import uniform

# Of logits (N, classes) and the images they are of: N numbers in an index.
Metric = Callable[[np.ndarray, ImageIndex, np.ndarray], float]
TITLES = {"top1": "top-1", "map11": "11-point mAP"}  # what a metric is called to people


@dataclass(frozen=True, eq=False)
class Task:
    """One data set."""

    name: str
    images: ImageIndex  # to train on and to choose on
    train: np.ndarray  # int64, ascending: numbers in `images` that a cell is trained on
    validation: np.ndarray  # int64, ascending: those that the cells are compared on
    test: ImageIndex
    loss: str  # as FitSetting has it
    metric_name: str  # a key of TITLES, in a result
    metric: Metric

    @property
    def title(self) -> str:
        """What people call the metric."""
        return TITLES[self.metric_name]

    @property
    def both(self) -> np.ndarray:
        """Training and validation images, ascending: what the chosen cell is trained on once more."""
        return np.union1d(self.train, self.validation)


def open_task(name: str, config: Config, place: Place) -> Task:
    """Finds the images of data set `name` below transfer.root. Raises DataError on every rank if on any."""
    root = Path(config.transfer.root).expanduser()
    root = root / name if (root / name).is_dir() else root
    if name == "voc07":
        images, test = (
            on_one_rank_first(place, lambda first, part=part: voc07(root, part))
            for part in ("trainval", "test")
        )
        train, validation = part_of(images, "train"), part_of(images, "val")
        if both := np.intersect1d(train, validation).tolist():
            raise DataError(f"{images.path(both[0])} is in train and in val: val could not choose")
        loss, metric_name, metric = "sigmoid", "map11", mean_ap
    else:
        images, test = (
            on_one_rank_first(
                place,
                lambda first, train=train: cifar(
                    name, root, train=train, download=config.transfer.download and first
                ),
            )
            for train in (True, False)
        )
        train, validation = stratified(images, config.transfer.validation)
        loss, metric_name, metric = "softmax", "top1", top1
    for index in (images, test):
        index.require_good()  # an accuracy over other images is another accuracy
    return Task(name, images, np.sort(train), np.sort(validation), test, loss, metric_name, metric)


def stratified(index: ImageIndex, share: float) -> tuple[np.ndarray, np.ndarray]:
    """(the others, about `share` of every class), int64 ascending: the same images whatever the run's seed.

    Of a class with n images, share x n rounded go to the second part, at least one and at most n - 1. Raises DataError
    for a class with fewer than two images.
    """
    draws = uniform(0, "transfer/validation", (0, 0, 0, 0), len(index))
    held = []
    for label, name in enumerate(index.classes):
        members = np.flatnonzero(index.labels == label)
        if len(members) < 2:
            raise DataError(
                f"class {name} has {len(members)} training images: 2 or more are needed to choose on"
            )
        count = min(max(1, round(share * len(members))), len(members) - 1)
        held.append(members[np.argsort(draws[members], kind="stable")[:count]])
    validation = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(index)), validation), validation


def top1(logits: np.ndarray, index: ImageIndex, numbers: np.ndarray) -> float:
    """Share of the images whose highest logit is that of their class, 0 to 1; of equal logits the first counts."""
    return float((logits.argmax(1) == index.labels[numbers]).mean())


def mean_ap(logits: np.ndarray, index: ImageIndex, numbers: np.ndarray) -> float:
    """VOC 2007's mean average precision, 0 to 1."""
    return mean_average_precision(logits, index.presence[numbers])[0]
