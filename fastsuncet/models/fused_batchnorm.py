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
    if isinstance(model, BasicBlock | Bottleneck | ResNet | WideResNet):  # others can use a ReLU twice
        for norm in model.children():
            if isinstance(norm, FusedNorm):
                norm.relu = True
        model.relu = nn.Identity()
    return model


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

    def join(self, input: Tensor, x: Tensor, downsample: nn.Sequential | None) -> Tensor:
        """Do as `resnet.join`: relu(self(input) + shortcut of x); over ranks both norms share one message each way."""
        if downsample is None:
            return self(input, x)
        other, norm = downsample[0](x), cast(FusedNorm, downsample[1])
        if not (self.training and self.shared and world_size() > 1 and input.shape == other.shape):
            return self(input, norm(other))
        if self.kernels_take(input, other) and norm.kernels_take(other, input):
            self.count_batch()
            norm.count_batch()
            return norm_kernel.fused_norm([input, other], [self, norm], relu=True, shared=True)
        first, second = normalize_over_ranks((self, norm), (input, other))
        return F.relu(first + second)
