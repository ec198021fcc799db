"""Compile the CUDA sources of this folder, and launch them on torch's current stream.

They are compiled at run time (pipelines/cuda_compiler.py), without a CUDA toolkit, and launched with raw pointers: no
allocation, no host sync.

The convention of the sources: an integer parameter is a `long long`, a real one a `float`, everything else a
pointer or a struct by value. So Python's values can be packed without a signature, and the tests' compiler checks
that every kernel follows it.
"""

import contextlib
import ctypes
import functools
import itertools
import struct
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines import cuda_compiler
from pipelines.cuda_compiler import KernelError, architecture, bindings, check

SOURCES = Path(__file__).parent
# C++17 for `if constexpr`. No fast math: it would make NaN and infinity undefined, and hide a diverged run.
OPTIONS = ("--std=c++17",)


def compiled(source: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """Return `source`, a file of this folder, as a cubin for "sm_XX" or as PTX for "compute_XX".

    Raises KernelError with the compiler's log, or with the reason why there is no compiler.
    """
    return cuda_compiler.compiled(SOURCES / source, arch, (*OPTIONS, *options))


class Arguments:
    """A kernel's arguments as the driver takes them: an array of the addresses of their values.

    Tensor or None: a pointer. int: long long. float: float. bytes: a structure by value. The driver copies them before
    the launch returns, so they can be rewritten then; the tensors must live longer, as for any asynchronous call.
    """

    def __init__(self, *values: Tensor | float | bytes | None):
        parts = [_format(value) for value in values]
        self.layout = struct.Struct("=" + "".join(parts))
        self.memory = ctypes.create_string_buffer(self.layout.size)
        sizes = itertools.accumulate((struct.calcsize("=" + part) for part in parts[:-1]), initial=0)
        addresses = (ctypes.addressof(self.memory) + size for size in sizes)
        self.pointers = (ctypes.c_void_p * len(values))(*addresses)
        self.address = ctypes.addressof(self.pointers)
        self.rewrite(*values)

    def rewrite(self, *values: Tensor | float | bytes | None) -> None:
        """Take other values, of the types that the first ones had."""
        plain = [0 if x is None else x.data_ptr() if isinstance(x, Tensor) else x for x in values]
        self.layout.pack_into(self.memory, 0, *plain)


def _format(value: Any) -> str:
    """Return how `struct` packs a value, in multiples of 8 bytes, to which all types of an argument are aligned."""
    if value is None or isinstance(value, Tensor):
        return "Q"
    if isinstance(value, int):  # a bool is an int
        return "q"
    if isinstance(value, float):
        return "f4x"
    if isinstance(value, bytes):
        return f"{len(value)}s"
    raise TypeError(f"a kernel takes tensors, None, int, float and bytes, not {type(value).__name__}")


# By thread: forward and backward run in different ones, and one must not rewrite what the other is about to launch.
_kept = threading.local()


def arguments(kernel: str, *values: Tensor | float | bytes | None) -> Arguments:
    """Return the arguments of the next launch of `kernel` in this thread; the one after it rewrites them.

    A step of a ResNet-50 with BatchNorm over ranks has 371 launches, and new arguments take the host a multiple.
    """
    kept = vars(_kept)
    if kernel in kept:
        kept[kernel].rewrite(*values)
    else:
        kept[kernel] = Arguments(*values)
    return kept[kernel]


class Module:
    """The kernels of one source on one device."""

    def __init__(self, source: str, device: torch.device, options: tuple[str, ...]):
        code = compiled(source, architecture(*torch.cuda.get_device_capability(device)), options)
        self.source, self.device, self.driver = source, device, bindings("driver")
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # creates torch's context and makes it current
            self.context = check(self.driver.cuCtxGetCurrent())
            self.module = check(self.driver.cuModuleLoadData(code))
        self.functions: dict[str, Any] = {}

    def launch(self, kernel: str, grid: tuple[int, int], block: int, *values: Any, shared: int = 0) -> None:
        """Queue `kernel` with `values` on torch's current stream.

        `shared`: bytes of dynamic shared memory for each block.

        Can be captured in a CUDA graph once the kernel was launched outside of one: loading cannot be captured.
        """
        if 0 in grid:
            return
        # To enter a device costs the host time, also where it is current, and a step has hundreds of launches.
        elsewhere = torch.cuda.current_device() != self.device.index
        with torch.cuda.device(self.device) if elsewhere else contextlib.nullcontext():
            stream = torch.cuda.current_stream().cuda_stream
            if kernel not in self.functions:
                self.functions[kernel] = check(self.driver.cuModuleGetFunction(self.module, kernel.encode()))
            # Backward runs in threads of torch. CUDA's runtime binds its context to a thread at its first call; the
            # driver refuses a thread without one, so a backward pass whose first kernel is this one would fail.
            if kernel not in vars(_kept) and int(check(self.driver.cuCtxGetCurrent())) == 0:
                check(self.driver.cuCtxSetCurrent(self.context))
            address = arguments(kernel, *values).address
            status = self.driver.cuLaunchKernel(
                self.functions[kernel], *grid, 1, block, 1, 1, shared, stream, address, 0
            )
        if int(status[0]) != 0:
            raise KernelError(f"{kernel} of {self.source}, grid {grid}, block {block}: {status[0].name}")


@functools.cache
def load(source: str, device: torch.device, options: tuple[str, ...] = ()) -> Module:
    """Return the kernels of `source` ("lars.cu") on a CUDA device with an index. Raises KernelError."""
    if device.type != "cuda":
        raise KernelError(f"{source}: the kernels run on CUDA devices, not on {device}")
    return Module(source, device, options)
