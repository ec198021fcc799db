"""The images a config names, found, scanned and split: what every command starts from.

The list of files with their sizes (the index) is scanned once and kept in logging.folder. One rank scans, the others
read what it wrote: 64 ranks that ask for a million files at once bring a file server down.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from fastsuncet.checkpoint.run_folder import on_every_rank, on_rank_0
from fastsuncet.checkpoint.same_start import require_same
from fastsuncet.config import Config
from fastsuncet.config.rules import FILES
from fastsuncet.console import show_progress
from fastsuncet.distributed.launch import Place
from fastsuncet.paths import typed_path
from pipelines.data_errors import DataError
from pipelines.datasets.folders import image_folder, image_tree, look_again, with_classes, with_csv_labels
from pipelines.datasets.index import ImageIndex, load_index, load_own_index, save_index
from pipelines.datasets.label_splits import Split, draw_held_out, labeled_split, validated_by, without
from pipelines.output import say_line


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


def open_images(config: Config, place: Place, *, validation: bool) -> Images:
    """Find and check the images of `config`. Raises DataError, with what to do, on every rank if on any.

    Ranks that read other images or labels than rank 0 are refused.
    """
    if validation and config.data.kind == "images":
        text = "an evaluation needs labels, and images reads none. Use image_folder, or csv with data.csv"
        raise config.error("data.kind", text)
    train = rank_0_first(place, lambda first: _open(config, train=True, scan=first))
    with _naming(config, "data.split.file" if config.data.split.file else "data.split.kind"):
        split = on_every_rank(lambda: labeled_split(train, **dict(config.data.split)))
    images = Images(train, split, None)
    if isinstance(config.data.validation, float) or config.data.validation_table:
        with _naming(config, "data.validation"):
            images = on_every_rank(lambda: _with_validation(config, train, split))
    elif validation:
        held_out = rank_0_first(place, lambda first: _open(config, train=False, scan=first))
        with _naming(config, "data.validation"):
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
        chosen, labels = validated_by(train, typed_path(config.data.validation_table))
    held_out = replace(train.take(chosen), labels=labels)
    held_out.require_good()
    return Images(*without(train, split, chosen), held_out)


def rank_0_first(place: Place, read: Callable[[bool], ImageIndex]) -> ImageIndex:
    """Return `read(True)` on rank 0, then `read(False)` elsewhere. An error on one rank is raised on all."""
    index = None

    def scan() -> None:
        nonlocal index
        index = read(True)

    on_rank_0(place, scan)
    return on_every_rank(lambda: read(False) if index is None else index)


@contextlib.contextmanager
def _naming(config: Config, *keys: str) -> Iterator[None]:
    """Add to a DataError the keys that led to it, and where they are written."""
    try:
        yield
    except DataError as error:
        error.args = ("\n".join([str(error), *(f"  {config.where(key)}" for key in keys)]),)
        raise


def _open(config: Config, *, train: bool, scan: bool) -> ImageIndex:
    data = config.data
    if data.kind not in FILES:
        return in_memory(config, train=train, download=data.download and scan)
    if train and data.pack is not None:
        index = packed_index(config, compare=scan)
    else:
        index = file_index(config, train=train, scan=scan)
    if train:
        index = with_labels(config, index)
    index = index.within(data.max_megapixels)
    for note in index.notes() if train and scan else ():
        say_line(f"note: {note}")
    with _naming(config, "data.bad_images"):
        # Accuracies are comparable only on the same images.
        index.require_good(data.bad_images if train else None)
    return index


def in_memory(config: Config, *, train: bool, download: bool = False) -> ImageIndex:
    """Return the images of a kind that is held in memory."""
    data, made = config.data, config.data.synthetic
    if data.kind in ("digits", "synthetic"):
        from pipelines.datasets.in_memory import digits, synthetic
    else:
        from pipelines.datasets.cifar import cifar
    if data.kind == "digits":
        return digits(train=train)
    if data.kind == "synthetic":
        with _naming(config, "data.synthetic.images", "data.synthetic.size"):
            return synthetic(made.images, made.classes, made.size, seed=config.meta.seed, train=train)
    with _naming(config, "data.root"):
        return cifar(data.kind, typed_path(data.root), train=train, download=download)


def with_labels(config: Config, index: ImageIndex) -> ImageIndex:
    """Return the training images with the labels of data.kind: those of folders or shards, of a CSV, or none."""
    if config.data.kind == "csv":
        with _naming(config, "data.csv"):
            return with_csv_labels(index, typed_path(config.data.csv))
    if config.data.kind == "images":
        return replace(index, labels=np.full(len(index), -1), classes=())
    return index


def packed_index(config: Config, *, compare: bool = False, scan: bool = False) -> ImageIndex:
    """Return the images of data.pack; the folder that they came from is not looked at.

    With `compare` they must be those of the folder's kept index, if there is one. With `scan` the shards of another
    program are read anew, also where their index is kept.
    """
    from pipelines.datasets.pack import open_pack

    like = None
    if compare and config.data.root is not None:
        folder = image_root(config, train=True)
        kept = index_path(config, folder, True)
        like = load_index(kept, root=folder, refresh=False) if kept.exists() else None
    with _naming(config, "data.pack"):
        upright = config.data.exif_orientation
        return open_pack(
            config.data.pack or "", kept=pack_index_path(config), like=like, scan=scan, upright=upright
        )


def scanned(config: Config, *, train: bool) -> ImageIndex:
    """Return the images below a folder as they are now, with the labels of their folders if they are read."""
    data, folder = config.data, image_root(config, train=train)
    with _naming(config, "data.root", "data.train" if train else "data.validation"):
        if not train or data.kind == "image_folder":
            return image_folder(folder, partial(reading_headers, folder), upright=data.exif_orientation)
        inside = data.validation_folder
        if data.train is None and inside is not None and (folder / inside).is_dir():
            raise DataError(
                f"the validation images {folder / inside} lie in the folder of the training images: set "
                "data.train to a folder without them, or data.validation=null to train on them as well"
            )
        return image_tree(folder, partial(reading_headers, folder), upright=data.exif_orientation)


def reading_headers(folder: Path, done: int, total: int) -> None:
    """Show how far a scan of `folder` is: on a terminal as it goes, elsewhere in one line if it takes a while."""
    if not done and total >= 100_000:
        say_line(f"reading the headers of {total:,} images in {folder}, once: their index is kept")
    show_progress(folder, done, total)


def file_index(config: Config, *, train: bool, scan: bool) -> ImageIndex:
    """Return the images below a folder from its kept index, or scan and keep them; those of a CSV without labels."""
    folder = image_root(config, train=train)
    kept = index_path(config, folder, train)
    with _naming(config, "data.root"):
        if scan:
            index = load_own_index(kept, root=folder)
        else:
            index = load_index(kept, root=folder, refresh=False) if kept.exists() else None
    if index is None and not scan:
        raise DataError(
            f"rank 0 has written the index {kept}, which this rank cannot see: put logging.folder, or data.index, on a "
            "file system that all machines share"
        )
    if index is None:
        index = scanned(config, train=train)
        save_index(index, kept)
        return index
    if index.upright != config.data.exif_orientation:
        text = f"data.exif_orientation={str(index.upright).lower()}"
        raise DataError(f"the index {kept} was made with {text}: set that, or delete it")
    if not scan:
        return index
    # Changed and missing files are looked for by one rank, which saves what it found before the others read it.
    # New ones are only counted: a run that took them in would be another run.
    with _naming(config, "data.root"):
        refreshed, new = look_again(index)
    if new:
        say_line(f"note: {new:,} new images in {folder} are not used: `fastsuncet data check` adds them")
    if refreshed is not index:
        save_index(refreshed, kept)
    return refreshed


def image_root(config: Config, *, train: bool) -> Path:
    """Return the folder of the training or the validation images. Raises ConfigErrors where data.root is needed."""
    data = config.data
    if data.root is None:
        raise config.error("data.root", "is needed: it is the folder that holds the images")
    part = (
        (data.train or ("train" if data.kind == "image_folder" else "")) if train else data.validation_folder
    )
    return typed_path(data.root) / typed_path(part)


def index_path(config: Config, folder: Path, train: bool) -> Path:
    """Return where the index of `folder` is kept: data.index, or a file in logging.folder."""
    if config.data.index is not None and train:
        return typed_path(config.data.index)
    # A folder in both roles has two indexes: a CSV's training images have no classes.
    role = config.data.kind if train else f"{config.data.kind}, validation"
    role += ", upright" if config.data.exif_orientation else ""
    return _beside_runs(config, folder.name, f"{role}:{os.path.realpath(folder)}")


def pack_index_path(config: Config) -> Path:
    """Return where the index of data.pack is kept, if it has none of its own."""
    return _beside_runs(config, "pack", f"pack:{typed_path(config.data.pack).absolute()}")


def _beside_runs(config: Config, name: str, key: str) -> Path:
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return typed_path(config.logging.folder) / "indices" / f"{name}-{digest}.npz"
