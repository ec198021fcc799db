"""Every kernel through NVIDIA's bindings and a driver without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import cuda_compiler
from tests.support.host_kernels import library

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    cuda_compiler.unavailable() is not None, reason=f"no NVRTC: {cuda_compiler.unavailable()}"
)
def test_launch_runs_every_kernel_through_nvidias_bindings(tmp_path):
    (tmp_path / "libcuda.so.1").symlink_to(library())
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.host_driver"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # On another stream than torch's the driver refuses, and the error names the kernel.
    expected = "lars_norms of lars.cu, grid (7, 1), block 8: CUDA_ERROR_INVALID_VALUE"
    assert done.stdout.startswith(expected), done.stdout
