"""How precise the losses' matrix products are on a GPU, where float32 has no tensor cores but TF32 has."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

CUT = 13  # low bits of float32's mantissa that a tensor core ignores


@contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Allow or forbid CUDA to cut the factors of float32 products to TF32's 10 bits; sums stay float32.

    For losses behind a 16-bit network, whose projections have bfloat16's 7 bits. torch's switch belongs to the
    process and is always restored.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def in_use(factor: Tensor) -> bool:
    """Return whether products with `factor` run in TF32 now."""
    return factor.is_cuda and factor.dtype == torch.float32 and bool(torch.backends.cuda.matmul.allow_tf32)


def rounded(x: Tensor) -> Tensor:
    """Round float32 `x` to the nearest TF32 number, a new tensor without gradient. NaN stays NaN.

    A cut number is smaller: all cosines would shrink alike, as at a higher temperature, and where the loss is
    nearly solved its gradient with them, by more than bfloat16 rows change it. Rounded rows lose an eighth of that.
    """
    x, half = x.detach(), 1 << (CUT - 1)
    nearest = (x.view(torch.int32) + half).bitwise_and_(-1 << CUT).view(torch.float32)
    # A GPU's own NaN is 0x7fffffff, and half a place more than that is -0: a diverged run would show a loss.
    return torch.where(x.isnan(), x, nearest)
