"""Which labels a run has learned from, kept in its folder: an accuracy on them tells nothing of other images.

    RUN/learned.csv    file,label of the labeled images that it trains on, and of those that model.init had trained on
    RUN/held_out.csv   file,label of the images that data.validation has taken out of the training images

A fine-tuning keeps both in its own folder, RUN/finetune/TAG. Both can be a `data.csv` or a `data.validation`.
"""

import csv
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np

from fastsuncet.checkpoint.run_folder import disk_errors
from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.place import Place
from fastsuncet.paths import typed_path
from pipelines import atomic_files
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.label_splits import stratified
from pipelines.output import csv_table, say_once

LEARNED, HELD_OUT = "learned.csv", "held_out.csv"
MOST = 200_000  # labels of a table. A run with more has none, and all labels count as learned


def write_learned_labels(folder: Path, images: Images, config: Config) -> list[str]:
    """Write both tables of the run in `folder`, and return a warning if validation images were learned from before.

    A run that learns from no label has no learned.csv; one that an earlier start left is removed. Raises
    CheckpointError for a disk that refuses.
    """
    # timm's published weights are no path, and have learned from none of these labels.
    begins = config.model.init not in (None, "timm")
    init = _table_of(typed_path(config.model.init)) if begins else folder / LEARNED
    before = _read(init) if begins else {}
    held_out, warning = _held_out(images), []
    learns = config.criterion.supervised
    rows = _with_rows(before, images, images.split.indices) if learns else before
    if known := len(before.keys() & held_out.keys()):
        others = init.with_name(HELD_OUT)
        name = others if others.is_file() else "FILE.csv, with labels that it has not learned from"
        warning.append(
            f"{known} of {len(held_out)} validation images are labels that model.init has learned from: "
            f"accuracies on them are too high. Write data.validation={name}"
        )
    _write(folder, {LEARNED: rows, HELD_OUT: held_out})
    return warning


def write_tuned_labels(
    folder: Path, images: Images, chosen: np.ndarray, weights: Path | None, supervised: bool
) -> None:
    """Write both tables of a fine-tuning in `folder` that learns from the images `chosen` and starts from `weights`.

    `weights` and `supervised` as for `learned`. Raises CheckpointError for a disk that refuses.
    """
    before = _learned_by(weights, supervised)
    rows = {} if before is None else _with_rows(before, images, chosen)
    _write(folder, {LEARNED: rows, HELD_OUT: _held_out(images)})


def learned(weights: Path | None, index: ImageIndex, supervised: bool) -> np.ndarray:
    """Return which images of `index` the weights have learned the label of, bool (N,).

    All where nothing says it and they are `supervised`: they have learned from labels. None, another program's weights:
    none.
    """
    if (names := _learned_by(weights, supervised)) is None:
        return np.ones(len(index), bool)
    found, positions = np.zeros(len(index), bool), index.find(list(names))
    found[positions[positions >= 0]] = True
    return found


def left_to_judge(images: Images, weights: Path | None, supervised: bool, place: Place) -> tuple[Images, int]:
    """Return the images without the validation images of which `learned` is true, and 0.

    A share that data.validation holds out is another draw once there are more labels. Rank 0 says how many are left
    out. Where none would be left, return all images and how many these are.
    """
    given, before = _held_out(images), _learned_by(weights, supervised)
    # By name: what was learned by the old name of a class was learned.
    new = [i for i, name in enumerate(given) if before is not None and name not in before]
    if not new or images.held_out is None:
        return images, len(given)
    if (known := len(given) - len(new)) and place.first:
        say_once(
            f"note: {known} of {len(given)} validation images are left out: the network has learned from them"
        )
    return replace(images, held_out=images.held_out.take(np.array(new))), 0


def held_out_of(weights: Path, index: ImageIndex, count: int) -> tuple[Path | None, dict[str, str]]:
    """Return the held_out.csv of the run that `weights` is or lies in, and file -> label of its images in `index`.

    None for the file: images have gone since, or have another label. Of other photos, less than half of whose names
    are known: {}. Of a run that has held none out: `count` of the images, where it has learned from others of them.
    """
    table = _table_of(weights).with_name(HELD_OUT)
    before = _read(table)
    if not before:
        return None, _rows(index, _drawn_among_new(weights, index, count))
    found = index.find(list(before))
    found = found[found >= 0]
    if 2 * len(found) < len(before):
        return None, {}
    now = _rows(index, found[index.labels[found] >= 0])
    return table if now == before else None, now


def _drawn_among_new(weights: Path, index: ImageIndex, count: int) -> np.ndarray:
    """Return `count` labeled images that are not learned, drawn in each class; none where all or too few are new."""
    known, labels = learned(weights, index, supervised=False), index.labels.copy()
    labels[known] = labels[list(index.bad)] = -1
    if not (known.any() and 1 <= count <= (labels >= 0).sum()):
        return np.empty(0, np.int64)
    chosen = stratified(labels, count, seed=0)
    # Each class keeps a label to train on.
    return chosen[np.isin(index.labels[chosen], np.delete(index.labels, chosen))]


def _learned_by(weights: Path | None, supervised: bool) -> dict[str, str] | None:
    """Return file -> label of what the weights have learned from, None where nothing says it of `supervised` ones."""
    if weights is None:
        return {}
    table = _table_of(weights)
    return None if supervised and not table.is_file() else _read(table)


def _with_rows(before: dict[str, str], images: Images, chosen: np.ndarray) -> dict[str, str]:
    return before | _rows(images.train, chosen) if len(chosen) <= MOST else {}


def _write(folder: Path, tables: dict[str, dict[str, str]]) -> None:
    """Write the tables that have rows, and remove the others."""
    for name, rows in tables.items():
        with disk_errors(folder / name):
            if rows:
                atomic_files.replace(folder / name, csv_table([("file", "label"), *rows.items()]))
            else:
                atomic_files.remove(folder / name)


def _table_of(weights: Path) -> Path:
    """Return the learned.csv of the run or the fine-tuning that `weights` is, or lies in: a checkpoint, an export."""
    # What a fine-tuning has learned from is not said by the run that it lies in.
    folders = takewhile(lambda folder: folder.name != "finetune", [weights, *weights.absolute().parents[:4]])
    return next((folder / LEARNED for folder in folders if (folder / LEARNED).is_file()), weights / LEARNED)


def _held_out(images: Images) -> dict[str, str]:
    """Return file -> label of the validation images that are taken out of the training images; {} for others."""
    if images.held_out is None or images.train.root is None or images.train.root != images.held_out.root:
        return {}
    return _rows(images.held_out, np.arange(len(images.held_out)))


def _rows(index: ImageIndex, chosen: np.ndarray) -> dict[str, str]:
    return {index.name(int(i)): index.classes[index.labels[i]] for i in chosen}


def _read(table: Path) -> dict[str, str]:
    """Return file -> label; {} where there is no table."""
    if not table.is_file():
        return {}
    with open(table, newline="", encoding="utf-8", errors="surrogateescape") as stream:
        # Beside weights of another program, a file of this name can be any table.
        return {row[0]: row[1] for row in list(csv.reader(stream))[1:] if len(row) == 2}
