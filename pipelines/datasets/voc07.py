"""PASCAL VOC 2007 as its authors publish it: images of several classes each, by the lists of ImageSets/Main.

A list CLASS_PART.txt has a line `ID VALUE` for every image of the part: 1 the class is in the image, -1 it is not,
0 it is there but too difficult to be counted. The boxes in Annotations/ are not read.
"""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelines.data_errors import DataError
from pipelines.datasets.folders import with_headers
from pipelines.datasets.index import ImageIndex
from pipelines.output import first_five

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable"),
    *("dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)


def voc07(root: str | Path, *parts: str) -> ImageIndex:
    """Return the images of parts (train, val, test) with `presence` (N, 20), in the order of the lists.

    `root` holds VOCdevkit, or is VOCdevkit, or VOC2007 in it. No image has a single label: `labels` are -1. Raises
    DataError with file and line: a missing list, a wrong line, lists of different images, an image in two parts. An
    image without its file is a bad one.
    """
    folder = _folder(Path(root).expanduser())
    names, columns = [], [[] for _ in CLASSES]
    for part in parts:
        first = _list(folder, CLASSES[0], part)
        images, _ = _read_list(first)
        names += images
        for name, column in zip(CLASSES, columns):
            others, values = _read_list(path := _list(folder, name, part))
            if others != images:
                raise DataError(f"{path} names other images than {first}, or in another order")
            column += values
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{folder}: {first_five(twice)} twice in the lists of {' and '.join(parts)}")
    files = [f"JPEGImages/{name}.jpg" for name in names]
    index = with_headers(folder, files, np.full(len(names), -1), CLASSES)
    return replace(index, presence=np.array(columns, np.int8).T.copy())


def part_size(root: str | Path, part: str) -> int:
    """Return the number of images of one part, from a list of it. Raises DataError as `voc07`."""
    return len(_read_list(_list(_folder(Path(root).expanduser()), CLASSES[0], part))[0])


def _folder(root: Path) -> Path:
    for folder in (root / "VOCdevkit" / "VOC2007", root / "VOC2007", root):
        if (folder / "ImageSets" / "Main").is_dir():
            return folder
    raise DataError(
        f"no PASCAL VOC 2007 under {root}: neither VOCdevkit/VOC2007/ImageSets/Main nor the inner folders; unpack "
        "VOCtrainval_06-Nov-2007.tar and VOCtest_06-Nov-2007.tar there"
    )


def _list(folder: Path, name: str, part: str) -> Path:
    return folder / "ImageSets" / "Main" / f"{name}_{part}.txt"


def _read_list(path: Path) -> tuple[list[str], list[int]]:
    """Return the images of a list and their values."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        archive = f"VOC{'test' if path.stem.endswith('_test') else 'trainval'}_06-Nov-2007.tar"
        raise DataError(f"there is no {path}: {archive} has it, unpack that one over the others") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the list {path}: {error}") from error
    found = [re.fullmatch(r"\s*([A-Za-z0-9_]+)\s+(-1|0|1)\s*", line) for line in lines]
    if None in found or not lines:
        number = found.index(None) + 1 if lines else 1
        raise DataError(f"{path} line {number} is not the name of an image and 1, -1 or 0")
    return [each[1] for each in found if each], [int(each[2]) for each in found if each]
