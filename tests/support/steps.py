"""A made-up batch for a step of any method."""

import torch

from fastsuncet.config import Config
from fastsuncet.data.paired_stream import Batch, views

CPU = torch.device("cpu")
U, S = 6, 8


def batch_of(config: Config, labeled: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    shown = tuple(torch.rand(U, 3, v.size, v.size, generator=generator) for v in views(config))
    size = config.data.augmentation.size
    images = torch.rand(labeled, 3, size, size, generator=generator)
    return Batch(0, shown, images, torch.arange(labeled) // 2)
