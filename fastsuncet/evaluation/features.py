"""Images through a network, the first step of every evaluation: each image exactly once, on any number of ranks.

Shapes: N images in all, n of them on this rank, V views of each, E the width of the network's output.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from fastsuncet.config import Config
from fastsuncet.data.paired_stream import loader_options
from fastsuncet.distributed.collectives import all_gather_rows
from fastsuncet.distributed.launch import Place
from pipelines.datasets.index import ImageIndex
from pipelines.loader import EvaluationLoader, open_evaluation_loader
from pipelines.sampling.augmentation import Center
from pipelines.sampling.step_plan import EvaluationPlan

SUPPORTS = "supports"  # the role of the draws of `embed_views`: a random stream apart from training's


def view_size(size: int) -> tuple[int, int]:
    """Return (crop, resize) of an evaluation view: 224 of 256 as in the paper, in proportion; small images whole."""
    return (size, round(size * 256 / 224)) if size > 64 else (size, size)


def outputs(
    network: nn.Module,  # (B, 3, S, S) -> (B, E), on the place's device
    index: ImageIndex,
    indices: np.ndarray,  # (N,) int64 - which images of the index
    config: Config,  # size of a view, normalization, back-end
    place: Place,
    *,
    batch: int = 256,
    view: Center | None = None,  # None: the config's
    before_batch: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return the network's output for each image, (N, E) float32 on the device, in the order of `indices`.

    Single center crop, BatchNorm in evaluation mode, float32; the network keeps its mode. Each rank computes a block of
    the images, and all ranks return all rows: N x E x 4 bytes on each. No gradient. `before_batch` is called equally
    often on all ranks, so it can communicate; what it raises ends the evaluation. Raises BadImage for an image that
    cannot be decoded, since the accuracy would be another one without it.
    """
    a = config.data.augmentation
    view = view or Center(*view_size(a.size), a.mean, a.std)
    mine, _ = _block(indices, place)
    plan = EvaluationPlan(index, mine, min(batch, len(mine)), (view,))
    loader = open_evaluation_loader(index, plan, **loader_options(config, place))
    rows = _forward(network, loader, len(mine), 1, place, before_batch)
    return all_gather_rows(rows[:, 0])[: len(indices)]  # blocks in rank order are the images' order


def embed_views(
    network: nn.Module,
    index: ImageIndex,
    indices: np.ndarray,  # (N,) int64
    views: int,
    config: Config,
    place: Place,
    *,
    batch: int = 256,
) -> Tensor:
    """Return the network's output for V random views of each image, (N, V, E): resized crops and flips (appendix G).

    Colors are not changed. A view is drawn from (meta.seed, its number, the image's position in `indices`), so it is
    the same on any number of ranks and for every checkpoint. Otherwise as `outputs`.
    """
    crop = replace(config.data.augmentation, jitter=0.0, grey=0.0, blur=0.0)
    mine, first = _block(indices, place)
    plan = EvaluationPlan(
        index,
        mine,
        min(max(1, batch // views), len(mine)),
        (crop,) * views,
        seed=config.meta.seed,
        role=SUPPORTS,
        first=first,
    )
    loader = open_evaluation_loader(index, plan, **loader_options(config, place))
    rows = _forward(network, loader, len(mine), views, place)
    return all_gather_rows(rows)[: len(indices)]


def _block(indices: np.ndarray, place: Place) -> tuple[np.ndarray, int]:
    """Return this rank's block of the images, of equal length on all ranks, and its start in `indices`."""
    length = -(-len(indices) // place.world_size)
    first = place.rank * length
    # The last block is filled up, because ranks gather equal shapes. The callers cut off what was added.
    return np.resize(indices, length * place.world_size)[first:][:length], first


@torch.no_grad()
def _forward(
    network: nn.Module,
    loader: EvaluationLoader,
    images: int,
    views: int,
    place: Place,
    before_batch: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return (n, V, E) of the loader's n images, and close the loader."""
    training = network.training
    network.eval()
    rows, done = None, 0
    try:
        for shown, _, indices in loader:
            before_batch()
            for view, pixels in enumerate(shown):
                h = network(pixels.to(place.device)).float()
                # One block from the start: joining a list of batches would hold every row twice.
                rows = h.new_empty(images, views, h.shape[1]) if rows is None else rows
                rows[done : done + len(h), view] = h
            done += len(indices)
    finally:
        network.train(training)
        loader.close()
    assert rows is not None, "there is at least one image"
    return rows
