"""BatchNorm with the residual before it and the ReLU after it as one operation, on CUDA by kernels.

One by one, BatchNorm, addition and ReLU move 26 to 32 bytes per activation through memory, forward and backward
and in 16 bits; as one they move 16 to 20 (fastsuncet/kernels/norm.cu). For the backward pass it keeps
BatchNorm's input, as PyTorch does, and one bit per activation where a residual was added.

Where the kernels cannot run it is the twin: `RankBatchNorm` or torch's BatchNorm, an addition, a ReLU.
"""

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fastsuncet.distributed.collectives import world_size
from fastsuncet.models import norm_kernel
from fastsuncet.models.resnet import BasicBlock, Bottleneck, ResNet, WideResNet
from fastsuncet.models.sync_batchnorm import RankBatchNorm, normalize_over_ranks


def fuse(model: nn.Module, *, shared: bool) -> nn.Module:
    """Fuse the BatchNorms of a ResNet with what follows them; `shared`: with the statistics of all ranks.

    Replaces `synchronize`, and must come before DDP. Parameters, buffers and state_dict keys stay the same
    objects. Of other networks than those of resnet.py only the BatchNorms are replaced.
    """
    if isinstance(model, _BatchNorm):
        norm = FusedNorm.take_over(model)
        norm.shared = shared
        return norm
    for name, child in model.named_children():
        setattr(model, name, fuse(child, shared=shared))
    if isinstance(model, BasicBlock | Bottleneck):
        return FusedBlock.take_over(model)
    if isinstance(model, ResNet | WideResNet):  # others can use a ReLU twice
        cast(FusedNorm, model.bn1).relu = True
        model.relu = nn.Identity()
    return model


class FusedBlock(nn.Module):
    """A residual block of two or three convolutions whose last BatchNorm adds the shortcut."""

    conv1: nn.Module
    conv2: nn.Module
    conv3: nn.Module  # in a bottleneck
    bn1: nn.Module
    bn2: nn.Module
    bn3: nn.Module
    downsample: nn.Module | None

    @classmethod
    def take_over(cls, block: nn.Module) -> "FusedBlock":
        """Build a block from the very modules of `block`, whose BatchNorms are `FusedNorm` already."""
        fused = cls()
        fused._modules = block._modules
        fused.downsample = block._modules.get("downsample")
        for norm in fused.children():
            if isinstance(norm, FusedNorm):
                norm.relu = True
        return fused.train(block.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, S, S) as the original block does."""
        last, of_shortcut = self.ends()
        shortcut = x
        if of_shortcut is not None:
            for layer in list(cast(nn.Sequential, self.downsample))[:-1]:
                shortcut = layer(shortcut)
        elif self.downsample is not None:
            shortcut = self.downsample(x)
        x = self.conv2(self.bn1(self.conv1(x)))
        if hasattr(self, "conv3"):
            x = self.conv3(self.bn2(x))
        return last(x, shortcut) if of_shortcut is None else last.with_shortcut(x, shortcut, of_shortcut)

    def ends(self) -> "tuple[FusedNorm, FusedNorm | None]":
        """Return the last BatchNorm, and that of the shortcut or None: over ranks they share their messages."""
        last = cast(FusedNorm, self.bn3 if hasattr(self, "conv3") else self.bn2)
        norm = self.downsample[-1] if isinstance(self.downsample, nn.Sequential) else None
        return last, norm if isinstance(norm, FusedNorm) else None


class FusedNorm(RankBatchNorm):
    """relu(BatchNorm(x) + residual), with or without the residual and the ReLU."""

    relu: bool = False
    shared: bool = True  # statistics of all ranks

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map input and residual (N, C, ...) to the same shape and dtype; a collective if statistics are shared."""
        if self.training and self.kernels_take(input, residual):
            self.count_batch()
            return norm_kernel.fused_norm([input], [self], residual, relu=self.relu, shared=self.shared)
        y = super().forward(input) if self.shared else _BatchNorm.forward(self, input)
        y = y if residual is None else y + residual
        return F.relu(y) if self.relu else y

    def with_shortcut(self, input: Tensor, other: Tensor, norm: "FusedNorm") -> Tensor:
        """Compute relu(self(input) + norm(other)); over ranks the two layers share one message each way."""
        if not (self.training and self.shared and world_size() > 1 and input.shape == other.shape):
            return self(input, norm(other))
        if self.kernels_take(input, other) and norm.kernels_take(other, input):
            self.count_batch()
            norm.count_batch()
            return norm_kernel.fused_norm([input, other], [self, norm], relu=True, shared=True)
        first, second = normalize_over_ranks((self, norm), (input, other))
        return F.relu(first + second)
