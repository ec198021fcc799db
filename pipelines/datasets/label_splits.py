"""Which images are labeled (recipe 2.4): a list of names, a seeded draw, all, none, or a CSV.

Nothing falls back to chance: the authors' code draws for any share that it has no list for, and then nobody knows
which 1 % it was. A split has counts and a fingerprint, so that two runs can be compared.
"""

import hashlib
import string
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipelines.data_errors import DataError
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.names import as_lines, leaves_root, listed_lines
from pipelines.output import first_five, span

# The lists of SimCLR's authors, which SuNCEt's reuse, named there by the share that is *not* labeled (99 and
# 90 percent): sha256 -> what it is and how many training images it names.
IMAGENET_LISTS = {
    "71e82a48ba78252683ae334c4d019ebd5c6e855b9599c1389fbe83eb9549cf17": ("ImageNet 1%", 12_811),
    "6d09de11e7bdaf5b1f3b1f249b6183695f97310cdd20f0c03e7235b6b9392091": ("ImageNet 10%", 128_116),
}
_REMEDY = "data.root and data.train must lead to the images the list was made for"


@dataclass(frozen=True, eq=False)
class Split:
    """The labeled images of a data set; printed, the sentence a run should begin with."""

    indices: np.ndarray  # int64 (L,), ascending, each once, every one with a label
    per_class: np.ndarray  # int64 (classes,), labeled images of each class
    fingerprint: str  # sha256 of their names, a line each, in order of `indices`
    source: str  # where the split comes from

    def __str__(self) -> str:
        if not len(self.indices):
            return f"no labeled images ({self.source})"
        each = span(self.per_class.min(), self.per_class.max())
        return (
            f"{len(self.indices):,} labeled images, {each} in each of "
            f"{len(self.per_class):,} classes ({self.source}; names {self.fingerprint[:12]})"
        )


def labeled_split(
    index: ImageIndex,
    kind: str,
    *,
    file: str | Path | None = None,
    sha256: str | None = None,
    fraction: float | None = None,
    images: int | None = None,
    seed: int = 0,
) -> Split:
    """Return the split that a configuration's data.split asks for; each kind uses its own arguments.

    csv: the labels that the index has from its CSV, or with `file` those of another CSV, which must agree with them.
    An image without a label is never in a split. Raises DataError.
    """
    if kind == "names" and file is not None:
        chosen, source = named(index, Path(file), sha256)
    elif kind == "bernoulli" and fraction is not None:
        chosen, source = bernoulli(len(index), fraction, seed), f"Bernoulli({fraction:g}), seed {seed}"
    elif kind == "stratified" and images is not None:
        chosen, source = stratified(index.labels, images, seed), f"{images} drawn by class, seed {seed}"
    elif kind == "csv" and file is not None:
        labels = _labels_in(file, index, index.classes or None, np.full(len(index), True))
        chosen, source = np.flatnonzero(labels >= 0), Path(file).name
    elif kind in ("all", "csv"):
        chosen, source = np.arange(len(index)), "all that have a label"
    else:
        assert kind == "none", "the config's rules refuse a kind without what it needs"
        chosen, source = np.empty(0, np.int64), "none asked for"
    return _split(index, chosen[index.labels[chosen] >= 0], source)


def _split(index: ImageIndex, chosen: np.ndarray, source: str) -> Split:
    return Split(
        indices=chosen,
        per_class=np.bincount(index.labels[chosen], minlength=len(index.classes)),
        fingerprint=hashlib.sha256(as_lines(map(index.name, chosen.tolist())).data).hexdigest(),
        source=source,
    )


def draw_held_out(index: ImageIndex, split: Split, share: float, seed: int) -> np.ndarray:
    """Return `share` of the labeled images of `split`, int64 ascending, drawn in each class as by `stratified`.

    Of a split without images: of all that have a label. Bad images are not drawn. Raises DataError where no image has a
    label, or no labeled image of a class would be left.
    """
    labels = np.full(len(index), -1)
    pool = split.indices if len(split.indices) else np.flatnonzero(index.labels >= 0)
    labels[pool] = index.labels[pool]
    labels[list(index.bad)] = -1
    if not (count := int((labels >= 0).sum())):
        raise DataError("no image has a label, so none can be held out to validate on")
    chosen = stratified(labels, max(1, round(share * count)), seed)
    if len(gone := np.setdiff1d(labels[chosen], np.delete(labels, chosen))):
        names = first_five([index.classes[label] for label in gone])
        raise DataError(f"{names}: no labeled image would be left to train on. Hold out fewer, or label more")
    return chosen


def validated_by(index: ImageIndex, file: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the images that a CSV of (file, label) names, int64 ascending, and their labels, int64.

    Raises DataError for wrong lines, as `with_csv_labels`, and for a label that differs from the index's.
    """
    labels = _labels_in(file, index, index.classes, index.labels >= 0)
    chosen = np.flatnonzero(labels >= 0)
    return chosen, labels[chosen]


def without(index: ImageIndex, split: Split, chosen: np.ndarray) -> tuple[ImageIndex, Split]:
    """Return the index and the split without the images `chosen`, int64 ascending."""
    kept = np.delete(np.arange(len(index)), chosen)
    left = np.searchsorted(kept, np.setdiff1d(split.indices, chosen, assume_unique=True))
    index = index.take(kept)
    return index, _split(index, left, f"{split.source}, without {len(chosen)} validation images")


def bernoulli(count: int, fraction: float, seed: int) -> np.ndarray:
    """Return images, int64, ascending, each of 0..count-1 chosen with probability `fraction` by the authors' draw.

    Theirs is torch.manual_seed(seed) and, image by image, one float32 Bernoulli(1 - fraction) draw; chosen where it
    is 0. One draw of a whole tensor takes the same numbers from the CPU generator. The global generator is left alone.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = torch.bernoulli(torch.full((count,), 1 - fraction, dtype=torch.float32), generator=generator)
    return np.flatnonzero(draws.numpy() == 0)


def stratified(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return `count` of the images with a label (>= 0), int64, ascending, each class in proportion to its images.

    Each image has one word of a Philox stream, the same with every NumPy version, and the images of a class are taken
    in the order of their words. Classes are rounded by Webster's method; with as many images in each they get equal
    numbers. Raises DataError where fewer than `count` images have a label.
    """
    known = np.flatnonzero(labels >= 0)
    if not 1 <= count <= len(known):
        raise DataError(f"data.split.images is from 1 to the {len(known)} images with a label, not {count}")
    words = np.random.Philox(key=np.array([seed, 0], np.uint64)).random_raw(len(labels))[known]
    by_class = np.lexsort((words, labels[known]))
    drawn = labels[known][by_class]
    _, firsts, inverse, sizes = np.unique(drawn, return_index=True, return_inverse=True, return_counts=True)
    # Webster's method takes seats in ascending order of (2 k + 1) / (2 n) for the k-th of n images of a class.
    rank = np.arange(len(known)) - firsts[inverse]
    seats = np.argsort((rank + 0.5) / sizes[inverse], kind="stable")
    return np.sort(known[by_class[seats[:count]]])


def named(index: ImageIndex, file: Path, sha256: str | None = None) -> tuple[np.ndarray, str]:
    """Return the images named in `file`, int64 ascending, and what that list is.

    A line is a path below the data folder (with "/"), or as in ImageNet's lists only the file's name, which
    begins with its class folder: n01440764_10026.JPEG is n01440764/n01440764_10026.JPEG. Raises DataError:
    unreadable, another sha256 than `sha256`, a line that is not such a name, an image named twice, not in the
    index, or without a label there.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the list of names {file}: {error.strerror or error}") from error
    digest = hashlib.sha256(data).hexdigest()
    if sha256 is not None and digest != sha256.lower():
        ends = "its lines end in CR LF, which an editor or git can have done"
        why = ends if b"\r\n" in data else "another list"
        lists = "; ".join(f"{name} ({n} names) {known}" for known, (name, n) in IMAGENET_LISTS.items())
        raise DataError(f"{file} has sha256 {digest}, not {sha256}: {why}. Known lists: {lists}")
    try:
        lines = [line.rstrip("\r\n") for line in listed_lines(data)]
    except UnicodeDecodeError as error:
        raise DataError(f"the list of names {file} is not UTF-8: {error}") from error
    if not lines:
        raise DataError(f"the list of names {file} is empty")
    names = []
    for number, line in enumerate(lines, 1):
        if line != line.strip(string.whitespace) or leaves_root(line) or not {"/", "_"} & {*line}:
            raise DataError(f"{file}: line {number}: {line!r} does not name an image below the data folder")
        names.append(line if "/" in line else f"{line.rsplit('_', 1)[0]}/{line}")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{file} names images more than once: {first_five(twice)}")
    found = index.find(names)
    if absent := [line for line, i in zip(lines, found.tolist()) if i < 0]:
        what = f"{len(absent)} images (of {len(lines)}) that are not under {index.root}: {first_five(absent)}"
        raise DataError(f"{file} names {what}; {index.naming() or _REMEDY}")
    if without := [line for line, label in zip(lines, index.labels[found].tolist()) if label < 0]:
        raise DataError(
            f"{file} names {len(without)} images (of {len(lines)}) without a label: {first_five(without)}"
        )
    return np.sort(found), IMAGENET_LISTS.get(digest, (f"{file.name}, sha256 {digest[:12]}",))[0]


def _labels_in(
    file: str | Path, index: ImageIndex, classes: tuple[str, ...] | None, compared: np.ndarray
) -> np.ndarray:
    """Return the labels of a CSV, int64 (N,), -1 = none. Those of the images `compared` must agree with the index's."""
    from pipelines.datasets.csv_labels import with_csv_labels  # few runs read a table

    labels = with_csv_labels(index, file, classes=classes).labels
    names = (*index.classes, "no label")  # the last one is that of label -1
    differing = np.flatnonzero(compared & (labels >= 0) & (labels != index.labels)).tolist()
    others = [f"{index.name(i)} ({names[labels[i]]} instead of {names[index.labels[i]]})" for i in differing]
    if others:
        raise DataError(
            f"{file}: {len(others)} labels differ from those of the data set: {first_five(others)}"
        )
    return labels
