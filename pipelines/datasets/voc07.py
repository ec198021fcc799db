"""PASCAL VOC 2007 as its authors publish it: images of several classes each, by the lists of ImageSets/Main.

A list CLASS_PART.txt has a line `ID VALUE` for every image of the part: 1 the class is in the image, -1 it is not,
0 it is there but too difficult to be asked for. The boxes in Annotations/ are not read.
"""

import re
from pathlib import Path

import numpy as np

from pipelines.data_errors import DataError
from pipelines.datasets.image_headers import MAX_PIXELS, THREADS, Progress, read_headers
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.string_table import Names

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable"),
    *("dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
PARTS = ("train", "val", "trainval", "test")
_VALUES = {"1": 1, "-1": -1, "0": 0}
_SHOWN = 20  # wrong lines of a list told at once; the rest are counted

Lines = dict[str, tuple[int, int]]  # image -> (line, value)


def voc07(
    root: str | Path,
    part: str,
    *,
    max_pixels: int = MAX_PIXELS,
    threads: int = THREADS,
    progress: Progress | None = None,
) -> ImageIndex:
    """The images of one part (train, val, trainval, test) with `presence` (N, 20), in the order of its lists.

    `root` holds VOCdevkit, or is VOCdevkit, or VOC2007 in it. No image has a single label: `labels` are -1. Raises
    DataError, which names file and line, for a missing list, a line that is none, lists that name different images
    and an image without its file.
    """
    if part not in PARTS:
        raise ValueError(f"a part of VOC 2007 is one of {', '.join(PARTS)}, not {part!r}")
    folder = _folder(Path(root).expanduser())
    images, presence = _presence(folder, part)
    missing = [name for name in images if not (folder / "JPEGImages" / f"{name}.jpg").is_file()]
    if missing:
        line = images.index(missing[0]) + 1
        raise DataError(
            f"{_list(folder, CLASSES[0], part)} line {line}: there is no {folder}/JPEGImages/{missing[0]}.jpg"
            + (f", and {len(missing) - 1} more files are missing" if len(missing) > 1 else "")
        )
    files = Names.of(f"JPEGImages/{name}.jpg" for name in images)
    headers = read_headers(folder, files, max_pixels=max_pixels, threads=threads, progress=progress)
    none = np.full(len(images), -1, np.int64)
    return ImageIndex(
        folder, files, none, CLASSES, headers.sizes, stamps=headers.stamps, bad=headers.bad, presence=presence
    )


def part_of(index: ImageIndex, part: str) -> np.ndarray:
    """Numbers, int64, in an index of trainval of the images that the lists of `part` (train, val) name.

    Raises DataError, which names file and line, for an image that trainval lacks or knows otherwise.
    """
    images, presence = _presence(index.root, part)
    found = index.files.find([f"JPEGImages/{name}.jpg" for name in images])
    for row, number in enumerate(found):
        if number < 0:
            where = _list(index.root, CLASSES[0], part)
            raise DataError(f"{where} names {images[row]} on line {row + 1}, which is not in trainval")
        other = np.flatnonzero(presence[row] != index.presence[number])
        if len(other):
            where = _list(index.root, CLASSES[other[0]], part)
            raise DataError(
                f"{where} line {row + 1} says {presence[row, other[0]]} of {images[row]}, but trainval says "
                f"{index.presence[number, other[0]]}"
            )
    return found


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


def _presence(folder: Path, part: str) -> tuple[list[str], np.ndarray]:
    """The images of a part in the order of its first list, and int8 (N, 20) what all lists say of them."""
    lists = {name: _read_list(_list(folder, name, part)) for name in CLASSES}
    first_path, first = _list(folder, CLASSES[0], part), lists[CLASSES[0]]
    for name, lines in lists.items():
        path = _list(folder, name, part)
        for one, (line, _) in lines.items():
            if one not in first:
                raise DataError(f"{path} line {line} names {one}, which {first_path} does not")
        for one, (line, _) in first.items():
            if one not in lines:
                raise DataError(f"{path} does not name {one}, which {first_path} does on line {line}")
    images = list(first)
    presence = [[lists[name][one][1] for name in CLASSES] for one in images]
    return images, np.array(presence, np.int8)


def _read_list(path: Path) -> Lines:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        archive = f"VOC{'test' if path.stem.endswith('_test') else 'trainval'}_06-Nov-2007.tar"
        raise DataError(f"there is no {path}: {archive} has it, unpack that one over the others") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the list {path}: {error}") from error
    lines: Lines = {}
    wrong: list[tuple[int, str]] = []
    for number, row in enumerate(text.splitlines(), 1):
        cells = row.split()
        if len(cells) != 2:
            wrong.append((number, f"{row!r} is not an image and 1, -1 or 0"))
        elif not re.fullmatch(r"[A-Za-z0-9_]+", cells[0]):
            wrong.append((number, f"{cells[0]!r} is no name of an image"))
        elif cells[1] not in _VALUES:
            wrong.append((number, f"{cells[1]!r} is not 1, -1 or 0"))
        elif cells[0] in lines:
            wrong.append((number, f"{cells[0]} stands on line {lines[cells[0]][0]} already"))
        else:
            lines[cells[0]] = number, _VALUES[cells[1]]
    if wrong:
        told = "\n".join(f"  line {number}: {what}" for number, what in wrong[:_SHOWN])
        more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        noun = "line" if len(wrong) == 1 else "lines"
        raise DataError(f"{path} has {len(wrong)} wrong {noun}:\n{told}{more}")
    if not lines:
        raise DataError(f"{path} names no image: it is empty")
    return lines
