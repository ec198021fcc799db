"""The sweep of a process alone, whose rows are anchors and keys alike: each pair is met once and serves both.

    N  rows        D  width        R  rows in a chunk        w_i  what anchor i weighs in the mean

    x_ij = exp((cos(z_i, z_j) - 1) / temperature) = x_ji
    A_i  = sum_{j != i} x_ij            B_i = sum_{j in P(i)} x_ij            L_i = log A_i - log B_i

    d sum_i w_i L_i / d cos_ij, both ways together
         = x_ij (w_i / A_i + w_j / A_j) / temperature, and for positives less x_ij (w_i / B_i + w_j / B_j) / temperature

A chunk is R rows beside themselves and all later rows. Its square holds its pairs both ways; the rest holds each once,
and is added to the later rows by its transpose. A and B must be whole before a gradient can be, so the products are
made twice: four times half of N N D, where `contrast.py` takes three whole ones, and it needs no second exponential.

No maximum is taken out: a cosine is at most 1, and that is in x already. So the temperature has a floor.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

COLDEST = 0.025  # x reaches down to exp(-2 / 0.025) = 2e-35, and below 1e-38 float32 has no full precision


def sweep_pairs(
    ids: Tensor, weights: Tensor, temperature: float, chunk: int, unit: Tensor, *, wanted: tuple[bool]
) -> tuple[Tensor, tuple[Tensor | None]]:
    """Unit rows (N, D), their ids and weights (N,) -> sum_i w_i L_i; its gradient (N, D) by the unit rows."""
    everything, positives = torch.zeros_like(weights), torch.zeros_like(weights)
    for rows in chunks(len(unit), chunk):
        x, apart = _similarities(unit, ids, rows, temperature)
        _add_to_both(everything, rows, x)
        _add_to_both(positives, rows, x.masked_fill_(apart, 0))
    # A row without a positive weighs nothing, and 0 times the logarithm of 0 would be NaN.
    smallest = torch.finfo(unit.dtype).tiny
    everything, positives = everything.clamp(min=smallest), positives.clamp(min=smallest)
    loss = weights @ (everything.log() - positives.log())
    push, pull = weights / everything, weights / positives
    return loss, (_gradient(unit, ids, push, pull, temperature, chunk) if wanted[0] else None,)


def _gradient(
    unit: Tensor, ids: Tensor, push: Tensor, pull: Tensor, temperature: float, chunk: int
) -> Tensor:
    """(N, D), given how strongly each row is pushed from all others, w / A (N,), and pulled to its own, w / B (N,)."""
    gradient = torch.zeros_like(unit)
    for rows in chunks(len(unit), chunk):
        x, apart = _similarities(unit, ids, rows, temperature)
        pulled = (pull[rows, None] + pull[rows.start :]).masked_fill_(apart, 0)
        x *= (push[rows, None] + push[rows.start :]).sub_(pulled)
        gradient[rows].addmm_(x, unit[rows.start :])
        gradient[rows.stop :].addmm_(x[:, len(x) :].T, unit[rows])
    return gradient.div_(temperature)


def _similarities(unit: Tensor, ids: Tensor, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
    """x_ij of `rows` and themselves and all later rows, the diagonal 0; and where ids differ."""
    one = unit.new_full((1,), -1 / temperature)
    x = torch.addmm(one, unit[rows], unit[rows.start :].T, alpha=1 / temperature).exp_()
    x.diagonal().fill_(0)
    return x, ids[rows, None] != ids[rows.start :]


def _add_to_both(total: Tensor, rows: slice, x: Tensor) -> None:
    """Adds to each row's total (N,) what its pairs in this chunk give it, as the earlier row and as the later."""
    total[rows] += x.sum(dim=1)
    total[rows.stop :] += x[:, len(x) :].sum(dim=0)


def chunks(rows: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` rows each, which together are all."""
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
