"""The chunked sweep of the contrastive losses: an anchor is pulled to its positives and pushed from all else.

    N  anchors: the rows of this rank            l_ij   cos(z_i, z_j) / temperature, the logits
    M  keys: the rows of all ranks, N on each    P(i)   the positives of i: keys j != i with the id of i
    D  width of a row                            w_i    weight of anchor i in the mean, 0 to leave it out
    R  anchors in a chunk

    L_i        = log sum_{j != i} exp l_ij - level_i        (j runs over all M keys but the anchor itself)
    dL_i/dl_ij = p_ij - t_ij        where p_ij = softmax_{j != i} l_ij and t_ij = d level_i / d l_ij

A loss gives its ids, its weights and its level. For NT-Xent and SuNCEt, level_i = log sum_{j in P(i)} exp l_ij:
one close positive is enough (equations 1 and 2). For L_sup_out, level_i = mean_{j in P(i)} l_ij: every positive
is pulled (appendix H). The sweep takes R anchors at a time and turns their R x M logits into the gradient
at once: three matrix products per chunk, and never an N x M matrix. Backward only scales. For the first two
losses, a single process on a CPU whose keys are its anchors needs only two products (`sweep_pairs`).

Everything is float32 (float64 stays), also under autocast: at temperature 0.1 a row of 4,096 exponentials
without its maximum subtracted can reach 9e7, and float16 ends at 65,504. On CUDA the products' factors follow
torch's TF32 switch; a run behind a 16-bit network turns it on (`methods.tf32_products`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from fastsuncet.distributed.collectives import Group, all_gather_rows, gather_rows, rank, world_size
from fastsuncet.losses.checks import at_least_float32

# The default R. Logits, p, t and two masks take 14 R M bytes in float32, 7 MB at 4,096 keys. On a CPU 96 to 256 rows
# take the same time, and 512 take longer because they leave the cache; a small number keeps a process's peak well under
# 40 MB at 4,096. On a GPU so few rows are thin products and many launches: with 8,192 keys an H200 took 2.9 ms by 1,024
# rows, 1.8 by 4,096 and 1.7 at once (NT-Xent; SuNCEt 2.3, 1.9, 1.8), for 0.08, 0.28 and 0.28 GB.
ROWS_PER_CHUNK, ROWS_PER_CHUNK_ON_CUDA = 128, 4096
# Of `sweep_pairs`: x reaches down to exp(-2 / 0.025) = 2e-35, and below 1e-38 float32 has no full precision.
LOWEST_TEMPERATURE = 0.025
CUT = 13  # low bits of float32's mantissa that a tensor core ignores


def contrast(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    temperature: float,
    *,
    every_positive: bool = False,
    group: Group = None,
    keys: str = "attached",
    chunk_size: int | None = None,
) -> Tensor:
    """Return sum_i w_i L_i over the anchors of this rank, a scalar in float32 (float64 for float64 `z`).

    `z` (N, D) floating, rows of any length; `ids` (M,) int64 of all ranks' rows in rank order; `weights`
    (N,); `every_positive`: the level of L_sup_out. Gradient reaches `z` through its rows as anchors, and with
    `keys="attached"` also through its rows as keys of all ranks' anchors, summed over ranks in backward. Once
    differentiable. The host does not wait for the device.
    """
    with outside_autocast(z.device.type):
        unit = unit_rows(z)
        weights = weights.to(unit.dtype)
        chunk = chunk_size or (ROWS_PER_CHUNK_ON_CUDA if z.is_cuda else ROWS_PER_CHUNK)
        alone = world_size(group) == 1 and keys == "attached" and not every_positive
        # On a GPU a small batch costs launches, and the symmetric sweep has more of them.
        if alone and temperature >= LOWEST_TEMPERATURE and not z.is_cuda:
            return _Swept.apply(partial(sweep_pairs, ids, weights, temperature, chunk), unit)
        all_rows = gather_rows(unit, group) if keys == "attached" else all_gather_rows(unit, group)
        sweep = partial(_sweep, ids, weights, rank(group) * len(z), every_positive, chunk)
        return _Swept.apply(sweep, unit / temperature, all_rows)


def unit_rows(z: Tensor) -> Tensor:
    """Return z_i / |z_i| (N, D) in at least float32. A zero row stays zero, with zero gradient.

    F.normalize would give it 1e12 times its gradient, and a projection head that died would ruin the encoder.
    """
    z = at_least_float32(z)
    length = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    return z / length.masked_fill(length < 1e-12, torch.inf)


class _Swept(torch.autograd.Function):
    """A loss whose sweep computes it together with its gradients by `rows`, those of them that are needed."""

    @staticmethod
    def forward(ctx, sweep: Callable, *rows: Tensor) -> Tensor:
        loss, gradients = sweep(*rows, wanted=ctx.needs_input_grad[1:])
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx, scale: Tensor):
        # Grad mode is on in backward only under create_graph=True; torch's once_differentiable does not refuse it.
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
    every_positive: bool,
    chunk: int,
    queries: Tensor,
    keys: Tensor,
    *,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Return sum_i w_i L_i and both gradients of queries (N, D) = unit rows / temperature, keys (M, D) = unit rows."""
    if uses_tf32(queries):
        queries, keys = rounded_to_tf32(queries), rounded_to_tf32(keys)
    loss = queries.new_zeros(())
    d_queries, d_keys = (torch.zeros_like(x) if want else None for x, want in zip((queries, keys), wanted))
    over_rows = row_pass_for(queries)(ids, every_positive)
    for rows in chunks(len(queries), chunk):
        q, w = queries[rows], weights[rows]
        losses, d_logits = over_rows(q @ keys.T, first + rows.start, w)
        loss += w @ losses
        if d_queries is not None:
            torch.mm(d_logits, keys, out=d_queries[rows])
        if d_keys is not None:
            d_keys.addmm_(d_logits.T, q)
    return loss, (d_queries, d_keys)


def sweep_pairs(
    ids: Tensor, weights: Tensor, temperature: float, chunk: int, unit: Tensor, *, wanted: tuple[bool]
) -> tuple[Tensor, tuple[Tensor | None]]:
    """Return sum_i w_i L_i of unit rows (N, D) that are anchors and keys, and its gradient (N, D): each pair once.

        x_ij = exp((cos(z_i, z_j) - 1) / temperature) = x_ji
        A_i  = sum_{j != i} x_ij            B_i = sum_{j in P(i)} x_ij            L_i = log A_i - log B_i

        d sum_i w_i L_i / d cos_ij  =  x_ij (w_i / A_i + w_j / A_j) / temperature, both directions together
                                    -  x_ij (w_i / B_i + w_j / B_j) / temperature for positives

    A chunk is R rows against themselves and all later rows. Its square holds its pairs in both directions; the
    rest holds each pair once, and its transpose is added to the later rows. A and B must be complete before the
    gradient, so the products are computed twice: four times half of N N D, where `_sweep` takes three whole
    ones, and no second exponential. No maximum is subtracted: a cosine is at most 1, which x already contains.
    """
    everything, positives = torch.zeros_like(weights), torch.zeros_like(weights)
    for rows in chunks(len(unit), chunk):
        x, different = _similarities(unit, ids, rows, temperature)
        _add_to_both(everything, rows, x)
        _add_to_both(positives, rows, x.masked_fill_(different, 0))
    # A row without a positive weighs nothing, and 0 times the logarithm of 0 would be NaN.
    smallest = torch.finfo(unit.dtype).tiny
    everything, positives = everything.clamp(min=smallest), positives.clamp(min=smallest)
    loss = weights @ (everything.log() - positives.log())
    if not wanted[0]:
        return loss, (None,)
    # How strongly each row is pushed from all others, w / A, and pulled to its positives, w / B.
    push, pull = weights / everything, weights / positives
    gradient = torch.zeros_like(unit)
    for rows in chunks(len(unit), chunk):
        x, different = _similarities(unit, ids, rows, temperature)
        pulled = (pull[rows, None] + pull[rows.start :]).masked_fill_(different, 0)
        x *= (push[rows, None] + push[rows.start :]).sub_(pulled)
        gradient[rows].addmm_(x, unit[rows.start :])
        gradient[rows.stop :].addmm_(x[:, len(x) :].T, unit[rows])
    return loss, (gradient.div_(temperature),)


def _similarities(unit: Tensor, ids: Tensor, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
    """Return x_ij of `rows` and of themselves and all later rows, 0 on the diagonal; and where ids differ."""
    shift = unit.new_full((1,), -1 / temperature)
    x = torch.addmm(shift, unit[rows], unit[rows.start :].T, alpha=1 / temperature).exp_()
    x.diagonal().fill_(0)
    return x, ids[rows, None] != ids[rows.start :]


def _add_to_both(total: Tensor, rows: slice, x: Tensor) -> None:
    """Add a chunk's pairs to the totals (N,) of their earlier and of their later row."""
    total[rows] += x.sum(dim=1)
    total[rows.stop :] += x[:, len(x) :].sum(dim=0)


def chunks(rows: int, size: int) -> Iterator[slice]:
    """Cut `rows` rows into slices of at most `size`."""
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def row_pass_for(example: Tensor) -> Callable[[Tensor, bool], Callable]:
    """Return `row_pass`, or for float32 on CUDA the kernel's, where that agreed with `row_pass`."""
    if example.is_cuda and example.dtype == torch.float32:
        from fastsuncet.kernels.switches import usable
        from fastsuncet.losses import contrast_kernel

        if usable("contrast.cu", example, lambda device: contrast_kernel.prove(device, row_pass)):
            return contrast_kernel.row_pass
    return row_pass


def row_pass(ids: Tensor, every_positive: bool) -> Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor]]:
    """Return the pass over a chunk's logits (R, M), which it overwrites: L_i (R,) and w_i dL_i/dl_ij (R, M).

    It takes the key number of the first anchor, and the weights w (R,). Its twin is `contrast_kernel.row_pass`.
    """

    def over_rows(logits: Tensor, first: int, weights: Tensor) -> tuple[Tensor, Tensor]:
        positive = ids[first : first + len(logits), None] == ids
        positive.diagonal(first).fill_(False)
        # The lowest number, not -inf: an empty row would be 0/0, and NaN times its zero weight is NaN.
        lowest = torch.finfo(logits.dtype).min
        logits.diagonal(first).fill_(lowest)
        everything, p = _log_sum_exp(logits)
        if every_positive:
            t = positive.to(logits.dtype) / positive.sum(dim=1, keepdim=True).clamp(min=1)
            level = (t * logits.masked_fill_(~positive, 0)).sum(dim=1)
        else:
            level, t = _log_sum_exp(logits.masked_fill_(~positive, lowest))
        return everything - level, p.sub_(t).mul_(weights[:, None])

    return over_rows


def _log_sum_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return log sum_j exp x_ij (R,) and its derivative softmax_j x_ij (R, M), for one exponential each."""
    p = torch.softmax(x, dim=1)
    # The largest p is exp(max) / sum, which gives back the sum that the fused softmax keeps to itself.
    return x.amax(dim=1) - p.amax(dim=1).log(), p


def outside_autocast(device_type: str) -> AbstractContextManager:
    """Return a region without autocast, inside which matrix products would come out in 16 bits."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()  # the meta device, on which FLOPs are counted, has no autocast


def uses_tf32(factor: Tensor) -> bool:
    """Return whether products with `factor` run in TF32 now."""
    if not factor.is_cuda or factor.dtype != torch.float32:
        return False
    # Where a program has used this name of the switch, the older one, allow_tf32, cannot be read.
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def rounded_to_tf32(x: Tensor) -> Tensor:
    """Round float32 `x` to the nearest TF32 number, a new tensor without gradient. NaN stays NaN.

    A cut number is smaller: all cosines would shrink alike, as at a higher temperature, and where the loss is
    nearly solved its gradient with them, by more than bfloat16 rows change it. Rounded rows lose an eighth of that.
    """
    x, half = x.detach(), 1 << (CUT - 1)
    nearest = (x.view(torch.int32) + half).bitwise_and_(-1 << CUT).view(torch.float32)
    # A GPU's own NaN is 0x7fffffff, and half a place more than that is -0: a diverged run would show a loss.
    return torch.where(x.isnan(), x, nearest)
