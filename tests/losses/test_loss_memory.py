"""The losses take memory that grows with the batch, not with its square: by tensors, and by the system's own word."""

import gc
import math
import subprocess
import sys
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastsuncet.losses import nt_xent, suncet, sup_con
from tests.support import dense_losses

MB = 1e6
WIDTH = 128


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations have made and nobody has let go of yet: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.most_elements = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf, given)
        return result

    def _count(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        identity = storage._cdata
        self.most_elements = max(self.most_elements, storage.nbytes() // tensor.element_size())
        if identity in self._alive or identity in given:
            return
        self._alive.add(identity)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._let_go, identity, storage.nbytes())

    def _let_go(self, identity: int, size: int) -> None:
        self._alive.discard(identity)
        self.now -= size


def _call(loss, rows: int) -> tuple:
    z = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return (z, 0.1) if "nt_xent" in loss.__name__ else (z, torch.arange(rows) % (rows // 8), 0.1)


def _peak(loss, rows: int) -> LiveBytes:
    arguments = _call(loss, rows)
    gc.collect()
    with LiveBytes() as live:
        loss(*arguments).backward()
    return live


def test_the_count_sees_what_the_dense_equations_take():
    """An instrument that cannot see 1,024 x 1,024 tensors would praise anything."""
    live = _peak(dense_losses.suncet, 1024)
    assert live.peak > 3 * 4 * 1024**2 and live.most_elements == 1024**2
    assert live.now < 1 * MB  # the gradient is what is left


def test_suncet_grows_linearly_and_stays_under_40_mb_at_4096():
    peaks = {rows: _peak(suncet, rows).peak for rows in (1024, 2048, 4096, 8192)}
    assert peaks[4096] < 40 * MB, peaks
    growth = [math.log2(peaks[2 * rows] / peaks[rows]) for rows in (1024, 2048, 4096)]
    assert max(growth) < 1.05, peaks  # 1 is linear, 2 is the dense matrix


@pytest.mark.parametrize("loss", [suncet, nt_xent, sup_con])
def test_no_loss_builds_a_matrix_of_all_pairs(loss):
    live = _peak(loss, 2048)
    assert live.most_elements <= 256 * 2048
    assert live.peak < 20 * MB


def test_memory_is_let_go_after_backward():
    z, *arguments = _call(suncet, 1024)
    with LiveBytes() as live:
        loss = suncet(z, *arguments)
        assert (
            live.now < 5 * z.nbytes
        )  # both gradients and what normalising saved: no chunk outlives the sweep
        loss.backward()
        del loss
    assert live.now == z.grad.nbytes


def test_the_system_agrees_that_4096_rows_take_under_40_mb():
    """What operations take inside themselves no count of tensors sees, so a fresh process asks for its own peak."""
    program = f"""
import resource, torch
from fastsuncet.losses import suncet
torch.set_num_threads(1)
def run(rows):
    z = torch.randn(rows, {WIDTH}, requires_grad=True)
    labels = torch.arange(rows) % (rows // 8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    suncet(z, labels, 0.1).backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
run(64)  # what a first call loads is not the loss's
print(run(4096))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(ran.stdout) * (1 if sys.platform == "darwin" else 1024) < 40 * MB
