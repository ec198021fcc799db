"""`fastsuncet preview`: the views a config makes, as a picture. The first thing to look at when a loss looks odd.

One column an image: the image, its two views as training sees them, and the same two views by the other back-end from
the same draw, so that a difference between DALI and torchvision would be seen. Below, labeled images by class.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fastsuncet.config import Config
from fastsuncet.data import LABELED, UNLABELED, augmentation
from fastsuncet.images import Images, open_images
from fastsuncet.launch import Place
from pipelines.backend import dali_problem
from pipelines.index import ImageIndex
from pipelines.loader import open_loader
from pipelines.params import Augmentation
from pipelines.plan import Plan
from pipelines.sampling import ClassSampler, UnlabeledSampler

COLUMNS = 8
NAMES = {"dali": "DALI", "torchvision": "torchvision"}


def preview(config: Config, path: Path, *, step: int = 0) -> Path:
    """Draws what `step` of a run of `config` sees, on the CPU, into a PNG; returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = sheet(config, step)
    height, width = len(rows), max(len(pictures) for _, pictures in rows)
    figure, axes = plt.subplots(
        height, width, figsize=(1.3 * width + 1.2, 1.45 * height + 0.3), layout="constrained", squeeze=False
    )
    for line, (title, pictures) in zip(axes, rows):
        for axis, cell in zip(line, [*pictures, *[None] * (width - len(pictures))]):
            axis.set_axis_off()
            if cell is not None:
                picture, caption = cell
                axis.imshow(picture, interpolation="nearest")
                axis.set_title(caption, fontsize=7, pad=2)
        line[0].text(-0.12, 0.5, title, transform=line[0].transAxes, ha="right", va="center", fontsize=9)
    figure.suptitle(f"{config.logging.write_tag}, step {step}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def sheet(config: Config, step: int) -> list[tuple[str, list[tuple[np.ndarray, str]]]]:
    """(row title, [(picture (H, W, 3) in [0, 1], caption)]) from top to bottom."""
    place = Place(0, 1, 0, torch.device("cpu"))
    images = open_images(config, place, validation=False)
    view, count = augmentation(config), min(COLUMNS, len(images.train))
    sampler = UnlabeledSampler(len(images.train), count, 1, config.meta.seed)
    plan = Plan(images.train, sampler, (view, view), seed=config.meta.seed, role=UNLABELED)
    visit = plan(step)
    rows = [
        ("images", [(original(images.train, int(i)), images.train.name(int(i))[-22:]) for i in visit.indices])
    ]
    backends = ["dali", "torchvision"] if dali_problem() is None else ["torchvision"]
    seen = {backend: views(images.train, plan, view, backend, step) for backend in backends}
    for number in range(2):
        for backend in backends:
            title = f"view {number + 1}\n{NAMES[backend]}"
            rows.append((title, [(picture, "") for picture in seen[backend][number]]))
    if len(images.split.indices):
        rows.append(("labeled", labeled(config, images, view, step)))
    return rows


def labeled(config: Config, images: Images, view: Augmentation, step: int) -> list[tuple[np.ndarray, str]]:
    """Two images each of the first classes of a step's labeled batch, captioned with their class."""
    chosen = images.split.indices
    classes = min(COLUMNS // 2, config.criterion.classes_per_batch or COLUMNS // 2, images.labeled_classes)
    sampler = ClassSampler(chosen, images.train.labels[chosen], classes, 2, 1, config.meta.seed)
    plan = Plan(images.train, sampler, (view,), seed=config.meta.seed, role=LABELED)
    names = [images.train.classes[label] for label in plan(step).labels]
    (pictures,) = views(images.train, plan, view, "auto", step)
    # The batch is interleaved (a, b, c, a, b, c); a person reads pairs.
    order = np.arange(2 * classes).reshape(2, classes).T.ravel()
    return [(pictures[i], names[i]) for i in order]


def views(
    index: ImageIndex, plan: Plan, view: Augmentation, backend: str, step: int
) -> list[list[np.ndarray]]:
    """The pictures of each view, normalisation undone."""
    loader = open_loader(index, plan, plan.augmentations, backend=backend)
    try:
        mean, std = (np.array(values) for values in (view.mean, view.std))
        batches = [tensor.permute(0, 2, 3, 1).numpy() * std + mean for tensor in loader(step)]
        return [list(np.clip(batch, 0, 1)) for batch in batches]
    finally:
        loader.close()


def original(index: ImageIndex, i: int) -> np.ndarray:
    """The stored image, (H, W, 3) in [0, 1]."""
    if index.pixels is not None:
        return index.pixels[i] / 255
    with Image.open(index.path(i)) as image:
        return np.asarray(image.convert("RGB")) / 255
