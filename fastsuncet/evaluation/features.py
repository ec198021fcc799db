"""Images through a network: what every evaluation starts from. Each image exactly once, on any number of ranks.

Shapes: N images in all, n of them on this rank, V views of each, E the width of the network's output.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from fastsuncet.config import Config
from fastsuncet.data.paired_stream import loader_options
from fastsuncet.distributed.collectives import all_gather_rows
from fastsuncet.distributed.launch import Place
from fastsuncet.models.resnet import Model
from pipelines.datasets.index import ImageIndex
from pipelines.loader import PassLoader, open_evaluation_loader, open_pass_loader
from pipelines.sampling.augmentation import Center
from pipelines.sampling.step_plan import PassPlan

SUPPORTS = "supports"  # the role of `embed_views`' draws: a stream apart from training's


def view_size(size: int) -> tuple[int, int]:
    """(crop, resize) of an evaluation view: the paper's 224 out of 256 in proportion; a small image is shown whole."""
    return (size, round(size * 256 / 224)) if size > 64 else (size, size)


def embed(
    model: Model,
    index: ImageIndex,
    indices: np.ndarray,  # (N,) int64 - which images of the index
    config: Config,
    place: Place,
    *,
    batch: int = 256,
) -> Tensor:
    """`outputs` of the model's encoder, before the projection head: (N, E) float32 on the device."""
    return outputs(model.encoder, index, indices, config, place, batch=batch)


def outputs(
    network: nn.Module,  # (B, 3, S, S) -> (B, E), on the place's device
    index: ImageIndex,
    indices: np.ndarray,  # (N,) int64 - which images of the index
    config: Config,  # size of a view, normalisation, back-end
    place: Place,
    *,
    batch: int = 256,
    view: Center | None = None,  # None: the config's
) -> Tensor:
    """What `network` makes of each image, (N, E) float32 on the device, in the order of `indices`.

    Single centre crop, BatchNorm in evaluation mode, float32; the network is put back into the mode it came in. Each
    rank takes a block of the images and all ranks return all rows, N x E x 4 bytes on each. No gradient. Raises
    BadImage for an image that cannot be decoded: an accuracy over other images would be another accuracy.
    """
    a = config.data.augmentation
    view = view or Center(*view_size(a.size), a.mean, a.std)
    mine, _ = _block(indices, place)
    loader = open_evaluation_loader(
        index,
        mine,
        min(batch, len(mine)),
        view.size,
        view.resize,
        mean=view.mean,
        std=view.std,
        **loader_options(config, place),
    )
    rows = _forward(network, loader, len(mine), 1, place)
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
    """`outputs` of V random views of each image, (N, V, E): random resized crops and flips, no colour (appendix G).

    A view is drawn from (meta.seed, its number, the image's place in `indices`): the same on any number of ranks, and
    at every checkpoint.
    """
    crop = replace(config.data.augmentation, jitter=0.0, grey=0.0, blur=0.0)
    mine, first = _block(indices, place)
    plan = PassPlan(
        index,
        mine,
        min(max(1, batch // views), len(mine)),
        (crop,) * views,
        seed=config.meta.seed,
        role=SUPPORTS,
        first=first,
    )
    rows = _forward(
        network, open_pass_loader(index, plan, **loader_options(config, place)), len(mine), views, place
    )
    return all_gather_rows(rows)[: len(indices)]


def _block(indices: np.ndarray, place: Place) -> tuple[np.ndarray, int]:
    """This rank's block of the images, equally long on all ranks, and where in `indices` it begins."""
    share = -(-len(indices) // place.world_size)
    # A ragged share is filled up so that ranks gather equal shapes; the callers cut the filling off again.
    first = place.rank * share
    return np.resize(indices, share * place.world_size)[first:][:share], first


@torch.no_grad()
def _forward(network: nn.Module, loader: PassLoader, images: int, views: int, place: Place) -> Tensor:
    """(n, V, E) of the loader's n images."""
    training = network.training
    network.eval()
    try:
        rows, done = None, 0
        for shown, _, _ in loader:
            for view, pixels in enumerate(shown if isinstance(shown, list) else [shown]):
                h = network(pixels.to(place.device)).float()
                # One block from the start: a list of batches joined at the end would hold every row twice.
                rows = h.new_empty(images, views, h.shape[1]) if rows is None else rows
                rows[done : done + len(h), view] = h
            done += len(h)
    finally:
        network.train(training)
        loader.close()
    return rows
