"""`fastsuncet preview`: the views a config makes, as a picture. The first thing to look at when a loss looks odd.

One column an image: the image, its two views as training sees them, and the same two views by the other back-end from
the same draw, so that a difference between DALI and torchvision would be seen. Below, labeled images by class,
at the steps that learn from them.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fastsuncet.config import Config
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import LABELED, UNLABELED, PairedStream
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import CheckpointError, ConfigError
from pipelines.backend import dali_problem
from pipelines.datasets.image_headers import readable_by_pil
from pipelines.datasets.index import ImageIndex
from pipelines.loader import open_loader
from pipelines.sampling.augmentation import ViewParams
from pipelines.sampling.step_plan import Plan, Visit

COLUMNS = 8
WIDEST = 22  # characters of a caption
NAMES = {"dali": "DALI", "torchvision": "torchvision"}


def preview(config: Config, path: Path, *, step: int = 0) -> Path:
    """Draws part of what `step` of a run of `config` on one process sees, on the CPU, into `path`; returns that.

    Raises ConfigError for a name that is no picture's, CheckpointError where it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = FigureCanvasAgg.get_supported_filetypes()
    # matplotlib would write another file than the one that is named, or end in a traceback.
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise ConfigError(
            f"--output {path} is no picture's name: it must end in one of {', '.join(sorted(kinds))}"
        )
    rows = sheet(config, step)
    height, width = len(rows), max(len(pictures) for _, pictures in rows)
    figure, axes = plt.subplots(
        height, width, figsize=(1.3 * width + 1.2, 1.45 * height + 0.3), layout="constrained", squeeze=False
    )
    for line, (title, pictures) in zip(axes, rows):
        for axis, cell in zip(line, [*pictures, *[None] * (width - len(pictures))]):
            axis.set_axis_off()
            if cell is not None:
                picture, name = cell
                axis.imshow(picture, interpolation="nearest")
                axis.set_title(name, fontsize=7, pad=2)
        line[0].text(-0.12, 0.5, title, transform=line[0].transAxes, ha="right", va="center", fontsize=9)
    figure.suptitle(f"{config.logging.write_tag}, step {step}", fontsize=10)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise CheckpointError(f"the picture {path} cannot be written: {error.strerror or error}") from error
    finally:
        plt.close(figure)
    return path


def sheet(config: Config, step: int) -> list[tuple[str, list[tuple[np.ndarray, str]]]]:
    """(row title, [(picture (H, W, 3) in [0, 1], caption)]) from top to bottom: part of the batch of `step`.

    Raises ConfigErrors, as the run would, for batches that the images do not fill.
    """
    place = Place(0, 1, 0, torch.device("cpu"))
    images = open_images(config, place, validation=False)
    # The run's own arithmetic and plans, cut to a few rows: a step number means nothing without the batch's size. One
    # process stands for all, since a batch given over all processes does not depend on their number.
    arithmetic = config.resolve(1, *images.counts())
    stream = PairedStream(config, images.train, images.split.indices, arithmetic, place)
    try:
        rows = unlabeled(config, images.train, stream, step) if stream.views else []
        if step < arithmetic.supervised_steps:
            rows.append(("labeled", labeled(config, images.train, stream, step)))
        return rows
    finally:
        stream.close()


def unlabeled(config: Config, index: ImageIndex, stream: PairedStream, step: int) -> list:
    """The batch's first images and their views by every back-end there is."""
    plan = stream.plan(UNLABELED, 0)
    first = Rows(plan, np.arange(min(COLUMNS, plan.batch)))
    backends = ["dali", "torchvision"] if dali_problem() is None else ["torchvision"]
    seen = {backend: views(config, index, first, backend, step) for backend in backends}
    visit = seen[backends[0]][1]
    rows = [("images", [(original(index, int(i)), caption(index.name(int(i)))) for i in visit.indices])]
    for number in range(len(plan.augmentations)):
        for backend in backends:
            title = f"view {number + 1}\n{NAMES[backend]}"
            rows.append((title, [(picture, "") for picture in seen[backend][0][number]]))
    return rows


def labeled(
    config: Config, index: ImageIndex, stream: PairedStream, step: int
) -> list[tuple[np.ndarray, str]]:
    """The first two images of each of the labeled batch's first classes, captioned with their class."""
    plan, classes = stream.plan(LABELED, 0), stream.arithmetic.classes_per_batch
    # The batch is interleaved (a, b, c, a, b, c); a person reads pairs.
    pairs = np.arange(plan.batch).reshape(-1, classes)[:2, : COLUMNS // 2].T.ravel()
    (pictures,), visit = views(config, index, Rows(plan, pairs), config.data.backend, step)
    return [(picture, index.classes[label]) for picture, label in zip(pictures, visit.labels)]


def caption(name: str) -> str:
    """As much of a file's name as fits above a picture: its end, and dots for what is cut off."""
    return name if len(name) <= WIDEST else f"...{name[3 - WIDEST :]}"


class Rows:
    """A plan's step cut to some rows, each with the draws it has in the whole batch: only these are decoded."""

    def __init__(self, plan: Plan, rows: np.ndarray):
        self._plan, self._rows = plan, rows
        self.augmentations, self.batch, self.stand_in = plan.augmentations, len(rows), plan.stand_in

    def __call__(self, step: int, replaced: Mapping[int, int] | None = None) -> Visit:
        """As `Plan.__call__`. The whole batch is drawn, which for thousands of rows takes milliseconds."""
        visit, rows = self._plan(step, replaced), self._rows
        cut = tuple(
            ViewParams(**{field.name: getattr(view, field.name)[rows] for field in fields(view)})
            for view in visit.views
        )
        return Visit(step, visit.indices[rows], visit.labels[rows], cut)


def views(
    config: Config, index: ImageIndex, plan: Rows, backend: str, step: int
) -> tuple[list[list[np.ndarray]], Visit]:
    """The pictures of each view, normalisation undone, and what they were made from, stand-ins included."""
    view = plan.augmentations[0]
    loader = open_loader(index, plan, plan.augmentations, backend=backend, bad_images=config.data.bad_images)
    try:
        mean, std = (np.array(values) for values in (view.mean, view.std))
        batches = [tensor.permute(0, 2, 3, 1).numpy() * std + mean for tensor in loader(step)]
        return [list(np.clip(batch, 0, 1)) for batch in batches], loader.visit(step)
    finally:
        loader.close()


def original(index: ImageIndex, i: int) -> np.ndarray:
    """The stored image, (H, W, 3) in [0, 1]."""
    if index.pixels is not None:
        return index.pixels[i] / 255
    with Image.open(readable_by_pil(index.content(i))) as image:
        return np.asarray(image.convert("RGB")) / 255
