"""The losses' memory grows with the batch, not with its square: counted in tensors, and as the system sees it."""

import gc
import math
import resource
import sys
from pathlib import Path

import pytest
import torch

from fastsuncet import nt_xent, suncet, sup_con
from tests.support import dense_losses
from tests.support.ranks import start_forked
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
def test_memory_counter_sees_the_dense_matrix():
    live = live_bytes(dense_losses.suncet, 1024)
    assert live.peak > 3 * 4 * 1024**2 and live.largest == 1024**2
    assert live.now < 1 * MB  # only the gradient is left


@pytest.mark.slow
@pytest.mark.parametrize("loss", [suncet, nt_xent, sup_con])
def test_memory_grows_linearly_and_holds_no_matrix_of_all_pairs(loss):
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


def grow(folder: Path) -> None:
    """Note by how many bytes the largest memory of this process grows over a loss of 4,096 rows."""
    torch.set_num_threads(1)

    def run(rows: int) -> int:
        z, *arguments = call(suncet, rows)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        suncet(z, *arguments).backward()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    run(64)  # loads the libraries
    (folder / "grown").write_text(str(run(4096) * (1 if sys.platform == "darwin" else 1024)))


@pytest.mark.slow
def test_memory_of_the_process_grows_by_less_than_40_mb_at_4096_rows(tmp_path):
    """A count of tensors does not see what operators allocate inside, so a fresh process measures its own peak."""
    process = start_forked(grow, tmp_path)
    process.join(120)
    assert process.exitcode == 0 and int((tmp_path / "grown").read_text()) < 40 * MB
