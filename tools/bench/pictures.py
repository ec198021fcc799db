"""Photograph-like pictures for a measurement without images of its own."""

from pathlib import Path

import numpy as np
from PIL import Image

from pipelines.datasets.folders import image_folder
from pipelines.datasets.index import ImageIndex


def texture(seed: int, height: int, width: int) -> np.ndarray:
    """Return (height, width, 3) uint8: colored waves of many lengths, a hard edge, noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / 64
    pixels = np.full((height, width, 3), rng.uniform(80, 170, 3))
    for octave in range(7):
        fy, fx, phase = rng.normal(0, 2**octave, 3)
        wave = np.sin(fy * y + fx * x + phase)[:, :, None]
        pixels += wave * rng.uniform(-60, 60, 3) / 1.4**octave
    pixels[height // 3 :, width // 2 :] *= rng.uniform(0.4, 1.4, 3)
    pixels += rng.normal(0, 8, pixels.shape)
    return pixels.clip(0, 255).astype(np.uint8)


def write_picture(path: Path, number: int, height: int, width: int) -> None:
    """Write `texture` as a JPEG, with roughly the detail of a photograph."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(texture(number, height, width)).save(path, quality=92)


def write_pictures(root: Path, count: int = 12, classes: int = 3, side: int = 96) -> ImageIndex:
    """Write an image folder of JPEGs of varied sizes, and return its index."""
    for i in range(count):
        path = root / f"class_{i % classes}" / f"image {i:02}.jpg"
        write_picture(path, i, side + 17 * (i % 4), side + 11 * (i % 5))
    return image_folder(root)
