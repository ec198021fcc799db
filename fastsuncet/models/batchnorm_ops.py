"""The four passes of a BatchNorm over a rank's own activations; what ranks tell each other in between is `norm.py`'s.

    x  (N, C, ...) activations, any layout     dy  their gradient, from behind     numbers of a channel: (C,), float32

`Plain` says what each pass is, in operators of any device: about five reads or writes of the activations each, some
in float32. `Torch` is the same by the CUDA operators under `torch.nn.SyncBatchNorm`, which read every activation once
and write it once, in its own dtype: 2 + 4 + 4 + 6 bytes an activation in 16 bits. What that module does besides, a
mask for which the host has to wait, is left out. Not run on a card yet; the arithmetic is tested without one.
"""

from typing import Protocol

import torch
from torch import Tensor


class Passes(Protocol):
    """Forward: moments, then normalise. Backward: sums, then gradient. No autograd in any of them."""

    def moments(self, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Mean and variance (no correction) of each channel, at least float32."""

    def normalise(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
    ) -> Tensor:
        """(x - mean) * inverse * weight + bias, shape, dtype and layout of x; `inverse` is 1 / sqrt(variance + eps)."""

    def sums(self, dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None) -> Tensor:
        """(2, C): the sums of dy and of dy * (x - mean)."""

    def gradient(
        self, dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, means: Tensor
    ) -> Tensor:
        """(dy - means[0] - (x - mean) * inverse * means[1]) * weight * inverse, in x's dtype and layout.

        `means` (2, C), over the rows of all ranks: of dy, and of dy * (x - mean) * inverse.
        """


class Plain:
    """On any device, in any floating dtype. The oracle of `Torch`."""

    @staticmethod
    def moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Passes."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, [d for d in range(x.dim()) if d != 1], correction=0)
        return mean, variance

    @staticmethod
    def normalise(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
    ) -> Tensor:
        """See Passes."""
        scale = inverse if weight is None else inverse * weight
        y = (x - channelwise(mean, x)).mul_(channelwise(scale, x))
        if bias is not None:
            y.add_(channelwise(bias, x))
        return y.to(x.dtype)

    @staticmethod
    def sums(dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None) -> Tensor:
        """See Passes."""
        dims = [d for d in range(x.dim()) if d != 1]
        dy = dy.to(mean.dtype)
        return torch.stack([dy.sum(dims), (dy * (x - channelwise(mean, x))).sum(dims)])

    @staticmethod
    def gradient(
        dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, means: Tensor
    ) -> Tensor:
        """See Passes."""
        scale = inverse if weight is None else inverse * weight
        slope = means[1] * inverse
        centred = (x - channelwise(mean, x)).mul_(channelwise(slope, x))
        d_x = (dy.to(mean.dtype) - channelwise(means[0], x)).sub_(centred).mul_(channelwise(scale, x))
        return d_x.to(x.dtype)


class Torch:
    """On CUDA, for activations of 32 bits or fewer beside float32 weights."""

    @staticmethod
    def moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Passes. The operator gives 1 / sqrt(variance + eps); eps must be in it, or no variance would give 0."""
        mean, inverse = torch.batch_norm_stats(dense(x), eps)
        return mean, (inverse.square().reciprocal() - eps).clamp_(min=0)

    @staticmethod
    def normalise(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
    ) -> Tensor:
        """See Passes."""
        return torch.batch_norm_elemt(dense(x), weight, bias, mean, inverse, eps)

    @staticmethod
    def sums(dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None) -> Tensor:
        """See Passes."""
        x = dense(x)
        wanted = (True, False, False)  # the sums; from them the weight's and the bias's gradient cost nothing
        sums = torch.batch_norm_backward_reduce(like(dy, x), x, mean, inverse, weight, *wanted)
        return torch.stack(sums[:2])

    @staticmethod
    def gradient(
        dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, means: Tensor
    ) -> Tensor:
        """See Passes."""
        x = dense(x)
        # It divides by the count, an int32 for each rank: ours is taken already, and of 334 ranks' first layer at 512
        # views a single one would overflow.
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        shift, slope = means[0], means[1] / inverse
        return torch.batch_norm_backward_elemt(like(dy, x), x, mean, inverse, weight, shift, slope, one)


def passes_for(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Passes:
    """The fastest that takes these tensors."""
    single = all(t is None or t.dtype == torch.float32 for t in (weight, bias))
    if x.is_cuda and single and x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return Torch
    return Plain


def channelwise(numbers: Tensor, x: Tensor) -> Tensor:
    """(C,) in a shape that meets the channels of x (N, C, ...)."""
    return numbers.view(-1, *[1] * (x.dim() - 2))


def layout(x: Tensor) -> torch.memory_format:
    """The layout in which torch's operators take `x`: NHWC if it is in that, else plain rows."""
    nhwc = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if nhwc else torch.contiguous_format


def dense(x: Tensor) -> Tensor:
    """`x` in that layout; itself, as a rule."""
    return x.contiguous(memory_format=layout(x))


def like(dy: Tensor, x: Tensor) -> Tensor:
    """`dy` in x's layout and dtype: of two layouts the operators would make a wrong gradient or a slow one."""
    return dy.to(x.dtype).contiguous(memory_format=layout(x))
