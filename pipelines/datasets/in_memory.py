"""Small data sets held in memory as uint8: scikit-learn's digits, and any images of one small size."""

from dataclasses import replace

import numpy as np
from PIL import Image

from pipelines.data_errors import BadImage, DataError
from pipelines.datasets.image_headers import Progress, in_threads
from pipelines.datasets.index import ImageIndex

_LIMIT = 4 << 30  # bytes of pixels: above this it is no small data set, and every rank holds a copy


def resident(index: ImageIndex, *, threads: int = 4, progress: Progress | None = None) -> ImageIndex:
    """The same images decoded once into `pixels`, (N, H, W, 3) uint8 RGB, by PIL.

    Raises DataError when the images differ in size or take more than 4 GiB, and BadImage, which names every
    one of them, for images that cannot be decoded.
    """
    index.require_good()
    differing = np.flatnonzero((index.sizes != index.sizes[:1]).any(axis=1))
    if len(differing):
        (height, width), (h, w) = index.sizes[0], index.sizes[differing[0]]
        raise DataError(
            f"images held in memory must be of one size, but {index.path(0)} has {width} x {height} pixels "
            f"and {index.path(differing[0])} {w} x {h}"
        )
    height, width = index.sizes[0].tolist()
    shape = (len(index), height, width, 3)
    if np.prod(shape, dtype=np.int64) > _LIMIT:
        raise DataError(f"{len(index)} images of {width} x {height} are too many to hold in memory")
    pixels, bad = np.empty(shape, np.uint8), {}

    def decode(i: int) -> None:
        try:
            with Image.open(index.path(i)) as image:
                pixels[i] = image.convert("RGB")
        except (OSError, ValueError) as error:
            bad[i] = f"{type(error).__name__}: {error}"

    in_threads(decode, len(index), threads, progress)
    if bad:
        raise BadImage([(str(index.path(i)), bad[i]) for i in sorted(bad)])
    return replace(index, pixels=pixels)


def digits(*, train: bool = True) -> ImageIndex:
    """scikit-learn's 1,797 handwritten digits: 8 x 8 grey levels, enlarged bilinearly to 16 x 16 RGB.

    Of each class in order, every fifth image is a test image: the same 1,442 train and 355 test images
    everywhere. Raises DataError that names the package to install where scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            'the digits come with scikit-learn, which is not installed: pip install "fastsuncet[demo]"'
        ) from error
    data = load_digits()
    place_in_class = np.empty(len(data.target), np.int64)
    for label in range(10):
        members = np.flatnonzero(data.target == label)
        place_in_class[members] = np.arange(len(members))
    chosen = np.flatnonzero((place_in_class % 5 != 4) == train)
    grey = np.rint(data.images[chosen] * (255 / 16)).astype(np.uint8)  # (n, 8, 8), levels 0..16 before
    large = [Image.fromarray(image).resize((16, 16), Image.Resampling.BILINEAR) for image in grey]
    pixels = np.repeat(np.stack([np.asarray(image) for image in large])[..., None], 3, axis=-1)
    return ImageIndex(
        root=None,
        files=[f"digits/{i:04d}" for i in chosen],
        labels=data.target[chosen].astype(np.int64),
        classes=tuple("0123456789"),
        sizes=np.full((len(chosen), 2), 16, np.int32),
        pixels=pixels,
    )
