"""BatchNorm whose statistics are those of the whole batch, spread over ranks as it may be.

The paper synchronises BatchNorm over all workers, so that no rank can tell its own images by their statistics and
lower the contrastive loss that way (section 4; recipe section 3). `RankBatchNorm` does it on any device, plain and
differentiable: one all-reduce forward and one backward, float32 statistics under autocast, the same running statistics
on every rank. The host reads no value of a tensor, so it runs ahead of a GPU through all 53 layers of a ResNet-50.

Messages are 8 (1 + 2C) bytes forward and 8C backward, and what a rank computes of them does not grow with the ranks
either: a gather of everybody's statistics would be a ring of as many hops as ranks, and docs/scaling.md has what that
comes to. Every rank gets the same bits of an all-reduce, from gloo and from NCCL: DDP's weights rest on that too.

Over the activations it makes four passes (norm_operators.py): on CUDA those of `torch.nn.SyncBatchNorm`, elsewhere
plain operators. What is kept for the backward pass is the input, in its own dtype. `SyncBatchNorm` itself stays as a
peer to compare with, on CUDA only: it masks out ranks with an empty batch, and the mask makes the host wait for the
device in every layer. Neither was timed on a GPU yet.

Gradients: the backward pass of a rank gives its inputs and parameters their share of the gradient of the SUM over ranks
of the losses. DDP's mean over ranks then makes it, for the parameters, the gradient of the mean loss: that of one
process on the joined batch.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from fastsuncet.distributed.collectives import Group, sum_over_ranks, sum_over_ranks_, world_size
from fastsuncet.models.batchnorm_ops import passes_for


def synchronise(
    model: nn.Module, group: Group = None, *, implementation: Literal["ranks", "torch"] = "ranks"
) -> nn.Module:
    """`model` with every BatchNorm replaced by one whose statistics all ranks of `group` share. Alone: unchanged.

    "ranks" is `RankBatchNorm`; "torch" is `torch.nn.SyncBatchNorm`, which trains on CUDA only. Parameters, buffers and
    state_dict keys stay the very same, so this may come before or after loading weights or building an optimizer, but
    must come before DDP. Raises ValueError for another implementation.
    """
    if implementation not in ("ranks", "torch"):
        raise ValueError(f'synchronise: implementation is {implementation!r}; it is "ranks" or "torch"')
    if world_size(group) == 1:
        return model
    if implementation == "torch":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    return _convert(model, group)


def describe(ranks: int, *, shared: bool) -> str:
    """Whose statistics a run of `ranks` processes uses, for its summary."""
    if ranks == 1:
        return "statistics of the whole batch"
    if shared:
        return f"statistics of the whole batch, shared by {ranks} processes (RankBatchNorm)"
    return "statistics of each process's own images; the paper shares them"


def _convert(module: nn.Module, group: Group) -> nn.Module:
    if isinstance(module, _BatchNorm):
        return RankBatchNorm.take_over(module, group)
    for name, child in module.named_children():
        setattr(module, name, _convert(child, group))
    return module


class RankBatchNorm(_BatchNorm):
    """BatchNorm over (N, C, ...) on each rank with the statistics of all ranks' rows; N may differ, not be 0.

    In eval mode, or without a group, what torch's BatchNorm does. In training mode forward and backward are
    collectives: every rank of the group must run them, in the same order as all else it says there.
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
        if x.numel() == 0:
            raise ValueError("RankBatchNorm: this rank's batch is empty; every rank needs a row")
        y, mean, variance, count = _Normalise.apply(x, self.weight, self.bias, self.eps, self.group)
        if self.track_running_stats:
            self._track(mean, variance * (count / (count - 1)))
        return y

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        self.num_batches_tracked += 1
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased_variance)):
            share = self.momentum
            if share is None:  # the plain average; a tensor, because a number would have to be read
                share = self.num_batches_tracked.to(running.dtype).reciprocal()
            running.lerp_(new.to(running.dtype), share)


def join_statistics(
    count: int, mean: Tensor, variance: Tensor, group: Group = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows (1,), mean (C,), variance (C,)) of all ranks' rows, from those of this rank's `count` rows.

    `mean` and `variance` (no correction) of one floating dtype, which the result has too. No gradient. A collective:
    one all-reduce of 1 + 2C float64 numbers, n, n mean and n (variance + mean^2), whatever the number of ranks.

    Sums of squares cancel where |mean| >> deviation, so they are taken in float64 of what was computed without them:
    var = E[x^2] - mean^2 loses about 2^-53 (mean / deviation)^2 of itself, where the rounding of a float32 mean, which
    every formula begins with, has lost 2^-48 of that already. float64 rows have no such margin.
    """
    channels = len(mean)
    # Filled by a kernel: a tensor made from a Python list would be a copy that the host waits for.
    sums = torch.cat([mean.new_ones(1), mean, variance]).double()
    own_mean, square = sums[1 : 1 + channels], sums[1 + channels :]
    square.addcmul_(own_mean, own_mean)
    sum_over_ranks_(sums.mul_(count), group)
    _, joined_mean, square = (sums / sums[:1]).split([1, channels, channels])
    # Of rows that are all alike rounding may leave less than nothing; a NaN stays one.
    joined_variance = square.addcmul_(joined_mean, joined_mean, value=-1).clamp_(min=0)
    return tuple(t.to(mean.dtype) for t in (sums[:1], joined_mean, joined_variance))


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias per channel, with mean and variance of all ranks' rows."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group):
        ctx.passes, ctx.group, ctx.has_bias = passes_for(x, weight, bias), group, bias is not None
        moments = ctx.passes.moments(x, eps)
        total, mean, variance = join_statistics(x.numel() // x.shape[1], *moments, group)
        inverse = (variance + eps).rsqrt()
        # The input in its own dtype, which the convolution before keeps too: standardised rows in float32 would double
        # or triple what a bfloat16 network holds for its backward pass.
        ctx.save_for_backward(x, weight, mean, inverse, total)
        ctx.mark_non_differentiable(mean, variance, total)
        return ctx.passes.normalise(x, weight, bias, mean, inverse, eps), mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor, *_):
        x, weight, mean, inverse, total = ctx.saved_tensors
        own = ctx.passes.sums(gradient, x, mean, inverse, weight)
        own[1].mul_(inverse)  # of standardised rows: the kernels of norm_kernels.py tell ranks the same
        means = sum_over_ranks(own, ctx.group) / total
        d_x = ctx.passes.gradient(gradient, x, mean, inverse, weight, means)
        if weight is None:
            return d_x, None, None, None, None
        # Autograd takes no gradient of what was not there.
        d_bias = own[0].to(weight.dtype) if ctx.has_bias else None
        return d_x, own[1].to(weight.dtype), d_bias, None, None
