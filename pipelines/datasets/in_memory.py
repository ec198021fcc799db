"""Small data sets held in memory as uint8: scikit-learn's digits, generated images, any images of one small size."""

import functools
import importlib.util
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from pipelines.data_errors import BadImage, DataError
from pipelines.datasets.image_headers import in_threads, read_rgb
from pipelines.datasets.index import ImageIndex, class_numbers
from pipelines.datasets.string_table import Names

# Bytes of pixels. A larger data set is not small, and every rank holds a copy.
_LIMIT = 4 << 30


def resident(index: ImageIndex) -> ImageIndex:
    """Return the same images decoded by PIL into `pixels`, (N, H, W, 3) uint8 RGB.

    Raises DataError when the images differ in size or take more than 4 GiB, and BadImage with the names of all
    images that cannot be decoded.
    """
    index.require_good()
    (height, width), *_ = index.sizes.tolist()
    differing = np.flatnonzero((index.sizes != (height, width)).any(axis=1))
    if len(differing):
        h, w = index.sizes[differing[0]]
        raise DataError(
            f"images held in memory must be of one size, but {index.path(0)} has {width} x {height} pixels "
            f"and {index.path(differing[0])} {w} x {h}"
        )
    if len(index) * height * width * 3 > _LIMIT:
        raise DataError(f"{len(index)} images of {width} x {height} are too many to hold in memory")
    pixels = np.empty((len(index), height, width, 3), np.uint8)
    bad: dict[int, str] = {}

    def decode(i: int) -> None:
        try:
            pixels[i] = read_rgb(index.path(i))
        except RuntimeError as error:
            bad[i] = f"{type(error.__cause__).__name__}: {error.__cause__}"

    in_threads(decode, len(index), 4)
    if bad:
        raise BadImage([(str(index.path(i)), bad[i]) for i in sorted(bad)])
    return replace(index, pixels=pixels)


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
    sizes = np.full((len(pixels), 2), pixels.shape[1:3], np.int32)
    return ImageIndex(None, Names.of(names), labels.astype(np.int64), classes, sizes, pixels=pixels)
