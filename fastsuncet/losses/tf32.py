"""How precise the losses' matrix products are on a GPU, where float32 has no tensor cores but TF32 has."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

CUT = 13  # bits of float32's mantissa that a tensor core does not look at


@contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Inside, CUDA may cut the factors of float32 matrix products to TF32's 10 bits, or may not; sums stay float32.

    For losses behind a 16-bit network, whose projections have bfloat16's 7 bits. torch's switch is the process's: it is
    put back, whatever happens inside.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def are_cut(factor: Tensor) -> bool:
    """Whether products with `factor` run in TF32 as things stand."""
    return factor.is_cuda and factor.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32


def rounded(x: Tensor) -> Tensor:
    """Float32 `x` to the nearest TF32 number, a new tensor; no gradient.

    What is cut is smaller: all cosines would shrink alike, as if by a higher temperature, and where the loss is nearly
    solved its gradient with them, by more than bfloat16 rows change it. Rounded, the rows lose an eighth of that.
    NaN stays NaN.
    """
    x, half = x.detach(), 1 << (CUT - 1)
    nearest = (x.view(torch.int32) + half).bitwise_and_(-1 << CUT).view(torch.float32)
    # A card's own NaN is 0x7fffffff, and half a place more than that is -0: a run that diverged would show a loss.
    return torch.where(x.isnan(), x, nearest)
