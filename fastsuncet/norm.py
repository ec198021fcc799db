"""BatchNorm whose statistics are those of the whole batch, spread over ranks as it may be.

The paper synchronises BatchNorm over all workers, so that no rank can tell its own images by their
statistics and lower the contrastive loss that way (section 4; recipe section 3). On CUDA this is
`torch.nn.SyncBatchNorm`, which refuses CPU tensors; elsewhere it is `RankBatchNorm`, here, plain and
differentiable: one gather forward, one sum backward. Both compute in float32 under autocast, and both
leave every rank with the same running statistics.

Gradients: the backward pass of a rank gives its inputs and parameters their share of the gradient of the
SUM over ranks of the losses. DDP's mean over ranks then makes it, for the parameters, the gradient of the
mean loss: that of one process on the joined batch.
"""

import logging

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from fastsuncet.distributed import Group, all_gather_rows, rank, sum_over_ranks, world_size

logger = logging.getLogger(__name__)


def synchronise(
    model: nn.Module, group: Group = None, *, device: torch.device | str | None = None
) -> nn.Module:
    """`model` with every BatchNorm replaced by one whose statistics all ranks of `group` share. Alone:
    unchanged.

    `device` is where the model will run, where its parameters are by default; it decides the
    implementation, which is logged on rank 0. Parameters, buffers and state_dict keys stay the very same,
    so this may come before or after loading weights or building an optimizer, but must come before DDP.
    """
    ranks = world_size(group)
    if ranks == 1:
        return model
    if device is None:
        device = next((t.device for t in (*model.parameters(), *model.buffers())), "cpu")
    if torch.device(device).type == "cuda":
        implementation, model = (
            "torch.nn.SyncBatchNorm",
            nn.SyncBatchNorm.convert_sync_batchnorm(model, group),
        )
    else:
        implementation, model = "fastsuncet.norm.RankBatchNorm", _convert(model, group)
    if rank(group) == 0:
        logger.info("BatchNorm statistics are shared by %d ranks through %s", ranks, implementation)
    return model


def _convert(module: nn.Module, group: Group) -> nn.Module:
    if isinstance(module, _BatchNorm):
        return RankBatchNorm.take_over(module, group)
    for name, child in module.named_children():
        setattr(module, name, _convert(child, group))
    return module


class RankBatchNorm(_BatchNorm):
    """BatchNorm over (N, C, ...) on each rank with the statistics of all ranks' rows; N may differ, not be 0.

    In eval mode, or without a group, what torch's BatchNorm does. In training mode forward and backward are
    collectives: every rank of the group must run them.
    """

    group: Group = None

    @classmethod
    def take_over(cls, norm: _BatchNorm, group: Group) -> "RankBatchNorm":
        """Its parameters, buffers and settings, the same tensors."""
        shared = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        shared._parameters, shared._buffers = norm._parameters, norm._buffers
        shared.group = group
        return shared.train(norm.training)

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"RankBatchNorm: expected (N, C, ...), got {x.dim()} dimensions")

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) to the same shape and dtype."""
        if not self.training or world_size(self.group) == 1:
            return super().forward(x)
        self._check_input_dim(x)
        standardised, mean, variance, count = _Standardise.apply(x, self.eps, self.group)
        if self.track_running_stats:
            self._track(mean, variance * (count / (count - 1)))
        if self.affine:
            shape = (-1, *[1] * (x.dim() - 2))
            standardised = standardised * self.weight.view(shape) + self.bias.view(shape)
        return standardised.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        self.num_batches_tracked += 1
        share = (
            1 / self.num_batches_tracked if self.momentum is None else self.momentum
        )  # None: plain average
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), float(share))
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), float(share))


class _Standardise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) per channel, with mean and variance of all ranks' rows."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float, group: Group):
        dims = [d for d in range(x.dim()) if d != 1]
        shape = (-1, *[1] * (x.dim() - 2))
        channels = x.shape[1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = wide.new_tensor([x.numel() / channels])
        mean = wide.mean(dims)
        squares = (wide - mean.view(shape)).square().sum(dims)

        # Chan's way of joining means and squared deviations: sums of squares would cancel where |mean| >>
        # deviation.
        rows = all_gather_rows(torch.cat([count, mean, squares]).unsqueeze(0), group)  # (W, 1 + 2C)
        counts, means, squares = rows.split([1, channels, channels], dim=1)
        total = counts.sum()
        if total <= 1:
            raise ValueError(
                "RankBatchNorm: all ranks together have one value a channel, which has no variance"
            )
        mean = (counts * means).sum(0) / total
        variance = (squares + counts * (means - mean).square()).sum(0) / total

        deviation_inverse = (variance + eps).rsqrt().view(shape)
        standardised = (wide - mean.view(shape)) * deviation_inverse
        ctx.save_for_backward(standardised, deviation_inverse, total)
        ctx.dims, ctx.group, ctx.dtype = dims, group, x.dtype
        ctx.mark_non_differentiable(mean, variance, total)
        return standardised, mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor, *_):
        standardised, deviation_inverse, total = ctx.saved_tensors
        along = torch.stack([gradient.sum(ctx.dims), (gradient * standardised).sum(ctx.dims)])
        shift, scale = (sum_over_ranks(along, ctx.group) / total).view(2, *deviation_inverse.shape)
        return (deviation_inverse * (gradient - shift - standardised * scale)).to(ctx.dtype), None, None
