"""The losses' memory grows with the batch, not with its square."""

import gc
import math

import pytest
import torch

from fastsuncet import nt_xent, suncet, sup_con
from tests.support import dense_losses
from tools.bench.dispatch_counter import Counter

MB = 1e6
WIDTH = 128


def call(loss, rows: int) -> tuple:
    z = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return (z, 0.1) if loss is nt_xent else (z, torch.arange(rows) % (rows // 8), 0.1)


def live_bytes(loss, rows: int) -> Counter:
    arguments = call(loss, rows)
    gc.collect()
    with Counter() as live:
        loss(*arguments).backward()
    return live


@pytest.mark.slow
@pytest.mark.parametrize("loss", [suncet, nt_xent, sup_con])
def test_memory_grows_linearly_and_holds_no_matrix_of_all_pairs(loss):
    assert live_bytes(dense_losses.suncet, 1024).largest == 1024**2  # the counter would see it
    live = {rows: live_bytes(loss, rows) for rows in (512, 1024, 2048)}
    peaks = {rows: each.peak for rows, each in live.items()}
    assert peaks[2048] < 20 * MB and live[2048].largest <= 256 * 2048, peaks
    growth = [math.log2(peaks[2 * rows] / peaks[rows]) for rows in (512, 1024)]
    assert max(growth) < 1.05, peaks  # 1 is linear, 2 is the dense matrix


def test_memory_is_freed_after_backward():
    z, *arguments = call(suncet, 1024)
    with Counter() as live:
        loss = suncet(z, *arguments)
        # Both gradients and what the normalization saved: no chunk outlives the sweep.
        assert live.now < 5 * z.nbytes
        loss.backward()
        del loss
    assert live.now == z.grad.nbytes
