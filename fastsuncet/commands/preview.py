"""`fastsuncet preview`: the views that a config makes, as a picture. Look at it first when a loss looks odd.

Each column shows one image: the image, its two views as training sees them, and the same two views by the other
back-end from the same draw, so that a difference between DALI and torchvision shows. Below are labeled images by class,
at the steps that learn from them.
"""

import io
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fastsuncet.checkpoint.run_folder import disk_errors, refuse_existing
from fastsuncet.config import Config
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import LABELED, UNLABELED, PairedStream
from fastsuncet.distributed.place import Place
from fastsuncet.errors import ConfigError
from fastsuncet.evaluation.confusion import shown_name
from fastsuncet.metrics.trackers import Trackers, require_packages
from fastsuncet.versions import drawing_problem
from pipelines import atomic_files
from pipelines.backend import Backend, LoaderOptions, dali_problem
from pipelines.loader import Loader
from pipelines.sampling.step_plan import BatchDraws, Plan

COLUMNS = 8

Pictures = list[tuple[np.ndarray, str]]  # (H, W, 3) in [0, 1], and a caption


def preview(config: Config, path: Path, *, step: int = 0, force: bool = False) -> Path:
    """Draw part of what `step` of a run of `config` on one process sees, on the CPU, into `path`; return `path`.

    The trackers that `config` names get the picture too.
    """
    if problem := drawing_problem():
        raise ConfigError(problem)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise ConfigError(
            f"--output {path} is not the name of a picture: it must end in one of {', '.join(sorted(kinds))}"
        )
    require_packages(config)
    refuse_existing(path, force)
    rows = sheet(config, step)
    height, width = len(rows), max(len(pictures) for _, pictures in rows)
    figure = Figure(figsize=(1.3 * width + 1.2, 1.45 * height + 0.3), dpi=110)
    axes = figure.subplots(height, width, squeeze=False)
    for axis in axes.ravel():
        axis.set_axis_off()
    for line, (title, pictures) in zip(axes, rows):
        for axis, (picture, caption) in zip(line, pictures):
            axis.imshow(picture, interpolation="nearest")
            # With `y`, because matplotlib would look for room between the ticks of each picture.
            axis.set_title(shown_name(caption), y=1, fontsize=7, pad=2, parse_math=False)
        line[0].text(-0.12, 0.5, title, transform=line[0].transAxes, ha="right", va="center", fontsize=9)
    figure.suptitle(f"{config.logging.write_tag}, step {step}", fontsize=10)
    ConstrainedLayoutEngine().execute(figure)  # once: a figure's own engine draws it again for each file
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lower().removeprefix("."))
    with disk_errors(path, "--output"):
        atomic_files.make_folder(path.parent)
        atomic_files.replace(path, picture.getvalue())
    if config.logging.trackers:
        figure.savefig(png := io.BytesIO(), format="png")
        pixels = np.asarray(Image.open(png).convert("RGB"))
        with Trackers(config, config.run_folder) as trackers:
            trackers.tell(lambda tracker: tracker.picture("views", pixels, step))
    return path


def sheet(config: Config, step: int) -> list[tuple[str, Pictures]]:
    """Return (title, pictures) of each row from top to bottom: part of the batch of `step`.

    Raises ConfigErrors, as the run would, for batches that the images do not fill.
    """
    place = Place(0, 1, torch.device("cpu"))
    images = open_images(config, place, validation=False)
    # The run's own arithmetic and plans, cut to a few rows: a step number means nothing without the batch size. One
    # process stands for all, because a batch size given over all processes does not depend on their number.
    arithmetic = config.resolve(1, *images.counts())
    stream = PairedStream(config, images.train, images.split.indices, arithmetic, place)
    with closing(stream):
        rows = _unlabeled(config, stream, step) if stream.views else []
        if step < arithmetic.supervised_steps:
            rows.append(("labeled", _labeled(config, stream, step)))
    return rows


def _unlabeled(config: Config, stream: PairedStream, step: int) -> list[tuple[str, Pictures]]:
    """Return the batch's first images and their views by every installed back-end."""
    plan, index = stream.plan(UNLABELED, 0), stream.index
    first = SomeRows(plan, np.arange(min(COLUMNS, plan.batch)))
    names: dict[Backend, str] = {"dali": "DALI"} if dali_problem() is None else {}
    names["torchvision"] = "torchvision"
    seen = {name: _views(config, first, backend, step) for backend, name in names.items()}
    draws = next(iter(seen.values()))[1]
    rows = [("images", [(index.rgb(i) / 255, index.name(i)) for i in draws.indices.tolist()])]
    for view in range(len(plan.augmentations)):
        for name, (views, _) in seen.items():
            rows.append((f"view {view + 1}\n{name}", [(picture, "") for picture in views[view]]))
    return rows


def _labeled(config: Config, stream: PairedStream, step: int) -> Pictures:
    """Return the first two images of each of the labeled batch's first classes, captioned with their class."""
    plan, classes = stream.plan(LABELED, 0), stream.arithmetic.classes_per_batch
    # The batch is interleaved (a, b, c, a, b, c); the picture shows pairs.
    pairs = np.arange(plan.batch).reshape(-1, classes)[:2, : COLUMNS // 2].T.ravel()
    (pictures, *_), draws = _views(config, SomeRows(plan, pairs), config.data.backend, step)
    return [(picture, stream.index.classes[label]) for picture, label in zip(pictures, draws.labels)]


class SomeRows(Plan):
    """A plan's steps cut to some rows, each with its draws in the whole batch, so that only these are decoded."""

    def __init__(self, plan: Plan, rows: np.ndarray):
        super().__init__(plan.index, plan.sampler, plan.augmentations, seed=plan.seed, role=plan.role)
        self._plan, self._rows, self.batch = plan, rows, len(rows)

    def __call__(self, step: int, replaced: Mapping[int, int] | None = None) -> BatchDraws:
        """Return the draws, as `Plan.__call__`. The whole batch is drawn: milliseconds for thousands of rows."""
        draws, rows = self._plan(step, replaced), self._rows
        views = tuple(
            type(view)(**{field.name: getattr(view, field.name)[rows] for field in fields(view)})
            for view in draws.views
        )
        return BatchDraws(step, draws.indices[rows], draws.labels[rows], views)


def _views(
    config: Config, plan: SomeRows, backend: Backend, step: int
) -> tuple[list[list[np.ndarray]], BatchDraws]:
    """Return the pictures of each view without normalization, and their draws, stand-ins included."""
    view = plan.augmentations[0]
    mean, std = np.array(view.mean), np.array(view.std)
    loader = Loader(plan, LoaderOptions(backend=backend), bad_images=config.data.bad_images)
    with closing(loader):
        batches = [tensor.permute(0, 2, 3, 1).numpy() * std + mean for tensor in loader(step)]
        return [list(np.clip(batch, 0, 1)) for batch in batches], loader.draws(step)
