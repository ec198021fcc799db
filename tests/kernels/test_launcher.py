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


def test_arguments_are_packed_by_the_convention():
    x = torch.zeros(3)
    array = (ctypes.c_void_p * 2)(5, None)
    arguments = Arguments(x, None, 7, True, 0.5, array)
    addresses = (ctypes.c_void_p * 6).from_address(arguments.address)
    assert ctypes.c_void_p.from_address(addresses[0]).value == x.data_ptr()
    assert ctypes.c_void_p.from_address(addresses[1]).value is None
    assert [ctypes.c_longlong.from_address(addresses[i]).value for i in (2, 3)] == [7, 1]
    assert ctypes.c_float.from_address(addresses[4]).value == 0.5
    assert ctypes.c_void_p.from_address(addresses[5]).value == 5
    with pytest.raises(TypeError, match="not str"):
        Arguments("7")


def test_arguments_are_kept_by_kernel_types_and_thread():
    x, y, array = torch.zeros(3), torch.zeros(3), (ctypes.c_void_p * 1)
    first = launcher.arguments("a", x, None, 7, 0.5, array(5))
    assert launcher.arguments("a", y, None, 8, 0.25, array(6)) is first
    pointers = (ctypes.c_void_p * 5).from_address(first.address)
    expected = [y.data_ptr(), None, 8, 0.25, 6]
    for pointer, kind, value in zip(pointers, (*"PPqf", "P"), expected):
        found = ctypes.string_at(pointer, struct.calcsize(kind))
        assert struct.unpack(kind, found)[0] == (value or 0)
    assert launcher.arguments("a", y, y, 8, 0.25, array(6)) is not first  # None was a pointer of its own type
    assert launcher.arguments("b", y, None, 8, 0.25, array(6)) is not first
    with ThreadPoolExecutor(1) as backward:
        other = backward.submit(launcher.arguments, "a", y, None, 8, 0.25, array(6)).result()
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
