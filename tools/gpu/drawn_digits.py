"""Digits drawn in a font, for a machine without scikit-learn: something small that can be learned, made in a second.

Laid out as CIFAR-10's folders, which are read into memory as those of a run are: train/CLASS/ and test/CLASS/, a digit
a class. No figure of them compares with one of the real digits.
"""

import shutil
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pipelines.datasets.cifar import CLASSES

SIDE = 32
COUNTS = {"train": 144, "test": 36}  # of each digit; scikit-learn has 144 and 35 or 36


def draw_digits(folder: Path, seed: int = 0) -> Path:
    """Writes the pictures into `folder`, unless it is there, and returns it; the same ones for the same seed."""
    if folder.exists():
        return folder
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)  # of a part whose time ran out
    generator = np.random.default_rng(seed)
    for part, count in COUNTS.items():
        for digit, name in enumerate(CLASSES["cifar10"]):
            place = partial / part / name
            place.mkdir(parents=True)
            for number in range(count):
                drawn(str(digit), generator).save(place / f"{number:03}.png")
    partial.rename(folder)
    return folder


def drawn(digit: str, generator: np.random.Generator) -> Image.Image:
    """One digit in bright ink on dark noise, somewhat turned, moved, stretched and faded; SIDE x SIDE, RGB."""
    ink = Image.new("L", (10, 11))
    ImageDraw.Draw(ink).text((2, 0), digit, fill=255, font=ImageFont.load_default_imagefont())
    width, height = generator.integers(20, 33, size=2).tolist()
    ink = ink.resize((width, height), Image.Resampling.BILINEAR)
    page = Image.new("L", (SIDE, SIDE))
    page.paste(ink, tuple(generator.integers(-3, 4, size=2) + (SIDE - np.array([width, height])) // 2))
    page = page.rotate(generator.uniform(-15, 15), Image.Resampling.BILINEAR)
    levels = np.asarray(page) * generator.uniform(0.6, 1.0) + generator.normal(0, 12, (SIDE, SIDE))
    return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8)).convert("RGB")
