"""The sweep of a single process, whose rows are both anchors and keys: each pair is computed once.

    N  rows        D  width        R  rows in a chunk        w_i  weight of anchor i in the mean

    x_ij = exp((cos(z_i, z_j) - 1) / temperature) = x_ji
    A_i  = sum_{j != i} x_ij            B_i = sum_{j in P(i)} x_ij            L_i = log A_i - log B_i

    d sum_i w_i L_i / d cos_ij, both directions together
         = x_ij (w_i / A_i + w_j / A_j) / temperature, and for positives less x_ij (w_i / B_i + w_j / B_j) / temperature

A chunk is R rows against themselves and all later rows. Its square holds its pairs in both directions; the
rest holds each pair once, and its transpose is added to the later rows. A and B must be complete before the
gradient, so the products are computed twice: four times half of N N D, where contrast.py takes three whole
ones, and no second exponential.

No maximum is subtracted: a cosine is at most 1, which x already contains. So the temperature has a floor.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# x reaches down to exp(-2 / 0.025) = 2e-35, and below 1e-38 float32 has no full precision.
LOWEST_TEMPERATURE = 0.025


def sweep_pairs(
    ids: Tensor, weights: Tensor, temperature: float, chunk: int, unit: Tensor, *, wanted: tuple[bool]
) -> tuple[Tensor, tuple[Tensor | None]]:
    """Return sum_i w_i L_i of unit rows (N, D) with ids and weights (N,), and its gradient (N, D)."""
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
