"""Images through a network, the first step of every evaluation: each image exactly once, on any number of ranks.

Shapes: N images, E the width of the network's output.
"""

import contextlib
import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from fastsuncet.config import Config
from fastsuncet.data.paired_stream import loader_options
from fastsuncet.distributed.collectives import all_gather_rows
from fastsuncet.distributed.place import Place
from fastsuncet.errors import ConfigError
from pipelines.datasets.index import ImageIndex
from pipelines.loader import open_evaluation_loader
from pipelines.output import show_progress
from pipelines.sampling.augmentation import Center
from pipelines.sampling.step_plan import EvaluationPlan

_modes = threading.Lock()  # of a network whose modules are in evaluation mode for a while
SUPPORTS = "supports"  # the role of the draws of random views: a stream apart from training's


def view_size(size: int) -> tuple[int, int]:
    """Return (crop, resize) of an evaluation view: 224 of 256 as in the paper, in proportion; small images whole."""
    return (size, round(size * 256 / 224)) if size > 64 else (size, size)


def evaluation_view(config: Config) -> Center:
    """Return the view that every evaluation of `config` sees: one center crop, normalized as in training."""
    a = config.data.augmentation
    return Center(*view_size(a.size), a.mean, a.std, config.data.exif_orientation)


@torch.no_grad()
def outputs(
    network: nn.Module,  # (B, 3, S, S) -> (B, E), on the place's device
    index: ImageIndex,
    indices: np.ndarray,  # (N,) int64 - which images of the index
    config: Config,  # size of a view, normalization, back-end
    place: Place,
    *,
    crops: int = 0,  # random views of each image in place of its center crop
    batch: int = 256,
    view: Center | None = None,  # None: the config's
    before_batch: Callable[[], None] = lambda: None,
    what: str | None = None,  # as which a terminal shows how many images are done
) -> Tensor:
    """Return the network's output for each image, (N, E) float32 on the device, in the order of `indices`.

    Single center crop, or with `crops` (N, crops, E) of resized crops and flips without changes of color (appendix G).
    One is drawn from (meta.seed, its number, the image's position in `indices`), so it is the same on any number of
    ranks and for every checkpoint.

    BatchNorm in evaluation mode, in the network's dtype; every module keeps its mode. Each rank computes a block of the
    images, and all ranks return all rows: N x E x 4 bytes on each. No gradient. `before_batch` is called equally often
    on all ranks, so it can communicate; what it raises ends the evaluation. Raises BadImage for an image that cannot be
    decoded, since the accuracy would be another one without it.
    """
    views = (config.data.augmentation.uncolored,) * crops or (view or evaluation_view(config),)
    count = -(-len(indices) // place.world_size)
    first = place.rank * count
    # The last block is filled up, because ranks gather equal shapes. What was added is cut off at the end.
    mine = np.resize(indices, count * place.world_size)[first:][:count]
    draws = {"seed": config.meta.seed, "role": SUPPORTS, "first": first}
    plan = EvaluationPlan(index, mine, min(max(1, batch // len(views)), count), views, **draws)
    loader = open_evaluation_loader(plan, loader_options(config, place))
    # A caller's network can have 16 bits or no parameter, and frozen BatchNorms in a network that trains.
    like = next(network.parameters(), torch.empty(0, device=place.device))
    rows, done, undo = None, 0, contextlib.ExitStack()
    try:
        undo.enter_context(_modes)
        if training := [module for module in network.modules() if module.training]:
            network.eval()
            undo.callback(lambda: [setattr(module, "training", True) for module in training])
        else:
            undo.close()  # threads share a network that is in evaluation mode
        for shown in loader:
            before_batch()
            for number, pixels in enumerate(shown):
                h = network(pixels.to(like))
                if not isinstance(h, Tensor) or h.ndim != 2 or len(h) != len(pixels):
                    kind = f"a tensor {tuple(h.shape)}" if isinstance(h, Tensor) else type(h).__name__
                    raise ConfigError(
                        f"an encoder maps images to a tensor (images, width), not {len(pixels)} of them to {kind}"
                    )
                h = h.float()
                # One block from the start: joining a list of batches would hold every row twice.
                rows = h.new_empty(count, len(views), h.shape[1]) if rows is None else rows
                rows[done : done + len(h), number] = h
            done += len(shown[0])
            if what and place.first:
                show_progress(what, done, count)
    finally:
        undo.close()
        loader.close()
    assert rows is not None, "there is at least one image"
    found = all_gather_rows(rows)[: len(indices)]  # blocks in rank order are the images' order
    return found if crops else found[:, 0]
