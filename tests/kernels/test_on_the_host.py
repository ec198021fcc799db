"""The kernels' sources, run on a CPU with a real thread for each of theirs, say what their twins say in float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastsuncet.kernels.launcher import KernelError
from fastsuncet.losses import contrast_kernel
from fastsuncet.models import fused_batchnorm as norm_kernels
from fastsuncet.optim import lars_kernel
from pipelines import cuda_compiler as nvrtc
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


def test_the_kernels_would_notice_if_a_twin_and_they_disagreed():
    """What a run on a card asks first. Here it passes, and fails as soon as either side is wrong."""
    here = torch.device("cpu")
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
