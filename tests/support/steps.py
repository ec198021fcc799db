"""A made-up batch for a step of any method."""

import torch

from fastsuncet.config import Config
from fastsuncet.data.paired_stream import Batch, views

CPU = torch.device("cpu")
U, S = 6, 8


def batch_of(config: Config, labeled: int, images: int = U, seed: int = 0) -> Batch:
    draw, size = torch.Generator().manual_seed(seed), config.data.augmentation.size
    shown = tuple(torch.rand(images, 3, v.size, v.size, generator=draw) for v in views(config))
    rows = torch.rand(labeled, 3, size, size, generator=draw)
    return Batch(0, shown, rows, torch.arange(labeled) // 2)
