"""Small networks, and gradients without a loss."""

from functools import partial

import pytest
import torch
from torch import nn

from fastsuncet.models import resnet


def tiny_network(memory_format=torch.contiguous_format):
    torch.manual_seed(3)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 5)
    )
    return network.to(memory_format=memory_format)


def narrow_resnet50(patch: pytest.MonkeyPatch, channels: int, blocks=(3, 4, 6, 3)) -> None:
    """Let `resnet50` have so many channels in its first layer in place of 64, and so many blocks in its stages."""
    narrow = partial(resnet.ResNet, resnet.Bottleneck, channels, blocks)
    patch.setitem(resnet.NETWORKS, "resnet50", narrow)
    patch.setitem(resnet.WIDTHS, "resnet50", 32 * channels)


def one_block(patch: pytest.MonkeyPatch) -> None:
    """Let `resnet_tiny` have one block, for a test of what follows the encoder."""
    patch.setitem(resnet.NETWORKS, "resnet_tiny", partial(resnet.ResNet, resnet.BasicBlock, 8, (1,)))
    patch.setitem(resnet.WIDTHS, "resnet_tiny", 8)


def give_gradients(network):
    generator = torch.Generator().manual_seed(0)
    for p in network.parameters():
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
