"""The kernels' sources, run on a CPU with a real thread for each of theirs, say what their twins say in float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsuncet import losses
from fastsuncet.kernels.launcher import KernelError
from fastsuncet.losses import contrast, contrast_kernel
from fastsuncet.models import fused_batchnorm as norm_kernels
from fastsuncet.optim import lars_kernel
from pipelines import cuda_compiler as nvrtc
from tests.support import dense_losses
from tests.support.dense_losses import gradient
from tests.support.host_kernels import library, on_the_host

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def host():
    with on_the_host(lars_kernel, contrast_kernel, norm_kernels) as launched:
        yield launched


def relative(found, expected):
    """Error over the largest of what was expected; 0 where both are all zero."""
    scale = expected.double().abs().max().clamp(min=1e-30)
    return ((found.double() - expected.double()).abs().max() / scale).item()


# The middle of a contrastive loss


def rows_in_float64(logits, ids, first, weights, every):
    """L_i, or 0 for a row that is left out, and w_i dL_i/dl_ij by autograd."""
    logits = logits.double().requires_grad_()
    losses = []
    for i, w in enumerate(weights.double()):
        positive = ids == ids[first + i]
        positive[first + i] = False
        others = torch.arange(len(ids)) != first + i
        if w == 0 or not positive.any():
            losses.append(0 * w)
            continue
        level = logits[i][positive].mean() if every else logits[i][positive].logsumexp(0)
        losses.append(logits[i][others].logsumexp(0) - level)
    losses = torch.stack(losses)
    gradient = torch.autograd.grad(weights.double() @ losses + 0 * logits.sum(), logits)[0]
    return losses.detach(), gradient


@settings(max_examples=60, deadline=None)
@given(
    keys=st.integers(1, 90),
    classes=st.integers(1, 30),
    every=st.booleans(),
    height=st.sampled_from(
        [1.0, 20.0, 1000.0]
    ),  # 1 / temperature; at 1000 an exponential is 0 or 1 or a sum of ones
    staged=st.sampled_from([0, 7, 1000]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_row_pass_is_the_formula_for_any_row(keys, classes, every, height, staged, seed):
    generator = torch.Generator().manual_seed(seed)
    anchors = int(torch.randint(1, min(keys, 5) + 1, (), generator=generator))
    first = int(torch.randint(0, keys - anchors + 1, (), generator=generator))
    # Ids that differ only above their low 32 bits, and a row left out by its weight.
    ids = torch.randint(-classes, classes, (keys,), generator=generator)
    ids = torch.where(torch.rand(keys, generator=generator) < 0.2, ids + (1 << 32), ids)
    weights = torch.rand(anchors, generator=generator) * (torch.rand(anchors, generator=generator) < 0.8)
    logits = (torch.rand(anchors, keys, generator=generator) * 2 - 1) * height
    value, slope = rows_in_float64(logits, ids, first, weights, every)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contrast_kernel, "STAGED", staged)
        found, d_logits = contrast_kernel.row_pass(ids, every)(logits.clone(), first, weights)
    torch.testing.assert_close(found.double(), value, rtol=2e-6, atol=2e-6 * height)
    torch.testing.assert_close(d_logits.double(), slope, rtol=2e-6 * height + 2e-6, atol=1e-7 + 1e-7 * height)


def test_a_long_row_is_the_formula_where_a_thread_forgets_which_keys_are_positive():
    """64 keys of 8 threads are 512: from there on ids are read again."""
    generator = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(2, 700, generator=generator) * 5, torch.arange(700) % 50
    weights = torch.tensor([0.5, 2.0])
    for every in (False, True):
        value, slope = rows_in_float64(logits, ids, 100, weights, every)
        for staged in (600, 100):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(contrast_kernel, "STAGED", staged)
                found, d_logits = contrast_kernel.row_pass(ids, every)(logits.clone(), 100, weights)
            assert relative(found, value) < 1e-6 and relative(d_logits, slope) < 1e-6


def test_a_logit_that_is_no_number_shows_in_the_loss():
    logits = torch.zeros(2, 6)
    logits[0, 4] = torch.nan
    losses, _ = contrast_kernel.row_pass(torch.arange(6) % 3, False)(logits, 0, torch.ones(2))
    assert losses.isnan().tolist() == [True, False]


@pytest.mark.parametrize("loss", ["nt_xent", "suncet", "sup_con"])
def test_a_whole_loss_swept_by_the_kernel_is_the_dense_equation(loss, host, monkeypatch):
    monkeypatch.setattr(contrast_kernel, "runs_on", lambda example, twin: True)
    z = torch.randn(26, 5, generator=torch.Generator().manual_seed(1))
    arguments = () if loss == "nt_xent" else (torch.arange(26) % 9,)
    host.clear()
    for keys in (
        ("attached", "detached") if loss == "sup_con" else ("detached",)
    ):  # one alone sweeps pairs on a CPU
        setting = {"keys": keys, "temperature": 0.1}
        found = gradient(getattr(losses, loss), z, *arguments, **setting, chunk_size=7)
        expected = gradient(getattr(dense_losses, loss), z.double(), *arguments, **setting)
        assert relative(found[0], expected[0]) < 1e-6 and relative(found[1], expected[1]) < 1e-5
    assert set(host) == {"contrast_rows"}


def test_the_kernels_would_notice_if_a_twin_and_they_disagreed():
    """What a run on a card asks first. Here it passes, and fails as soon as either side is wrong."""
    here = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contrast_kernel, "STAGED", 40)
        contrast_kernel.prove(here, contrast.row_pass)
        with pytest.raises(KernelError, match="contrastive"):
            contrast_kernel.prove(here, lambda ids, every: contrast.row_pass(ids, not every))
    norm_kernels.prove(here)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_kernels.F, "relu", lambda x, *_, **__: x)
        with pytest.raises(KernelError, match="differs from its twin"):
            norm_kernels.prove(here)


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no NVRTC: {nvrtc.unavailable()}")
def test_every_kernel_agrees_with_its_twin_through_nvidias_own_bindings_and_a_driver_without_a_card(tmp_path):
    (tmp_path / "libcuda.so.1").symlink_to(library())
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.host_driver"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # On another stream than torch's the driver refuses, and that is said.
    assert done.stdout.startswith("lars_norms of lars.cu, grid (7, 1), block 8: CUDA_ERROR_INVALID_VALUE"), (
        done.stdout
    )
