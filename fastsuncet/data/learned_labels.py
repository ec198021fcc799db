"""Which labels a run has learned from, kept in its folder: an accuracy on them tells nothing of other images.

    RUN/learned.csv         file,label of the labeled images that it trains on, and that model.init had trained on
    RUN/held_out.csv        file,label of the images that data.validation has taken out of the training images
    RUN/labeled_bytes.csv   file,bytes of both: an image that was moved or renamed since is known by its length

A fine-tuning keeps them in its own folder, RUN/finetune/TAG. The first two can be a `data.csv` or a `data.validation`.
"""

import csv
import os
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import chain, takewhile
from pathlib import Path

import numpy as np

from fastsuncet.checkpoint.run_folder import disk_errors
from fastsuncet.config import Config
from fastsuncet.data.dataset import HELD_OUT, Images
from fastsuncet.distributed.place import Place
from fastsuncet.paths import typed_path
from pipelines import atomic_files
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.label_splits import stratified
from pipelines.output import csv_table, say_once

LEARNED, BYTES = "learned.csv", "labeled_bytes.csv"
Rows = dict[str, tuple[str, int]]  # file -> its label and its length in bytes, 0 where that is not known
MOST = 200_000  # labels of a table. A run with more has none, and all labels count as learned


def write_learned_labels(folder: Path, images: Images, config: Config) -> list[str]:
    """Write the tables of the run in `folder`, and return a warning if validation images were learned from before.

    A run that learns from no label has no learned.csv; one that an earlier start left is removed. Raises
    CheckpointError for a disk that refuses.
    """
    # timm's published weights are no path, and have learned from none of these labels.
    begins = config.model.init not in (None, "timm")
    init = _table_of(typed_path(config.model.init)) if begins else folder / LEARNED
    held_out, warning = _held_out(images), []
    there, judges = _read(init) if begins else {}, _judges(images)
    before = _renamed(there, *_indices(images))
    learns = config.criterion.supervised
    rows = _with_rows(before, images, images.split.indices) if learns else before
    if judges is not None and (known := int(_found(judges, there, images.train).sum())):
        others = init.with_name(HELD_OUT)
        name = others if others.is_file() else "FILE.csv, with labels that it has not learned from"
        remedy = f"Write data.validation={name}" if _taken_out(images) else "Move them out of that folder"
        warning.append(
            f"{known} of {len(judges)} validation images are labels that model.init has learned from: "
            f"accuracies on them are too high. {remedy}"
        )
    _write(folder, {LEARNED: rows, HELD_OUT: held_out})
    return warning


def write_tuned_labels(
    folder: Path, images: Images, chosen: np.ndarray, weights: Path | None, supervised: bool
) -> None:
    """Write the tables of a fine-tuning in `folder` that learns from the images `chosen` and starts from `weights`.

    `weights` and `supervised` as for `learned`. Raises CheckpointError for a disk that refuses.
    """
    before = _learned_by(weights, supervised)
    rows = {} if before is None else _with_rows(_renamed(before, *_indices(images)), images, chosen)
    _write(folder, {LEARNED: rows, HELD_OUT: _held_out(images)})


def learned(weights: Path | None, index: ImageIndex, supervised: bool) -> np.ndarray:
    """Return which images of `index` the weights have learned the label of, bool (N,).

    All where nothing says it and they are `supervised`: they have learned from labels. None, another program's weights:
    none.
    """
    rows = _learned_by(weights, supervised)
    return np.ones(len(index), bool) if rows is None else _found(index, rows)


def learned_lengths(weights: Path) -> dict[str, int]:
    """Return file -> length in bytes of the images whose labels the run or fine-tuning `weights` has learned."""
    return {file: length for file, (_, length) in _read(_table_of(weights)).items()}


def left_to_judge(images: Images, weights: Path | None, supervised: bool, place: Place) -> tuple[Images, int]:
    """Return the images without the validation images of which `learned` is true, and 0.

    A share that data.validation holds out is another draw once there are more labels, and images can move from the
    training folder to that of validation. Rank 0 says how many are left out. Where none would be left, return all
    images and how many these are. Where nothing says what was learned, images of a validation folder of its own count
    as new.
    """
    given, rows = _judges(images), _learned_by(weights, supervised)
    if given is None or (rows is None and not _taken_out(images)):
        return images, 0
    # What was learned by the old name of a class was learned.
    known = np.ones(len(given), bool) if rows is None else _found(given, rows, images.train)
    if (count := int(known.sum())) in (0, len(given)):
        return images, count
    if place.first:
        say_once(
            f"note: {count} of {len(given)} validation images are left out: the network has learned from them"
        )
    return replace(images, held_out=images.validation.take(np.flatnonzero(~known))), 0


def held_out_of(weights: Path, index: ImageIndex, count: int) -> tuple[Path | None, dict[str, str]]:
    """Return the held_out.csv of the run that `weights` is or lies in, and file -> label of its images in `index`.

    None for the file: images have gone since, or have another label. Of other photos, less than half of whose names
    are known: {}. Of a run that has held none out: `count` of the images, where it has learned from others of them.
    """
    table = _table_of(weights).with_name(HELD_OUT)
    before = _read(table)
    if not before:
        return None, _labels(_rows(index, _drawn_among_new(weights, index, count)))
    found = np.flatnonzero(_found(index, before))
    if 2 * len(found) < len(before):
        return None, {}
    now = _labels(_rows(index, found[index.labels[found] >= 0]))
    return table if now == _labels(before) else None, now


def _drawn_among_new(weights: Path, index: ImageIndex, count: int) -> np.ndarray:
    """Return `count` labeled images that are not learned, drawn in each class; none where all or too few are new."""
    known, labels = learned(weights, index, supervised=False), index.labels.copy()
    labels[known] = labels[list(index.bad)] = -1
    if not (known.any() and 1 <= count <= (labels >= 0).sum()):
        return np.empty(0, np.int64)
    chosen = stratified(labels, count, seed=0)
    # Each class keeps a label to train on.
    return chosen[np.isin(index.labels[chosen], np.delete(index.labels, chosen))]


def _found(index: ImageIndex, rows: Rows, *beside: ImageIndex) -> np.ndarray:
    """Return which images of `index` are among `rows`, bool (N,); `beside` it are other images of the same folder."""
    now = _renamed(rows, index, *beside)
    return np.array([name in now for name in index.files], bool)


def _renamed(rows: Rows, *indices: ImageIndex) -> Rows:
    """Return `rows` by the names of now. An image has gone where none of its name and length in bytes is left.

    Its row then has the name of the new image that has (1) its path without the ending, as in another format, (2) its
    file name and length, or (3) its length. A rule is skipped where more or fewer new images have the same, as in
    folders of BMP, and the third where less than half of what has gone is found: some other photos have such a length
    by chance.
    """
    if not rows:
        return rows
    there = {file: size for index in indices for file, size in zip(index.files, index.lengths().tolist())}
    gone = {file: n for file, (_, n) in rows.items() if n and there.get(file) != n}
    if not gone:
        return rows
    new = {file: n for file, n in there.items() if file not in rows or rows[file][1] not in (0, n)}
    edited = gone.keys() & new.keys()  # they keep their names, and what was learned is no longer there
    moved = _matched(
        gone, new, lambda file, length: (os.path.splitext(file)[0], length if file in edited else None)
    )
    moved |= _matched(gone, new, lambda file, length: (os.path.basename(file), length))
    # One in a validation folder elsewhere has kept its file name.
    by_length = _matched(gone, new, lambda file, length: (file.startswith("../"), length))
    if len(moved) + len(by_length) >= len(gone):
        moved |= by_length
    stayed = {file: row for file, row in rows.items() if file not in moved}
    return stayed | {file: rows[old] for old, file in moved.items()}


def _matched(
    gone: dict[str, int], new: dict[str, int], key_of: Callable[[str, int], Hashable]
) -> dict[str, str]:
    """Return old name -> new name of the images whose key as many new ones have, and take them out of both.

    Both are name -> length.
    """
    old, now = defaultdict(list), defaultdict(list)
    for files, groups in ((gone, old), (new, now)):
        for file, length in files.items():
            groups[key_of(file, length)].append(file)
    pairs = (zip(files, now[key]) for key, files in old.items() if len(files) == len(now.get(key, ())))
    moved = dict(chain.from_iterable(pairs))
    for was, name in moved.items():
        del gone[was], new[name]
    return moved


def _learned_by(weights: Path | None, supervised: bool) -> Rows | None:
    """Return the rows of what the weights have learned from, None where nothing says it of `supervised` ones."""
    if weights is None:
        return {}
    table = _table_of(weights)
    return None if supervised and not table.is_file() else _read(table)


def _with_rows(before: Rows, images: Images, chosen: np.ndarray) -> Rows:
    return before | _rows(images.train, chosen) if len(chosen) <= MOST else {}


def _write(folder: Path, tables: dict[str, Rows]) -> None:
    """Write the tables that have rows with the lengths of these, and remove the others."""
    lengths = {file: length for rows in tables.values() for file, (_, length) in rows.items() if length}
    written = {name: [("file", "label"), *_labels(rows).items()] for name, rows in tables.items()}
    for name, lines in (written | {BYTES: [("file", "bytes"), *lengths.items()]}).items():
        with disk_errors(folder / name):
            if lines[1:]:
                atomic_files.replace(folder / name, csv_table(lines))
            else:
                atomic_files.remove(folder / name)


def _table_of(weights: Path) -> Path:
    """Return the learned.csv of the run or the fine-tuning that `weights` is, or lies in: a checkpoint, an export."""
    # What a fine-tuning has learned from is not said by the run that it lies in.
    folders = takewhile(lambda folder: folder.name != "finetune", [weights, *weights.absolute().parents[:4]])
    return next((folder / LEARNED for folder in folders if (folder / LEARNED).is_file()), weights / LEARNED)


def _held_out(images: Images) -> Rows:
    """Return the rows of the validation images that are taken out of the training images; {} for others."""
    return _rows(images.validation, np.arange(len(images.validation))) if _taken_out(images) else {}


def _taken_out(images: Images) -> bool:
    """Return whether the validation images are taken out of the training images."""
    train, held_out = images.train, images.held_out
    return held_out is not None and train.root is not None and train.root == held_out.root


def _judges(images: Images) -> ImageIndex | None:
    """Return the validation images by their names as seen from the folder of the training images; None without both."""
    root, given = images.train.root, images.held_out
    if root is None or given is None or given.root is None:
        return None
    there = os.path.relpath(given.root, root)
    return replace(given, files=[os.path.normpath(f"{there}/{name}") for name in given.files])


def _indices(images: Images) -> list[ImageIndex]:
    """Return the images that lie below the folder of the training images."""
    return [images.train, *([images.validation] if _taken_out(images) else [])]


def _rows(index: ImageIndex, chosen: np.ndarray) -> Rows:
    lengths = index.lengths()
    return {index.name(i): (index.classes[index.labels[i]], int(lengths[i])) for i in chosen.tolist()}


def _labels(rows: Rows) -> dict[str, str]:
    return {file: label for file, (label, _) in rows.items()}


def _read(table: Path) -> Rows:
    """Return the rows of a table, {} where there is none; without lengths where nothing says them."""
    lengths = {file: int(text) for file, text in _pairs(table.with_name(BYTES)).items() if text.isdecimal()}
    return {file: (label, lengths.get(file, 0)) for file, label in _pairs(table).items()}


def _pairs(table: Path) -> dict[str, str]:
    if not table.is_file():
        return {}
    with open(table, newline="", encoding="utf-8", errors="surrogateescape") as stream:
        # Beside weights of another program, a file of this name can be any table.
        return {row[0]: row[1] for row in list(csv.reader(stream))[1:] if len(row) == 2}
