"""PASCAL VOC 2007 as its authors publish it: images of several classes each, by the lists of ImageSets/Main.

A list CLASS_PART.txt has a line `ID VALUE` for every image of the part: 1 the class is in the image, -1 it is not,
0 it is there but too difficult to be counted. The boxes in Annotations/ are not read.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelines.data_errors import DataError
from pipelines.datasets.folders import with_headers
from pipelines.datasets.index import ImageIndex

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable"),
    *("dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
PARTS = ("train", "val", "trainval", "test")


def voc07(root: str | Path, part: str) -> ImageIndex:
    """Return the images of one part (train, val, trainval, test) with `presence` (N, 20), in the order of its lists.

    `root` holds VOCdevkit, or is VOCdevkit, or VOC2007 in it. No image has a single label: `labels` are -1. Raises
    DataError with the file: a list or an image that is missing, a list that is not as it was published.
    """
    folder = _folder(Path(root).expanduser())
    images, presence = _presence(folder, part)
    files = _files(images)
    if missing := [name for name in files if not (folder / name).is_file()]:
        more = f", and {len(missing) - 1} more files are missing" if len(missing) > 1 else ""
        raise DataError(f"there is no {folder / missing[0]}{more}: unpack {_archive(part)} there")
    index = with_headers(folder, files, np.full(len(files), -1), CLASSES)
    return replace(index, presence=presence)


def part_of(index: ImageIndex, part: str) -> np.ndarray:
    """Return the numbers, int64, in an index of trainval of the images of `part` (train, val).

    Raises DataError for an image that trainval lacks or labels otherwise.
    """
    folder, known = index.root, index.presence
    assert folder is not None and known is not None, "voc07 has made the index"
    images, presence = _presence(folder, part)
    found = index.files.find(_files(images))
    if len(wrong := np.flatnonzero((found < 0) | (presence != known[found]).any(1))):
        raise DataError(
            f"the lists of {part} and of trainval in {_list(folder, '*', part).parent} differ on {images[wrong[0]]}: "
            f"unpack {_archive(part)} over them"
        )
    return found


def _files(images: list[str]) -> list[str]:
    return [f"JPEGImages/{name}.jpg" for name in images]


def _archive(part: str) -> str:
    return f"VOC{'test' if part == 'test' else 'trainval'}_06-Nov-2007.tar"


def _folder(root: Path) -> Path:
    for folder in (root / "VOCdevkit" / "VOC2007", root / "VOC2007", root):
        if (folder / "ImageSets" / "Main").is_dir():
            return folder
    raise DataError(
        f"no PASCAL VOC 2007 under {root}: neither VOCdevkit/VOC2007/ImageSets/Main nor the inner folders; unpack "
        f"{_archive('train')} and {_archive('test')} there"
    )


def _list(folder: Path, name: str, part: str) -> Path:
    return folder / "ImageSets" / "Main" / f"{name}_{part}.txt"


def _presence(folder: Path, part: str) -> tuple[list[str], np.ndarray]:
    """Return the images of a part in the order of its lists, and int8 (N, 20) what all lists say of them."""
    lists = [_read_list(_list(folder, name, part), part) for name in CLASSES]
    for name, rows in zip(CLASSES, lists):
        if not np.array_equal(rows["image"], lists[0]["image"]):
            paths = (_list(folder, each, part) for each in (name, CLASSES[0]))
            raise DataError("{} and {} name other images: unpack {} again".format(*paths, _archive(part)))
    return lists[0]["image"].tolist(), np.stack([rows["value"] for rows in lists], axis=1)


def _read_list(path: Path, part: str) -> np.ndarray:
    try:
        # Six digits, so that no name leads elsewhere.
        rows = np.loadtxt(path, [("image", "U6"), ("value", "i1")], comments=None, ndmin=1, encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"there is no {path}: unpack {_archive(part)} over the others") from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is not a list of VOC 2007: {error}. Unpack {_archive(part)} again"
        ) from error
    numbers = set(rows["image"])
    if not (
        all(map(str.isdecimal, numbers))
        and 0 < len(numbers) == len(rows)
        and set(rows["value"]) <= {-1, 0, 1}
    ):
        raise DataError(
            f"{path} is not a list of VOC 2007: a line is not a number of its own and 1, -1 or 0. Unpack "
            f"{_archive(part)} again"
        )
    return rows
