"""The four passes of a BatchNorm over a rank's own activations; sync_batchnorm.py adds the messages between ranks.

    x  (N, C, ...) activations, any layout     dy  gradient of the output     numbers of a channel: (C,), float32

`PlainPasses` uses operators of any device: about five reads or writes of the activations per pass, some in
float32. `CudaPasses` uses the CUDA operators of `torch.nn.SyncBatchNorm`, which read every activation once and
write it once, in its own dtype: 2 + 4 + 4 + 6 bytes per activation in 16 bits. That module also masks out empty
ranks, for which the host has to wait; here that is left out.
"""

import torch
from torch import Tensor


class PlainPasses:
    """On any device, in any floating dtype: the oracle of `CudaPasses`.

    Forward: moments, then normalize. Backward: sums, then gradient. No autograd in any of them.
    """

    @staticmethod
    def moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return mean and variance (no correction) of each channel, at least float32."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, _all_but_channels(x), correction=0)
        return mean, variance

    @staticmethod
    def normalize(
        x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, eps: float
    ) -> Tensor:
        """Return (x - mean) * inverse * weight + bias, where `inverse` is 1 / sqrt(variance + eps).

        Shape, dtype and layout are those of x.
        """
        y = (x - _per_channel(mean, x)).mul_(_per_channel(inverse * weight, x))
        return y.add_(_per_channel(bias, x)).to(x.dtype)

    @staticmethod
    def sums(dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
        """Return (2, 2, C): the sums of dy and of dy * (x - mean), twice: for this rank, and to add up over ranks."""
        dims, dy = _all_but_channels(x), dy.to(mean.dtype)
        sums = dy.sum(dims), (dy * (x - _per_channel(mean, x))).sum(dims)
        return torch.stack(sums * 2).view(2, 2, -1)

    @staticmethod
    def gradient(
        dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, means: Tensor
    ) -> Tensor:
        """Return (dy - means[0] - (x - mean) * inverse * means[1]) * weight * inverse, in x's dtype and layout.

        `means` (2, C), over the rows of all ranks: of dy, and of dy * (x - mean) * inverse.
        """
        centered = (x - _per_channel(mean, x)).mul_(_per_channel(means[1] * inverse, x))
        d_x = (dy.to(mean.dtype) - _per_channel(means[0], x)).sub_(centered)
        return d_x.mul_(_per_channel(inverse * weight, x)).to(x.dtype)


class CudaPasses(PlainPasses):
    """The same passes on CUDA, for activations of 32 bits or fewer and float32 weights."""

    @staticmethod
    def moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        # The operator gives 1 / sqrt(variance + eps); without eps a variance of 0 would give infinity.
        mean, inverse = torch.batch_norm_stats(_dense(x), eps)
        return mean, (inverse.square().reciprocal() - eps).clamp_(min=0)

    @staticmethod
    def normalize(
        x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, eps: float
    ) -> Tensor:
        return torch.batch_norm_elemt(_dense(x), weight, bias, mean, inverse, eps)

    @staticmethod
    def sums(dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
        x = _dense(x)
        # Only the sums: the gradients of weight and bias follow from them at no cost.
        outputs = (True, False, False)
        sums = torch.batch_norm_backward_reduce(_like(dy, x), x, mean, inverse, weight, *outputs)
        return torch.stack(sums[:2] * 2).view(2, 2, -1)

    @staticmethod
    def gradient(
        dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, means: Tensor
    ) -> Tensor:
        x = _dense(x)
        # The operator divides by counts, an int32 for each rank. `means` are divided already, and one count of
        # 334 ranks' first layer at 512 views would overflow.
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        shift, slope = means[0], means[1] / inverse
        return torch.batch_norm_backward_elemt(_like(dy, x), x, mean, inverse, weight, shift, slope, one)


def passes_for(x: Tensor, weight: Tensor, bias: Tensor) -> type[PlainPasses]:
    """Return the fastest passes that take these tensors."""
    single = weight.dtype == bias.dtype == torch.float32
    # The operators have no rule for shapes: torch.compile would leave each of them as a call of its own.
    traced = torch.compiler.is_compiling()
    if x.is_cuda and not traced and single and x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return CudaPasses
    return PlainPasses


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
