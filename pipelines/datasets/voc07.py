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
from pipelines.datasets.csv_labels import refuse_wrong_lines
from pipelines.datasets.folders import with_headers
from pipelines.datasets.index import ImageIndex
from pipelines.output import first_five

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable"),
    *("dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
_VALUES = {"1": 1, "-1": -1, "0": 0}


def voc07(root: str | Path, *parts: str) -> ImageIndex:
    """Return the images of parts (train, val, test) with `presence` (N, 20), in the order of the lists.

    `root` holds VOCdevkit, or is VOCdevkit, or VOC2007 in it. No image has a single label: `labels` are -1. Raises
    DataError with file and line: a missing list, a wrong line, lists of different images, an image without its file or
    in two parts.
    """
    folder = _folder(Path(root).expanduser())
    lists = {part: _presence(folder, part) for part in parts}
    for part, (images, _) in lists.items():
        missing = [name for name in images if not (folder / "JPEGImages" / f"{name}.jpg").is_file()]
        if missing:
            line = images.index(missing[0]) + 1
            raise DataError(
                f"{_list(folder, CLASSES[0], part)} line {line}: there is no {folder}/JPEGImages/{missing[0]}.jpg"
                + (f", and {len(missing) - 1} more files are missing" if len(missing) > 1 else "")
            )
    names = [name for images, _ in lists.values() for name in images]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(
            f"{folder}: {first_five(twice)} in {' and in '.join(parts)}: the parts must be separate"
        )
    files = [f"JPEGImages/{name}.jpg" for name in names]
    index = with_headers(folder, files, np.full(len(names), -1), CLASSES)
    return replace(index, presence=np.concatenate([presence for _, presence in lists.values()]))


def part_size(root: str | Path, part: str) -> int:
    """Return the number of images of one part, from a list of it. Raises DataError as `voc07`."""
    return len(_read_list(_list(_folder(Path(root).expanduser()), CLASSES[0], part)))


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
    """Return the images of a part in the order of its first list, and int8 (N, 20) what all lists say of them."""
    paths = [_list(folder, name, part) for name in CLASSES]
    lists = [_read_list(path) for path in paths]
    first = lists[0]
    for path, lines in zip(paths, lists):
        for image in [*lines, *first]:
            if image not in first:
                raise DataError(f"{path} line {lines[image][0]} names {image}, which {paths[0]} does not")
            if image not in lines:
                raise DataError(
                    f"{path} does not name {image}, which {paths[0]} does on line {first[image][0]}"
                )
    return list(first), np.array([[lines[image][1] for lines in lists] for image in first], np.int8)


def _read_list(path: Path) -> dict[str, tuple[int, int]]:
    """Return image -> (line, value) of a list."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        archive = f"VOC{'test' if path.stem.endswith('_test') else 'trainval'}_06-Nov-2007.tar"
        raise DataError(f"there is no {path}: {archive} has it, unpack that one over the others") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the list {path}: {error}") from error
    lines: dict[str, tuple[int, int]] = {}
    wrong: list[tuple[int, str]] = []
    for number, row in enumerate(text.splitlines(), 1):
        cells = row.split()
        if len(cells) != 2:
            wrong.append((number, f"{row!r} is not an image and 1, -1 or 0"))
        elif not re.fullmatch(r"[A-Za-z0-9_]+", cells[0]):
            wrong.append((number, f"{cells[0]!r} is not the name of an image"))
        elif cells[1] not in _VALUES:
            wrong.append((number, f"{cells[1]!r} is not 1, -1 or 0"))
        elif cells[0] in lines:
            wrong.append((number, f"{cells[0]} stands on line {lines[cells[0]][0]} already"))
        else:
            lines[cells[0]] = number, _VALUES[cells[1]]
    refuse_wrong_lines(path, wrong)
    if not lines:
        raise DataError(f"{path} names no image: it is empty")
    return lines
