"""A small network, and gradients for it without a loss."""

import torch
from torch import nn


def tiny_network(dtype=torch.float32, memory_format=torch.contiguous_format):
    torch.manual_seed(3)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 5)
    )
    return network.to(dtype=dtype, memory_format=memory_format)


def give_gradients(network, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in network.parameters():
        drawn = torch.randn(p.shape, generator=generator).to(p.dtype) * scale
        p.grad = torch.empty_like(p).copy_(drawn)
