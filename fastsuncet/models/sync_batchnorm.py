"""BatchNorm with the statistics of the whole batch, over all ranks; and with its neighbors as one operation.

The paper synchronizes BatchNorm over all workers, so that no rank can recognize its own images by their
statistics and lower the contrastive loss that way (section 4; recipe section 3). `RankBatchNorm` does it on any
device, plain and differentiable: one all-reduce forward and one backward, float32 statistics under autocast, the
same running statistics on every rank. The host reads no value of a tensor, so it runs ahead of a GPU through all
53 layers of a ResNet-50.

An all-reduce gives every rank the same bits, with gloo and with NCCL; DDP's weights rely on that too. A gather of all
ranks' statistics would be a ring with as many hops as ranks (docs/scaling.md). Where the kernels of norm_kernel.py run,
they do all of it, else four passes over the activations by operators of torch.

Gradients: a rank's backward pass gives its inputs and parameters their share of the gradient of the SUM over
ranks of the losses. DDP's mean over ranks then makes it, for the parameters, the gradient of the mean loss: that
of one process on the joined batch.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fastsuncet.distributed.collectives import world_size
from fastsuncet.errors import ConfigError
from fastsuncet.models import norm_kernel
from fastsuncet.models.resnet import BasicBlock, Bottleneck, ResNet, WideResNet


def synchronize(model: nn.Module, *, shared: bool = True) -> nn.Module:
    """Replace every BatchNorm of `model` by a `RankBatchNorm`; `shared`: with the statistics of all ranks.

    Parameters, buffers and state_dict keys stay the same objects, so this can come before or after loading
    weights or building an optimizer, but must come before DDP.
    """
    if isinstance(model, _BatchNorm):
        own = type(model).forward not in (_BatchNorm.forward, RankBatchNorm.forward)
        if own or any(x is None for x in (model.weight, model.bias, model.running_mean, model.momentum)):
            raise ConfigError(
                f"model.sync_batchnorm: the network's {type(model).__name__} is not a plain BatchNorm, and its "
                "statistics cannot be shared by several processes: set model.sync_batchnorm=false"
            )
        norm = RankBatchNorm(model.num_features, model.eps, model.momentum)
        norm._parameters, norm._buffers, norm.shared = model._parameters, model._buffers, shared
        return norm.train(model.training)
    for name, child in model.named_children():
        setattr(model, name, synchronize(child, shared=shared))
    return model


def fuse(model: nn.Module, *, shared: bool) -> nn.Module:
    """Do as `synchronize`, and fuse the BatchNorms of a ResNet of resnet.py with what follows them."""
    model = synchronize(model, shared=shared)
    for block in model.modules():
        if isinstance(block, BasicBlock | Bottleneck | ResNet | WideResNet):  # others can use a ReLU twice
            for norm in block.children():
                if isinstance(norm, RankBatchNorm):
                    norm.relu = True
            block.relu = nn.Identity()
    return model


class RankBatchNorm(_BatchNorm):
    """BatchNorm over (N, C, ...) on each rank with the statistics of all ranks' rows; N can differ, but not be 0.

    In eval mode, or in a single process, it is torch's BatchNorm. In training mode forward and backward are
    collectives: every rank must run them, in the same order as its other collectives. `fuse` also makes of it
    relu(BatchNorm(x) + residual), with or without the residual and the ReLU.
    """

    relu: bool = False
    shared: bool = True  # statistics of all ranks, not of this process's own rows
    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    momentum: float

    _check_input_dim = nn.SyncBatchNorm._check_input_dim

    @property
    def over_ranks(self) -> bool:
        """Whether a pass takes statistics of several ranks."""
        return self.training and self.shared and world_size() > 1

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map input and residual (N, C, ...) to the same shape and dtype."""
        if self.over_ranks:
            self._check_input_dim(input)
            if input.numel() == 0:
                raise ValueError("RankBatchNorm: this rank's batch is empty; every rank needs a row")
        if self.training and self.kernels_take(input, residual):
            self.count_batch()
            return norm_kernel.fused_norm([input], [self], residual, relu=self.relu, shared=self.shared)
        y = normalize_over_ranks((self,), (input,))[0] if self.over_ranks else super().forward(input)
        y = y if residual is None else y + residual
        return F.relu(y) if self.relu else y

    def join(self, input: Tensor, x: Tensor, downsample: nn.Sequential | None) -> Tensor:
        """Do as `resnet.join`: relu(self(input) + shortcut of x); over ranks both norms share one message each way."""
        if downsample is None:
            return self(input, x)
        other, norm = downsample[0](x), cast(RankBatchNorm, downsample[1])
        if not (self.over_ranks and input.shape == other.shape):
            return self(input, norm(other))
        if self.kernels_take(input, other) and norm.kernels_take(other, input):
            self.count_batch()
            norm.count_batch()
            return norm_kernel.fused_norm([input, other], [self, norm], relu=True, shared=True)
        first, second = normalize_over_ranks((self, norm), (input, other))
        return F.relu(first + second)

    def kernels_take(self, x: Tensor, residual: Tensor | None = None) -> bool:
        """Return whether the kernels of norm_kernel.py compute this layer for such activations."""
        return norm_kernel.fits(x, residual, self.weight, self.bias, self.running_mean)

    def count_batch(self) -> None:
        """Count a batch, unless `multi_view_model.frozen_statistics` has taken the counter away."""
        if self.num_batches_tracked is not None:
            # Not `+= 1`, which also sets the module's attribute: that takes the host longer than the addition.
            self.num_batches_tracked.add_(1)

    def statistics_of(self, x: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (rows (1,), mean (C,), 1 / sqrt(variance + eps) (C,)) from the added `sums_of` all ranks' rows of x.

        Updates running statistics.
        """
        self.count_batch()
        count, mean, variance = from_sums(sums, torch.float64 if x.dtype == torch.float64 else torch.float32)
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(new.to(running.dtype), self.momentum)
        return count, mean, (variance + self.eps).rsqrt()


def sums_of(count: int, mean: Tensor, variance: Tensor) -> Tensor:
    """Return what ranks add up, (1 + 2C,) float64: n, n mean and n (variance + mean^2) of this rank's `count` rows.

    Sums of squares cancel where |mean| >> deviation, so they are float64 sums of what was computed without them:
    var = E[x^2] - mean^2 loses about 2^-53 (mean / deviation)^2 of itself, where the rounding of the float32 mean
    has already lost 2^-48 of that. float64 rows have no such margin.
    """
    channels = len(mean)
    # Filled by a kernel: a tensor made from a Python list would be a copy that the host waits for.
    sums = torch.cat([mean.new_ones(1), mean, variance]).double()
    own_mean, square = sums[1 : 1 + channels], sums[1 + channels :]
    square.addcmul_(own_mean, own_mean)
    return sums.mul_(count)


def from_sums(sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rows (1,), mean (C,), variance (C,), no correction) of the rows of all ranks, from their added sums."""
    channels = len(sums) // 2
    _, mean, square = (sums / sums[:1]).split([1, channels, channels])
    # Rounding can leave less than 0 of rows that are all equal; a NaN stays a NaN.
    variance = square.addcmul_(mean, mean, value=-1).clamp_(min=0)
    return sums[:1].to(dtype), mean.to(dtype), variance.to(dtype)


def normalize_over_ranks(norms: Sequence[RankBatchNorm], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Normalize each input (N, C, ...) by its layer and operators of torch's: one message for all of them each way."""
    with torch.no_grad():
        own = []
        for norm, x in zip(norms, inputs):
            by_cuda = takes_cuda_operators(x, norm.weight, norm.bias)
            own.append(sums_of(x.numel() // x.shape[1], *moments(x, norm.eps, by_cuda)))
        given: list = []
        for norm, x, sums in zip(norms, inputs, norm_kernel.sum_together(own)):
            given += [x, norm.weight, norm.bias, *norm.statistics_of(x, sums), norm.eps]
    return _Normalize.apply(*given)


class _Normalize(torch.autograd.Function):
    """(x - mean) * inverse * weight + bias of one layer or several: x, weight, bias, total, mean, inverse, eps of each.

    mean and inverse (C,) are statistics of all ranks' rows of x, which `total` (1,) counts. The gradient of x includes
    what flows through the statistics. Layers that are computed together send one message backward.
    """

    @staticmethod
    def forward(ctx, *given):
        ctx.by_cuda, kept, outputs = [], [], []
        for x, weight, bias, total, mean, inverse, eps in batched(given, 7):
            ctx.by_cuda.append(takes_cuda_operators(x, weight, bias))
            # Keep the input in its own dtype, which the convolution before keeps too: standardized rows in float32
            # would double or triple what a bfloat16 network keeps for its backward pass.
            kept += [x, weight, total, mean, inverse]
            outputs.append(normalize(x, weight, bias, mean, inverse, eps, ctx.by_cuda[-1]))
        ctx.save_for_backward(*kept)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor):
        saved, own, others = list(batched(ctx.saved_tensors, 5)), [], []
        for by_cuda, (x, weight, _, mean, inverse), dy in zip(ctx.by_cuda, saved, gradients):
            sums = gradient_sums(dy, x, mean, inverse, weight, by_cuda)
            # Of standardized rows, as ranks send them that run the kernels of norm_kernel.py.
            sums[:, 1].mul_(inverse)
            own.append(sums[0])
            others.append(sums[1].view(-1))
        found = []
        for by_cuda, (x, weight, total, mean, inverse), dy, sums, all_sums in zip(
            ctx.by_cuda, saved, gradients, own, norm_kernel.sum_together(others)
        ):
            d_x = gradient(dy, x, mean, inverse, weight, all_sums.view(2, -1) / total, by_cuda)
            d_bias, d_weight = sums.to(weight.dtype)
            found += [d_x, d_weight, d_bias, *[None] * 4]
        return tuple(found)


def batched(values: Sequence, size: int) -> Iterator[Sequence]:
    """Yield `size` values at a time. (itertools has it from Python 3.12 on.)"""
    for start in range(0, len(values), size):
        yield values[start : start + size]


# The four passes over a rank's own activations x (N, C, ...): moments and normalize forward, gradient_sums and gradient
# of dy backward. Numbers of channels are (C,), float32. None has autograd. `by_cuda`: by the CUDA operators of
# torch.nn.SyncBatchNorm, which read every activation once and write it once, in its own dtype: 2 + 4 + 4 + 6 bytes per
# activation in 16 bits. That module also masks out empty ranks, for which the host has to wait; here that is left out.
# Else by operators of any device, their oracle: about five reads or writes of the activations, some in float32.


def takes_cuda_operators(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Return whether the CUDA operators take these tensors: 32 bits or fewer, with float32 weights."""
    single = weight.dtype == bias.dtype == torch.float32
    # The operators have no rule for shapes: torch.compile would leave each of them as a call of its own.
    traced = torch.compiler.is_compiling()
    return x.is_cuda and not traced and single and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def moments(x: Tensor, eps: float, by_cuda: bool) -> tuple[Tensor, Tensor]:
    """Return mean and variance (no correction) of each channel, at least float32."""
    if by_cuda:
        # The operator gives 1 / sqrt(variance + eps); without eps a variance of 0 would give infinity.
        mean, inverse = torch.batch_norm_stats(_dense(x), eps)
        return mean, (inverse.square().reciprocal() - eps).clamp_(min=0)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, _all_but_channels(x), correction=0)
    return mean, variance


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, eps: float, by_cuda: bool
) -> Tensor:
    """Return (x - mean) * inverse * weight + bias, where `inverse` is 1 / sqrt(variance + eps).

    Shape, dtype and layout are those of x.
    """
    if by_cuda:
        return torch.batch_norm_elemt(_dense(x), weight, bias, mean, inverse, eps)
    y = (x - _per_channel(mean, x)).mul_(_per_channel(inverse * weight, x))
    return y.add_(_per_channel(bias, x)).to(x.dtype)


def gradient_sums(
    dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, by_cuda: bool
) -> Tensor:
    """Return (2, 2, C): the sums of dy and of dy * (x - mean), twice: for this rank, and to add up over ranks."""
    if by_cuda:
        x = _dense(x)
        # Only the sums: the gradients of weight and bias follow from them at no cost.
        outputs = (True, False, False)
        sums = torch.batch_norm_backward_reduce(_like(dy, x), x, mean, inverse, weight, *outputs)[:2]
    else:
        dims, dy = _all_but_channels(x), dy.to(mean.dtype)
        sums = dy.sum(dims), (dy * (x - _per_channel(mean, x))).sum(dims)
    return torch.stack(sums * 2).view(2, 2, -1)


def gradient(
    dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, means: Tensor, by_cuda: bool
) -> Tensor:
    """Return (dy - means[0] - (x - mean) * inverse * means[1]) * weight * inverse, in x's dtype and layout.

    `means` (2, C), over the rows of all ranks: of dy, and of dy * (x - mean) * inverse.
    """
    if by_cuda:
        x = _dense(x)
        # The operator divides by counts, an int32 for each rank. `means` are divided already, and one count of
        # 334 ranks' first layer at 512 views would overflow.
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        shift, slope = means[0], means[1] / inverse
        return torch.batch_norm_backward_elemt(_like(dy, x), x, mean, inverse, weight, shift, slope, one)
    centered = (x - _per_channel(mean, x)).mul_(_per_channel(means[1] * inverse, x))
    d_x = (dy.to(mean.dtype) - _per_channel(means[0], x)).sub_(centered)
    return d_x.mul_(_per_channel(inverse * weight, x)).to(x.dtype)


def _all_but_channels(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _per_channel(numbers: Tensor, x: Tensor) -> Tensor:
    """Return (C,) in a shape that broadcasts to x (N, C, ...)."""
    return numbers.view(-1, *[1] * (x.dim() - 2))


def _layout(x: Tensor) -> torch.memory_format:
    """Return the layout in which torch's operators take `x`: NHWC if it has that, else contiguous."""
    nhwc = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if nhwc else torch.contiguous_format


def _dense(x: Tensor) -> Tensor:
    """Return `x` in that layout; usually it is `x` itself."""
    return x.contiguous(memory_format=_layout(x))


def _like(dy: Tensor, x: Tensor) -> Tensor:
    """Return `dy` in x's layout and dtype: with two layouts the operators give a wrong gradient or are slow."""
    return dy.to(x.dtype).contiguous(memory_format=_layout(x))
