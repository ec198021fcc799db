"""A small PASCAL VOC 2007 for tests: JPEG files of a few textures, and the lists of ImageSets/Main."""

from pathlib import Path

import numpy as np
from PIL import Image

from pipelines.datasets.published import VOC_CLASSES
from tests.support.pictures import texture


def write_voc(root: Path, train: int = 6, val: int = 5, test: int = 7) -> dict[str, np.ndarray]:
    """Write VOCdevkit/VOC2007 below `root`; return part -> presence, int8 (N, 20), in the order of the lists.

    Every class has a positive, a negative and, but in the smallest parts, a difficult image in every part.
    """
    folder = root / "VOCdevkit" / "VOC2007"
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    draws, presence, number = np.random.default_rng(5), {}, 0
    for part, count in (("train", train), ("val", val), ("test", test)):
        rows = draws.choice([1, -1, -1, 0], (count, len(VOC_CLASSES))).astype(np.int8)
        rows[0], rows[1] = 1, -1
        presence[part], images = rows, []
        for i in range(count):
            number += 1
            images.append(f"{number:06d}")
            picture = texture(number, 40 + 3 * (i % 3), 40 + 5 * (i % 2))
            if rows[i, 0] == 1:
                picture[:20] = (250, 10, 10)
            Image.fromarray(picture).save(folder / "JPEGImages" / f"{images[-1]}.jpg", quality=92)
        for column, name in enumerate(VOC_CLASSES):
            lines = [f"{one} {value:2d}\n" for one, value in zip(images, rows[:, column])]
            (folder / "ImageSets" / "Main" / f"{name}_{part}.txt").write_text("".join(lines))
    return presence
