"""Images through an encoder: what every evaluation starts from. Each image exactly once, on any number of ranks.

Shapes: N images in all, n of them on this rank, E the width of the encoder's output.
"""

import numpy as np
import torch

from fastsuncet.config import Config
from fastsuncet.distributed import all_gather_rows
from fastsuncet.launch import Place
from fastsuncet.model import Model
from pipelines.index import ImageIndex
from pipelines.loader import open_evaluation_loader


def view_size(size: int) -> tuple[int, int]:
    """(crop, resize) of an evaluation view: the paper's 224 out of 256 in proportion; a small image is shown whole."""
    return (size, round(size * 256 / 224)) if size > 64 else (size, size)


@torch.no_grad()
def embed(
    model: Model,
    index: ImageIndex,
    indices: np.ndarray,  # (N,) int64 - which images of the index
    config: Config,  # of the run: size of a view, normalisation, back-end
    place: Place,
    *,
    batch: int = 256,
) -> torch.Tensor:
    """The encoder's outputs before the projection head, (N, E) float32 on the device, in the order of `indices`.

    Single centre crop, BatchNorm in evaluation mode, float32; the model is put back into the mode it came in. Each
    rank embeds a block of the images and all ranks return all rows, N x E x 4 bytes on each. No gradient.
    """
    data = config.data
    crop, resize = view_size(data.augmentation.size)
    share = -(-len(indices) // place.world_size)
    # A ragged share is filled up so that ranks gather equal shapes; the filling is cut off again below.
    mine = np.resize(indices, share * place.world_size)[place.rank * share :][:share]
    loader = open_evaluation_loader(
        index,
        mine,
        min(batch, len(mine)),
        crop,
        resize,
        mean=data.augmentation.mean,
        std=data.augmentation.std,
        device="gpu" if place.device.type == "cuda" else "cpu",
        device_id=place.device.index or 0,
        threads=data.decode_threads,
        backend=data.backend,
    )
    training = model.training
    model.eval()
    try:
        rows, done = None, 0
        for images, _, _ in loader:
            h = model.encode(images.to(place.device))
            # One block from the start: a list of batches joined at the end would hold every row twice.
            rows = h.new_empty(share, h.shape[1]) if rows is None else rows
            rows[done : done + len(h)] = h
            done += len(h)
    finally:
        model.train(training)
        loader.close()
    return all_gather_rows(rows)[: len(indices)]  # blocks in rank order are the images' order
