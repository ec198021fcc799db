"""The middle of a chunk's sweep in one CUDA launch (fastsuncet/kernels/contrast.cu); PyTorch takes about 14
passes over the logits. The matrix products before and after it stay cuBLAS'.

    R  anchors of the chunk        M  keys        w_i  weight of anchor i
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fastsuncet.kernels import launcher
from fastsuncet.kernels.switches import require_close
from pipelines.cuda_compiler import KernelError

THREADS = 256
STAGED = 11 << 10  # keys of a row in shared memory: 44 of the 48 KB that a block has on any GPU

FLAGS = 64  # keys of a thread whose kind it keeps in the bits of a number

# (logits (R, M), overwritten; key number of the first anchor; w (R,)) -> L_i (R,), w_i dL_i/dl_ij (R, M)
RowPass = Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor]]


def options() -> tuple[str, ...]:
    """Return the compiler options of contrast.cu."""
    return (f"-DTHREADS={THREADS}", f"-DFLAGS={FLAGS}")


def row_pass(ids: Tensor, every_positive: bool) -> RowPass:
    """Return the pass over a chunk whose anchors and keys have `ids` (M,) int64.

    The level is the mean of the positives' logits if `every_positive`, else their log-sum-exp. A row of weight
    0 or without a positive gives zeros. On float32 CUDA tensors, without a host sync; the same bits in every run.
    """
    ids = ids.contiguous()
    low = ids.to(torch.int32)  # the low halves
    module = launcher.load("contrast.cu", ids.device, options())

    def over_rows(logits: Tensor, first: int, weights: Tensor) -> tuple[Tensor, Tensor]:
        anchors, keys = logits.shape
        if not (logits.is_contiguous() and weights.is_contiguous() and keys == len(ids)):
            shapes = f"logits {tuple(logits.shape)}, {len(ids)} ids, or not contiguous"
            raise KernelError(f"contrast: {shapes}")
        losses = torch.empty_like(weights)
        staged = min(keys, STAGED)
        given = (logits, low, ids, weights, losses, first, keys, staged, every_positive)
        module.launch("contrast_rows", (anchors, 1), THREADS, *given, shared=4 * staged)
        return losses, logits

    return over_rows


def prove(device: torch.device, twin: Callable[[Tensor, bool], RowPass], keys: Iterable[int] = ()) -> None:
    """Compare kernel and twin on rows with one, several and no positives. Raises KernelError.

    Rows have each of `keys` (37 or more), and lengths that are staged, not staged, and beyond a thread's memory of
    kinds.
    """
    for length in sorted({37, STAGED + THREADS + 1, (FLAGS + 1) * THREADS + 1, *keys}):
        ids = torch.arange(length, device=device) % 12  # of 37 keys four have id 0
        ids[3] = 1 << 33  # unique, but its low half is that of id 0
        wave = torch.sin(torch.arange(5 * length, device=device) * 0.37).view(5, length) * 30
        weights = (ids[2:7] < 12).float() * 0.5
        for every in (False, True):
            found, expected = (make(ids, every)(wave.clone(), 2, weights) for make in (row_pass, twin))
            # A row without a positive has no loss; the twin gives it an arbitrary number of weight zero.
            require_close("the contrastive loss", weights * found[0], weights * expected[0])
            require_close("the contrastive gradient", found[1], expected[1])
