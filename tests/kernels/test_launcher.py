"""How arguments are packed, and every kernel through NVIDIA's bindings and a driver without a GPU."""

import ctypes
import gc
import os
import struct
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fastsuncet.kernels import launcher, switches
from fastsuncet.kernels.launcher import Arguments
from pipelines import cuda_compiler
from pipelines.cuda_compiler import KernelError
from tests.support.host_kernels import library

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def read(arguments, formats):
    """Return the values of arguments, as a kernel with parameters of these formats of `struct` reads them."""
    addresses = (ctypes.c_void_p * len(formats)).from_address(arguments.address)
    parts = (ctypes.string_at(at, struct.calcsize(kind)) for at, kind in zip(addresses, formats))
    return [struct.unpack(kind, part) for kind, part in zip(formats, parts)]


def test_arguments_are_packed_by_the_convention():
    x, pair = torch.zeros(3), struct.pack("PP", 5, 0)
    expected = [(x.data_ptr(),), (0,), (7,), (1,), (5, 0), (0.5,)]
    assert read(Arguments(x, None, 7, True, pair, 0.5), ["P", "P", "q", "q", "PP", "f"]) == expected
    with pytest.raises(TypeError, match="not str"):
        Arguments("7")


def test_arguments_are_kept_by_kernel_and_thread():
    x, y, one = torch.zeros(3), torch.nn.Parameter(torch.zeros(3)), struct.Struct("P").pack
    first = launcher.arguments("a", x, None, 7, 0.5, one(5))
    assert launcher.arguments("a", y, x, 8, 0.25, one(6)) is first
    assert read(first, [*"PPqfP"]) == [(y.data_ptr(),), (x.data_ptr(),), (8,), (0.25,), (6,)]
    with pytest.raises(struct.error):  # a real number where the kernel takes a whole one
        launcher.arguments("a", y, x, 8.0, 0.25, one(6))
    assert launcher.arguments("b", y, None, 8, 0.25, one(6)) is not first
    with ThreadPoolExecutor(1) as backward:
        other = backward.submit(launcher.arguments, "a", y, None, 8, 0.25, one(6)).result()
        assert other is not first
    left = weakref.ref(other)
    del other
    gc.collect()
    assert left() is None  # its thread has ended


def test_load_refuses_a_cpu():
    with pytest.raises(KernelError, match="not on cpu"):
        launcher.load("lars.cu", torch.device("cpu"))
    assert not switches.usable("lars.cu", torch.zeros(1), lambda device: None)


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
