"""norm.cu's arithmetic by PyTorch's operators: float32 inside, one rounding out; right, or wrong in one place."""

import torch
from torch import Tensor

FAULTS = ("channel", "block of sums", "block of rows")


def emulated(fault: str | None = None):
    """Return a `norm_kernel.fused_norm` of one process.

    `fault`: a weight of one channel is 1 % off; the last rows are left out of a sum, or are not normalized.
    """

    def fused_norm(inputs, norms, residual=None, *, relu, shared):
        (x,), (norm,) = inputs, norms
        wide, count = x.float(), x.numel() // x.shape[1]
        rows = wide[:-1] if fault == "block of sums" else wide
        variance, mean = torch.var_mean(rows, [0, 2, 3], correction=0)
        with torch.no_grad():
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum)
        before, one, after = norm.weight.tensor_split([5, 6])
        weight = torch.cat([before, 1.01 * one if fault == "channel" else one, after])
        y = (wide - _wide(mean)) * _wide((variance + norm.eps).rsqrt() * weight) + _wide(norm.bias)
        if fault == "block of rows":
            y = torch.cat([y[:-1], torch.cat([y[-1:, :, :-1], wide[-1:, :, -1:]], 2)])
        y = y if residual is None else y + residual.float()
        return (y.relu() if relu else y).to(x.dtype)

    return fused_norm


def _wide(numbers: Tensor) -> Tensor:
    return numbers.view(1, -1, 1, 1)
