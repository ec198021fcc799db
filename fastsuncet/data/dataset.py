"""The images a config names, found, scanned and split: what every command starts from.

image_files.py has those that are files. One rank scans them and the others read the index that it wrote: 64 ranks that
ask for a million files at once bring a file server down.
"""

import hashlib
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace

from fastsuncet.checkpoint.run_folder import on_every_rank, require_same
from fastsuncet.config import Config
from fastsuncet.config.rules import FILES
from fastsuncet.distributed.place import Place
from fastsuncet.paths import typed_path
from pipelines.data_errors import DataError
from pipelines.datasets.index import ImageIndex, with_classes
from pipelines.datasets.label_splits import Split, draw_held_out, labeled_split, validated_by, without
from pipelines.output import say_once

HELD_OUT = "held_out.csv"  # of a run: see learned_labels.py
NO_VALIDATION = {"data.validation": None, "evaluation.knn_every_epochs": None}  # values of a config


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

    def counts(self) -> tuple[int, int, int]:
        """Return (images, classes with a labeled one, labeled images): what `Config.resolve` takes."""
        return len(self.train), int((self.split.per_class > 0).sum()), len(self.split.indices)

    def fingerprint(self) -> str:
        """Return a hash of the run's images and labels: a checkpoint is continued on no others."""
        return f"{self.train.fingerprint()}/{self.split.fingerprint}"


def validates(config: Config) -> bool:
    """Return whether the config has images to evaluate on; without, an evaluation has to leave out labels."""
    return config.data.kind not in FILES or config.data.validation is not None


def open_images(config: Config, place: Place, *, validation: bool, index: ImageIndex | None = None) -> Images:
    """Find and check the images of `config`. Raises DataError, with what to do, on every rank if on any.

    Ranks that read other images or labels than rank 0 are refused. With `index` these are the training images.
    """
    if validation and config.data.kind == "images":
        text = "an evaluation needs labels, and images reads none. Use image_folder, or csv with data.csv"
        raise config.error("data.kind", text)
    train = rank_0_first(place, lambda first: _open(config, train=True, scan=first, index=index))
    asked = dict(config.data.split)
    with config.naming(f"data.split.{next((key for key in ('file', 'images') if asked[key]), 'kind')}"):
        split = on_every_rank(lambda: labeled_split(train, **asked))
    images = Images(train, split, None)
    if isinstance(config.data.validation, float) or config.data.validation_table:
        with config.naming("data.validation"):
            images = on_every_rank(lambda: _with_validation(config, train, split))
            if validation:
                on_every_rank(images.validation.require_good)
            elif images.validation.bad and place.first:
                bad = images.validation.some(list(images.validation.bad))
                say_once(f"note: an evaluation will refuse validation images that cannot be decoded: {bad}")
    elif validation:
        held_out = rank_0_first(place, lambda first: _open(config, train=False, scan=first))
        with config.naming("data.validation"):
            images = Images(train, split, with_classes(held_out, train.classes))
    if place.world_size > 1:
        train, split = images.train, images.split
        labels = hashlib.sha256(repr(train.classes).encode() + train.labels.astype("<i8").tobytes())
        same = {"labels of the training images": labels.hexdigest(), "labeled split": split.fingerprint}
        same |= {"training images": train.fingerprint(), "lengths of the training files": train.contents()}
        if images.held_out is not None:
            same["validation images"] = images.held_out.fingerprint()
        require_same(same, DataError)
    return images


def _with_validation(config: Config, train: ImageIndex, split: Split) -> Images:
    """Return the images with those to validate on taken out of the training images: a share, or those of a CSV."""
    if isinstance(config.data.validation, float):
        chosen = draw_held_out(train, split, config.data.validation, config.data.split.seed)
        labels = train.labels[chosen]
    else:
        table = typed_path(config.data.validation_table)
        try:
            chosen, labels = validated_by(train, table)
        except DataError as error:
            if table.name != HELD_OUT or not table.is_file() or not (table.parent / "config.yaml").is_file():
                raise
            run = shlex.quote(str(table.parent))
            again = f"`fastsuncet init` again, with --weights {run} and a new --output NAME.yaml"
            remedy = f"Run {again}: it writes what still fits to NAME-{HELD_OUT}. "
            remedy += "To evaluate the run of this config, set data.validation to that file"
            raise DataError(f"{error}\nA run has written this file: leave it. {remedy}") from error
    return Images(*without(train, split, chosen), replace(train.take(chosen), labels=labels))


def rank_0_first(place: Place, read: Callable[[bool], ImageIndex]) -> ImageIndex:
    """Return `read(True)` on rank 0, then `read(False)` elsewhere. An error on one rank is raised on all."""
    index = on_every_rank(lambda: read(True) if place.first else None)
    return on_every_rank(lambda: read(False) if index is None else index)


def _open(config: Config, *, train: bool, scan: bool, index: ImageIndex | None = None) -> ImageIndex:
    data = config.data
    if data.kind not in FILES:
        return in_memory(config, train=train, download=data.download and scan)
    if index is None:
        from fastsuncet.data.image_files import file_index, packed_index, with_labels

        if train and data.pack is not None:
            index = packed_index(config, compare=scan)
        else:
            index = file_index(config, train=train, scan=scan)
        index = with_labels(config, index) if train else index
    index = index.within(data.max_megapixels)
    for note in index.notes() if train and scan else ():
        say_once(f"note: {note}")  # a command that fits a classifier opens the images again
    with config.naming("data.bad_images"):
        # Accuracies are comparable only on the same images.
        index.require_good(data.bad_images if train else None)
    return index


def in_memory(config: Config, *, train: bool, download: bool = False) -> ImageIndex:
    """Return the images of a kind that is held in memory."""
    from pipelines.datasets.published import cifar, digits, synthetic

    data, made = config.data, config.data.synthetic
    if data.kind == "digits":
        return digits(train=train)
    if data.kind == "synthetic":
        with config.naming("data.synthetic.images", "data.synthetic.size"):
            return synthetic(made.images, made.classes, made.size, seed=config.meta.seed, train=train)
    with config.naming("data.root"):
        return cifar(data.kind, typed_path(data.root), train=train, download=download)
