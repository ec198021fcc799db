"""The one chunked sweep of the contrastive losses: an anchor is pulled to its positives, away from all else.

    N  anchors: the rows of this rank            l_ij   cos(z_i, z_j) / temperature, the logits
    M  keys: the rows of all ranks, N on each    P(i)   the positives of i: keys j != i with the id of i
    D  width of a row                            w_i    what anchor i weighs in the mean, 0 to leave it out
    R  anchors in a chunk

    L_i        = log sum_{j != i} exp l_ij - level_i        (j runs over all M keys but the anchor itself)
    dL_i/dl_ij = p_ij - t_ij        where p_ij = softmax_{j != i} l_ij and t_ij = d level_i / d l_ij

A loss names its ids, its weights and its level: NT-Xent and SuNCEt take the log-sum-exp of the positives,
L_sup_out their mean. The sweep takes R anchors at a time and turns their R x M logits into the gradient
while it has them: three matrix products a chunk, and never an N x M matrix. Backward only scales. On a CPU a
process alone, whose keys are its anchors, needs only two: `pairs.py`.

Everything is float32 (float64 stays), also under autocast: at temperature 0.1 a row of 4,096 exponentials
without its maximum taken out can reach 9e7, and float16 ends at 65,504. On CUDA the products' factors follow torch's
TF32 switch, off unless someone set it: `products.py`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from fastsuncet.distributed.collectives import (
    Group,
    all_gather_rows,
    gather_rows,
    rank,
    world_size,
)
from fastsuncet.losses import contrast_kernel
from fastsuncet.losses import tf32 as products
from fastsuncet.losses.contrast_symmetric import COLDEST, chunks, sweep_pairs

# (logits (R, M), positive (R, M) bool) -> level (R,), t (R, M). It may overwrite the logits, their last use.
Level = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# R when the caller names none. Logits, p, t and two masks take 14 R M bytes in float32: 7 MB at 4,096 keys and so on
# with M, not with N M. On a CPU 96 to 256 rows take the same time and 512 more, for they leave the cache; of the equal
# ones a small one keeps a process's own peak well under 40 MB at 4,096. On a GPU they would be thin products and many
# launches; the logits of 1,024, 32 MB at 8,192 keys, may stay in the L2 of a large one. Arithmetic, not yet measured.
ROWS_PER_CHUNK, ROWS_PER_CHUNK_ON_CUDA = 128, 1024


def contrast(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    temperature: float,
    *,
    level: Level,
    group: Group = None,
    keys: str = "attached",
    chunk_size: int | None = None,
) -> Tensor:
    """sum_i w_i L_i over the anchors of this rank, a scalar in float32 (float64 for float64 `z`).

    `z` (N, D) floating, rows of any length; `ids` (M,) int64 of all ranks' rows in rank order; `weights`
    (N,). Gradient reaches `z` through its rows as anchors, and with `keys="attached"` also through its rows
    as keys of all ranks' anchors, summed over ranks in backward. Once differentiable. Nothing waits for the
    device.
    """
    with outside_autocast(z.device.type):
        unit, weights = unit_rows(z), weights.to(unit_dtype(z))
        chunk = chunk_size or (ROWS_PER_CHUNK_ON_CUDA if z.is_cuda else ROWS_PER_CHUNK)
        alone = world_size(group) == 1 and keys == "attached" and level is any_positive
        # On a GPU launches are what a small batch costs, and this way has more of them.
        if alone and temperature >= COLDEST and not z.is_cuda:
            return _Swept.apply(partial(sweep_pairs, ids, weights, temperature, chunk), unit)
        every = gather_rows(unit, group) if keys == "attached" else all_gather_rows(unit, group)
        sweep = partial(_sweep, ids, weights, rank(group) * len(z), level, chunk)
        return _Swept.apply(sweep, unit / temperature, every)


def unit_rows(z: Tensor) -> Tensor:
    """z_i / |z_i| (N, D) in at least float32. A zero row has no direction: it stays zero, with zero gradient.

    F.normalize would hand it 1e12 times its gradient, and a projection head that died would ruin the encoder.
    """
    z = z.to(unit_dtype(z))
    length = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    return z / length.masked_fill(length < 1e-12, torch.inf)


def unit_dtype(z: Tensor) -> torch.dtype:
    """What is computed in: float64 for float64 `z`, else float32."""
    return torch.float64 if z.dtype == torch.float64 else torch.float32


def any_positive(logits: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """level_i = log sum_{j in P(i)} exp l_ij: one close positive is enough (equations 1 and 2)."""
    return _log_sum_exp(logits.masked_fill_(~positive, _lowest(logits)))


def every_positive(logits: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """level_i = mean_{j in P(i)} l_ij: every positive is pulled (L_sup_out, appendix H)."""
    t = positive.to(logits.dtype) / positive.sum(dim=1, keepdim=True).clamp(min=1)
    return (t * logits.masked_fill_(~positive, 0)).sum(dim=1), t


class _Swept(torch.autograd.Function):
    """A loss that a sweep computes together with its gradients by `rows`, those of them that are wanted."""

    @staticmethod
    def forward(ctx, sweep: Callable, *rows: Tensor) -> Tensor:
        loss, gradients = sweep(*rows, wanted=ctx.needs_input_grad[1:])
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx, scale: Tensor):
        # Grad mode is on in backward only under create_graph=True; torch's once_differentiable would let
        # this pass.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a contrastive loss can be differentiated once: its gradient is computed with its value "
                "and has no graph of its own, so create_graph=True would give a wrong second derivative"
            )
        return None, *(None if gradient is None else gradient * scale for gradient in ctx.saved_tensors)


def _sweep(
    ids: Tensor,
    weights: Tensor,
    first: int,
    level: Level,
    chunk: int,
    queries: Tensor,
    keys: Tensor,
    *,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Queries (N, D) = unit rows / temperature, keys (M, D) = unit rows -> sum_i w_i L_i; both gradients."""
    if products.are_cut(queries):
        queries, keys = products.rounded(queries), products.rounded(keys)
    loss = queries.new_zeros(())
    d_queries, d_keys = (torch.zeros_like(x) if want else None for x, want in zip((queries, keys), wanted))
    fused = contrast_kernel.runs_on(queries, row_pass)
    over_rows = (contrast_kernel.row_pass if fused else row_pass)(ids, level is every_positive)
    for rows in chunks(len(queries), chunk):
        q, w = queries[rows], weights[rows]
        losses, d_logits = over_rows(q @ keys.T, first + rows.start, w)
        loss += w @ losses
        if d_queries is not None:
            torch.mm(d_logits, keys, out=d_queries[rows])
        if d_keys is not None:
            d_keys.addmm_(d_logits.T, q)
    return loss, (d_queries, d_keys)


def row_pass(ids: Tensor, every: bool) -> contrast_kernel.RowPass:
    """The twin of `contrast_kernel.row_pass`: the level is `every_positive` or `any_positive`, by `every`."""
    level = every_positive if every else any_positive

    def over_rows(logits: Tensor, first: int, weights: Tensor) -> tuple[Tensor, Tensor]:
        positive = ids[first : first + len(logits), None] == ids
        positive.diagonal(first).fill_(False)
        # The lowest number, not -inf: a row left with nothing would be 0/0, and NaN times its zero weight is NaN.
        logits.diagonal(first).fill_(_lowest(logits))
        everything, p = _log_sum_exp(logits)
        positives, t = level(logits, positive)
        return everything - positives, p.sub_(t).mul_(weights[:, None])

    return over_rows


def _log_sum_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """log sum_j exp x_ij (R,) and its derivative softmax_j x_ij (R, M), at the price of one exponential."""
    share = torch.softmax(x, dim=1)
    # The largest share is exp(max) / sum: from it comes back the sum that the fused softmax keeps to itself.
    return x.amax(dim=1) - share.amax(dim=1).log(), share


def outside_autocast(device_type: str) -> AbstractContextManager:
    """Inside an autocast region matrix products come out in 16 bits, whatever the dtype of their factors."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()  # the meta device, on which FLOPs are counted, has no such region


def _lowest(x: Tensor) -> float:
    return torch.finfo(x.dtype).min
