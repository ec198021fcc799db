"""The images of a config that are files: below a folder, scanned once, or in a pack. Their index is kept."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from fastsuncet.config import Config
from fastsuncet.paths import typed_path
from pipelines.data_errors import DataError
from pipelines.datasets.csv_labels import with_csv_labels
from pipelines.datasets.folders import image_folder, image_tree, look_again
from pipelines.datasets.index import ImageIndex, load_index, save_index
from pipelines.datasets.pack import open_pack
from pipelines.output import counted, say_once


def with_labels(config: Config, index: ImageIndex) -> ImageIndex:
    """Return the training images with the labels of data.kind: those of folders or shards, of a CSV, or none."""
    if config.data.kind == "csv":
        with config.naming("data.csv"):
            return with_csv_labels(index, typed_path(config.data.csv))
    if config.data.kind == "images":
        return replace(index, labels=np.full(len(index), -1), classes=())
    return index


def packed_index(config: Config, *, compare: bool = False, scan: bool = False) -> ImageIndex:
    """Return the images of data.pack; the folder that they came from is not looked at.

    With `compare` they must be those of the folder's kept index, if there is one. With `scan` the shards of another
    program are read anew, also where their index is kept.
    """
    like = None
    if compare and config.data.root is not None:
        folder = image_root(config, train=True)
        like = load_index(index_path(config, folder, True), root=folder)
    with config.naming("data.pack"):
        kept, upright = kept_index(config), config.data.exif_orientation
        return open_pack(config.data.pack or "", kept=kept, like=like, scan=scan, upright=upright)


def scanned(config: Config, *, train: bool) -> ImageIndex:
    """Return the images below a folder as they are now, with the labels of their folders if they are read."""
    data, folder = config.data, image_root(config, train=train)
    with config.naming("data.root", "data.train" if train else "data.validation"):
        if not train or data.kind == "image_folder":
            return image_folder(folder, upright=data.exif_orientation)
        inside = data.validation_folder
        if data.train is None and inside is not None and (folder / inside).is_dir():
            raise DataError(
                f"the validation images {folder / inside} lie in the folder of the training images: set "
                "data.train to a folder without them, or data.validation=null to train on them as well"
            )
        return image_tree(folder, upright=data.exif_orientation)


def file_index(config: Config, *, train: bool, scan: bool) -> ImageIndex:
    """Return the images below a folder from its kept index, or scan and keep them; those of a CSV without labels."""
    folder = image_root(config, train=train)
    kept = index_path(config, folder, train)
    with config.naming("data.index" if train and config.data.index else "data.root"):
        index = load_index(kept, root=folder, own=scan)
    if index is None and not scan:
        raise DataError(
            f"rank 0 has written an index, and this rank cannot see {kept}: put logging.folder, or data.index, on a "
            "file system that all machines share, where data.root is the same path on each"
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
    with config.naming("data.root"):
        refreshed, new = look_again(index)
    if new:
        has = f"{folder} has {counted(new, 'new image')}"
        # Once: a command that fits a classifier opens the images again.
        say_once(f"note: {has}, left out: `fastsuncet data check CONFIG` adds them")
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
    """Return where the index of `folder` is kept: data.index, or a file in logging.folder.

    Raises ConfigErrors where data.index is a folder.
    """
    if config.data.index is not None and train:
        path = typed_path(config.data.index)
        if os.path.isdir(path):
            raise config.error("data.index", f"is a folder: give {path / 'index.npz'}")
        return path
    # A folder in both roles has two indexes: a CSV's training images have no classes.
    role = config.data.kind if train else f"{config.data.kind}, validation"
    role += ", upright" if config.data.exif_orientation else ""
    return _beside_runs(config, folder.name, f"{role}:{os.path.realpath(folder)}")


def kept_index(config: Config) -> Path:
    """Return where the index of the training images is kept, if they are no pack with an index of its own."""
    if config.data.pack is not None:
        return _beside_runs(config, "pack", f"pack:{typed_path(config.data.pack).absolute()}")
    return index_path(config, image_root(config, train=True), True)


def _beside_runs(config: Config, name: str, key: str) -> Path:
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return typed_path(config.logging.folder) / "indices" / f"{name}-{digest}.npz"
