"""norm.cu's arithmetic by PyTorch's operators: float32 inside, one rounding out; right, or wrong in one place."""

import torch
from torch import Tensor

FAULTS = ("channel", "block of sums", "block of rows")


def emulated(fault: str | None = None):
    """Return a `norm_kernel.fused_norm` of one process.

    `fault`: a weight of one channel is 1 % off; the last rows are left out of a sum, or are not normalized.
    """

    def fused_norm(inputs, norms, residual=None, *, relu, shared):
        (norm,), rule = norms, (norms[0].eps, norms[0].momentum, relu, fault)
        own = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        return _Emulated.apply(*inputs, residual, *own, *rule)

    return fused_norm


def _wide(numbers: Tensor) -> Tensor:
    return numbers.view(1, -1, 1, 1)


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, running_mean, running_variance, eps, momentum, relu, fault):
        wide, count = x.float(), x.numel() // x.shape[1]
        rows = wide[:-1] if fault == "block of sums" else wide
        variance, mean = torch.var_mean(rows, [0, 2, 3], correction=0)
        running_mean.lerp_(mean, momentum)
        running_variance.lerp_(variance * (count / (count - 1)), momentum)
        inverse, scale = (variance + eps).rsqrt(), weight.clone()
        if fault == "channel":
            scale[5] *= 1.01
        y = (wide - _wide(mean)) * _wide(inverse * scale) + _wide(bias)
        if fault == "block of rows":
            y[-1, :, -1] = wide[-1, :, -1]
        y = y if residual is None else y + residual.float()
        ctx.mask, ctx.residual = (y > 0) if relu else None, residual is not None
        ctx.save_for_backward(x, mean, inverse, weight)
        return (y.relu() if relu else y).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, mean, inverse, weight = ctx.saved_tensors
        wide = dy.float() if ctx.mask is None else dy.float() * ctx.mask
        rows, count = (x.float() - _wide(mean)) * _wide(inverse), x.numel() // x.shape[1]
        d_bias, d_weight = wide.sum([0, 2, 3]), (wide * rows).sum([0, 2, 3])
        d_x = (wide - _wide(d_bias / count) - rows * _wide(d_weight / count)) * _wide(weight * inverse)
        d_residual = wide.to(x.dtype) if ctx.residual else None
        return d_x.to(x.dtype), d_residual, d_weight, d_bias, *[None] * 6
