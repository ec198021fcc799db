"""The images a config names, found, scanned and split: what every command starts from.

The list of files with their sizes (the index) is scanned once and kept beside the runs. One rank scans, the others
read what it wrote: a million files asked for by 64 ranks at once is how to bring a file server down.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastsuncet.config import Config
from fastsuncet.distributed.collectives import broadcast_json
from fastsuncet.distributed.launch import Place
from pipelines.data_errors import DataError
from pipelines.datasets import cifar
from pipelines.datasets import folders as datasets
from pipelines.datasets.in_memory import digits
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.index_io import load_index, save_index
from pipelines.datasets.label_splits import Split, labeled_split
from pipelines.datasets.shards import open_pack


@dataclass(frozen=True)
class Images:
    """The training images, which of them are labeled, and the images to evaluate on."""

    train: ImageIndex
    split: Split
    held_out: ImageIndex | None  # None: this command opened no validation images

    @property
    def validation(self) -> ImageIndex:
        """The images to evaluate on, for commands that opened them."""
        assert self.held_out is not None, "open_images(validation=True) opens the validation images"
        return self.held_out

    @property
    def labeled_classes(self) -> int:
        """How many classes have a labeled image."""
        return int((self.split.per_class > 0).sum())

    def counts(self) -> tuple[int, int, int]:
        """(images, classes with a labeled one, labeled images): what a run's arithmetic asks for."""
        return len(self.train), self.labeled_classes, len(self.split.indices)

    def fingerprint(self) -> str:
        """What decides the run's images and labels, in one line: a checkpoint is continued on no others."""
        return f"{self.train.fingerprint()}/{self.split.fingerprint}"


def open_images(config: Config, place: Place, *, validation: bool) -> Images:
    """Finds and checks the images of `config`. Raises DataError, with what to do, on every rank if on any."""
    data = config.data
    train = on_one_rank_first(place, lambda first: _open(config, train=True, scan=first))
    split = labeled_split(
        train,
        data.split.kind,
        file=data.split.file,
        sha256=data.split.sha256,
        fraction=data.split.fraction,
        seed=data.split.seed,
    )
    held_out = None
    if validation:
        held_out = on_one_rank_first(
            place, lambda first: _open(config, train=False, scan=first, classes=train.classes)
        )
    return Images(train, split, held_out)


def on_one_rank_first(place: Place, read: Callable[[bool], ImageIndex]) -> ImageIndex:
    """`read(True)` on rank 0, then `read(False)` elsewhere; a DataError of rank 0 is raised on all."""
    index, problem = None, None
    if place.first:
        try:
            index = read(True)
        except DataError as error:
            problem = error
    news = broadcast_json(str(problem) if problem else None)
    if problem is not None:
        raise problem
    if news is not None:
        raise DataError(f"rank 0 could not read the data: {news}")
    return index if index is not None else read(False)


def _open(config: Config, *, train: bool, scan: bool, classes: tuple[str, ...] | None = None) -> ImageIndex:
    data = config.data
    if data.kind == "digits":
        return digits(train=train)
    if data.kind in cifar.CLASSES:
        return cifar.cifar(data.kind, data.root, train=train, download=data.download and scan)
    folder = Path(data.root).expanduser() / (data.train if train else data.validation)
    if train and data.pack is not None:
        index = _packed(config, folder, compare=scan)
    else:
        index = file_index(config, folder, train=train, scan=scan, classes=classes)
    if data.kind == "csv" and train:
        index = datasets.with_csv_labels(index, Path(data.csv).expanduser())
    index.require_good(data.bad_images if train else 0)  # an accuracy over other images is another accuracy
    return index


def _packed(config: Config, folder: Path, *, compare: bool) -> ImageIndex:
    """The pack's images, which are those of the kept index where there is one; `folder` itself is not looked at."""
    kept = index_path(config, folder, True)
    like = load_index(kept, root=folder, refresh=False) if compare and kept.exists() else None
    return open_pack(Path(config.data.pack).expanduser(), like)


def file_index(
    config: Config, folder: Path, *, train: bool, scan: bool, classes: tuple[str, ...] | None = None
) -> ImageIndex:
    """The images below `folder` as its kept index has them, scanned where there is none yet; a CSV's without labels."""
    kept = index_path(config, folder, train)
    if kept.exists():
        # New files are not looked for here (`fastsuncet data check` does); changed and missing ones are, by one rank,
        # which writes down what it found before the others read it.
        index = load_index(kept, root=folder, refresh=False)
        refreshed = index.refreshed() if scan else index
        if refreshed is not index:
            save_index(refreshed, kept)
        index = refreshed
    elif not scan:
        raise DataError(
            f"rank 0 has written the index {kept}, which this rank cannot see: put logging.folder, or data.index, on a "
            "file system that all machines share"
        )
    else:
        tree = config.data.kind == "csv" and train
        index = datasets.image_tree(folder) if tree else _scan_folder(folder, classes)
        save_index(index, kept)
    return index if classes is None else numbered(index, classes)


def numbered(index: ImageIndex, classes: tuple[str, ...]) -> ImageIndex:
    """The same images with their classes numbered as in `classes`: a kept index may be from another training set's run.

    Raises DataError where an image's class is none of them.
    """
    if index.classes == classes:
        return index
    place = {name: number for number, name in enumerate(classes)}
    shown = [index.classes[label] for label in np.unique(index.labels[index.labels >= 0])]
    unknown = [name for name in shown if name not in place]
    if unknown:
        raise DataError(
            f"{index.root} has images of {len(unknown)} classes that no training image has: {', '.join(unknown[:5])}"
        )
    # The last place is that of the label -1.
    number = np.array([*(place.get(name, -1) for name in index.classes), -1], np.int64)
    return replace(index, labels=number[index.labels], classes=classes)


def _scan_folder(folder: Path, classes: tuple[str, ...] | None) -> ImageIndex:
    return datasets.image_folder(folder, classes=classes or None)


def index_path(config: Config, folder: Path, train: bool) -> Path:
    """Where the index of `folder` is kept: data.index, or beside the runs, under a name no other folder has."""
    if config.data.index is not None and train:
        return Path(config.data.index).expanduser()
    # A folder in both roles has two indexes: a training set has its own classes, a validation set those of another.
    role = config.data.kind if train else f"{config.data.kind}, validation"
    name = hashlib.sha256(f"{role}:{folder.resolve()}".encode()).hexdigest()[:12]
    return Path(config.logging.folder).expanduser() / "indices" / f"{folder.name}-{name}.npz"
