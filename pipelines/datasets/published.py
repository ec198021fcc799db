"""Data sets as others publish them: CIFAR-10, CIFAR-100, PASCAL VOC 2007, scikit-learn's digits. And generated images.

All but VOC's are held in memory as uint8. torchvision compares the MD5 of every file of CIFAR's authors with the
published one before it unpickles any of them.
"""

import functools
import http.client
import importlib.util
import math
import os
import re
import socket
import tarfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from pipelines.data_errors import DataError
from pipelines.datasets.folders import image_folder, with_headers
from pipelines.datasets.image_headers import in_threads, read_rgb
from pipelines.datasets.index import ImageIndex, class_numbers
from pipelines.output import first_five

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10

VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable"),
    *("dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
# Bytes of generated pixels. A larger data set is not small, and every rank holds a copy.
_LIMIT = 4 << 30
_TIMEOUT = 60  # seconds without a byte


def cifar(kind: str, root: str | Path, *, train: bool = True, download: bool = False) -> ImageIndex:
    """Return the 50,000 training or 10,000 test images of `kind` ("cifar10", "cifar100"), uint8 32 x 32 RGB.

    Uses the first of these that exists:

    - the authors' Python files, in `root` or in `root`/cifar-10-batches-py (cifar-100-python), in their order;
    - folders of images, `root`/train/CLASS/ and `root`/test/CLASS/, in order of their paths;
    - the authors' archive in `root`, which is unpacked; with `download` it is fetched first.

    Raises DataError for anything else, and for a file whose MD5 is not the published one: it is not opened.
    """
    # Imported late: it takes more than a second, and most data sets do without.
    from torchvision import datasets
    from torchvision.datasets.utils import check_integrity

    root, part = Path(os.path.expanduser(root)), "train" if train else "test"
    published = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[kind]
    title = kind.upper().replace("CIFAR", "CIFAR-")
    flat = (root / published.train_list[0][0]).is_file()
    folder = root if flat else root / published.base_folder
    if not folder.is_dir() and (root / part).is_dir():
        index = image_folder(root / part)
        if len(index.classes) != int(kind[5:]):
            raise DataError(f"{root / part} has {len(index.classes)} class folders; {title} has {kind[5:]}")
        index.require_good()
        if len(other := np.flatnonzero((index.sizes != 32).any(axis=1))):
            raise DataError(f"{index.path(other[0])} has not 32 x 32 pixels, as the images of {title} have")
        try:
            pixels = in_threads(lambda i: read_rgb(index.path(i)), len(index))
        except RuntimeError as error:
            raise DataError(f"an image of {title} cannot be decoded: {error}") from error
        return replace(index, pixels=np.stack(pixels))

    class Files(published):
        base_folder = "." if flat else published.base_folder

    try:
        found = Files(root, train)
    except RuntimeError:
        if flat or not (download or check_integrity(root / published.filename, published.tgz_md5)):
            raise DataError(_problem(title, root, folder, published)) from None
        found = _fetched(Files, root, train)
    names = (f"{part}/{i:05d}" for i in range(len(found)))
    return pixel_index(names, np.array(found.targets), tuple(found.classes), found.data)


def _problem(title: str, root: Path, folder: Path, published: "type[CIFAR10]") -> str:
    """Return why the authors' files in `folder` cannot be used, and what to do."""
    from torchvision.datasets.utils import check_integrity

    archive, remedy = root / published.filename, "or set data.download (transfer.download) to true"
    if folder.is_dir():
        classes = published.meta["filename"], published.meta["md5"]
        files = [*published.train_list, *published.test_list, classes]
        wrong = ", ".join(name for name, md5 in files if not check_integrity(folder / name, md5))
        return (
            f"{folder} is not {title} as published: missing, or with another MD5: {wrong}. Unpack {archive.name} "
            f"there again" + ("" if folder == root else f", {remedy}")
        )
    if archive.exists():
        return f"{archive} is not {title}'s archive: its MD5 is not {published.tgz_md5}. Delete it, {remedy}"
    return (
        f"no {title} under {root}: neither {folder.name}/ nor train/CLASS/ and test/CLASS/ nor {archive.name}. "
        f"Set data.root (transfer.root) to the folder with one of them, {remedy}"
    )


def _fetched(dataset: "type[CIFAR10]", root: Path, train: bool) -> "CIFAR10":
    """Return torchvision's data set, downloaded if its archive is not in `root` already, and unpacked."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT)  # torchvision sets none: a silent server would hold every rank forever
    try:
        return dataset(root, train, download=True)
    except (RuntimeError, OSError, EOFError, tarfile.TarError, http.client.HTTPException) as error:
        remedy = f"Run the same command again, or put {dataset.filename} there by other means"
        text = f"cannot download or unpack {dataset.url} in {root}: {error or type(error).__name__}"
        raise DataError(f"{text}. {remedy}") from error
    finally:
        socket.setdefaulttimeout(before)


def voc07(root: str | Path, *parts: str) -> ImageIndex:
    """Return PASCAL VOC 2007's images of parts (train, val, test) with `presence` (N, 20), in the order of its lists.

    A list of ImageSets/Main, CLASS_PART.txt, has a line `ID VALUE` for every image of the part: 1 the class is in the
    image, -1 it is not, 0 it is there but too difficult to be counted. The boxes in Annotations/ are not read.

    `root` holds VOCdevkit, or is VOCdevkit, or VOC2007 in it. No image has a single label: `labels` are -1. Raises
    DataError with file and line: a missing list, a wrong line, lists of different images, an image in two parts. An
    image without its file is a bad one.
    """
    folder = _voc_folder(root)
    names, columns = [], [[] for _ in VOC_CLASSES]
    for part in parts:
        lists = [_voc_list(folder, name, part) for name in VOC_CLASSES]
        first, images, _ = lists[0]
        names += images
        for (path, others, values), column in zip(lists, columns):
            if others != images:
                raise DataError(f"{path} names other images than {first}, or in another order")
            column += values
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{folder}: {first_five(twice)} twice in the lists of {' and '.join(parts)}")
    files = [f"JPEGImages/{name}.jpg" for name in names]
    index = with_headers(folder, files, np.full(len(names), -1), VOC_CLASSES)
    return replace(index, presence=np.array(columns, np.int8).T.copy())


def part_size(root: str | Path, part: str) -> int:
    """Return the number of images of one part, from a list of it. Raises DataError as `voc07`."""
    return len(_voc_list(_voc_folder(root), VOC_CLASSES[0], part)[1])


def _voc_folder(root: str | Path) -> Path:
    root = Path(os.path.expanduser(root))
    for folder in (root / "VOCdevkit" / "VOC2007", root / "VOC2007", root):
        if (folder / "ImageSets" / "Main").is_dir():
            return folder
    archives = "VOCtrainval_06-Nov-2007.tar and VOCtest_06-Nov-2007.tar"
    raise DataError(f"no PASCAL VOC 2007 (VOCdevkit/VOC2007) under {root}: unpack {archives} there")


def _voc_list(folder: Path, name: str, part: str) -> tuple[Path, list[str], list[int]]:
    """Return a list, its images and their values."""
    path = folder / "ImageSets" / "Main" / f"{name}_{part}.txt"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        archive = f"VOC{'test' if part == 'test' else 'trainval'}_06-Nov-2007.tar"
        raise DataError(f"there is no {path}: {archive} has it, unpack that one over the others") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the list {path}: {error}") from error
    found = [re.fullmatch(r"\s*([A-Za-z0-9_]+)\s+(-1|0|1)\s*", line) for line in lines]
    if None in found or not lines:
        number = found.index(None) + 1 if lines else 1
        raise DataError(f"{path} line {number} is not the name of an image and 1, -1 or 0")
    return path, [each[1] for each in found if each], [int(each[2]) for each in found if each]


def digits(*, train: bool = True) -> ImageIndex:
    """Return scikit-learn's 1,797 handwritten digits: 8 x 8 gray levels, enlarged bilinearly to 16 x 16 RGB.

    Of each class in order, every fifth image is a test image: the same 1,442 train and 355 test images on every
    machine. Raises DataError with the package to install where scikit-learn is missing.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("the digits come with scikit-learn, which is not installed: pip install scikit-learn")
    # Read here, because importing scikit-learn takes seconds, in every process.
    pixels, target = _enlarged(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz")
    test = np.concatenate([np.flatnonzero(target == label)[4::5] for label in range(10)])
    chosen = np.setdiff1d(np.arange(len(target)), test) if train else np.sort(test)
    names = (f"digits/{i:04d}" for i in chosen)
    return pixel_index(names, target[chosen], tuple("0123456789"), pixels[chosen])


@functools.cache
def _enlarged(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return all digits, uint8 (N, 16, 16, 3), and their labels. Making them takes a quarter of a second."""
    table = np.loadtxt(file, delimiter=",")  # a row a digit: 64 levels from 0 to 16, and its label
    data, target = table[:, :-1], table[:, -1].astype(np.int64)
    gray = np.rint(data.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    large = [Image.fromarray(image).resize((16, 16), Image.Resampling.BILINEAR) for image in gray]
    return np.repeat(np.stack([np.asarray(image) for image in large])[..., None], 3, axis=-1), target


def synthetic(images: int, classes: int, size: int, *, seed: int, train: bool = True) -> ImageIndex:
    """Return `images` generated ones to train on, or a tenth to validate on: noise in a color for each class.

    They are uint8 (size, size, 3) and the same for the same `seed`, for trying settings and clusters without data.
    Raises DataError when they take more than 4 GiB.
    """
    count = images if train else max(images // 10, 1)
    if count * size**2 * 3 > _LIMIT:
        raise DataError(f"{count} images of {size} x {size} are too many to hold in memory")

    def noise(role: int, *shape: int) -> np.ndarray:
        words = np.random.Philox(key=np.array([seed, role], np.uint64)).random_raw(-(-math.prod(shape) // 8))
        return words.astype("<u8").view(np.uint8)[: math.prod(shape)].reshape(shape) // 2

    labels = np.arange(count) % classes
    pixels = noise(1 if train else 2, count, size, size, 3) + noise(0, classes, 1, 1, 3)[labels]
    names = (f"synthetic {'train' if train else 'test'}/{i:06d}" for i in range(count))
    return pixel_index(names, labels, class_numbers(classes), pixels)


def pixel_index(
    names: Iterable[str], labels: np.ndarray, classes: tuple[str, ...], pixels: np.ndarray
) -> ImageIndex:
    """Return the index of `pixels`, uint8 (N, H, W, 3), with `labels` (N,), positions in `classes`."""
    pixels = np.ascontiguousarray(pixels)  # the engines take no other strides
    sizes = np.full((len(pixels), 2), pixels.shape[1:3], np.int32)
    return ImageIndex(None, list(names), labels.astype(np.int64), classes, sizes, pixels=pixels)
