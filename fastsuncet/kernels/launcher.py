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


def arguments(*values: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return a kernel's arguments as NVIDIA's bindings take them: values, and their types in ctypes.

    Tensor or None: a pointer. int: long long. float: float. A structure of ctypes, whose type is None: itself, by
    value. The driver copies them before the launch returns; the tensors must live longer, as for any asynchronous call.
    """
    plain, types = [], []
    for value in values:
        kind = None
        if value is None or isinstance(value, Tensor):
            value, kind = 0 if value is None else value.data_ptr(), ctypes.c_void_p
        elif isinstance(value, int | float):  # a bool is an int
            kind = ctypes.c_float if isinstance(value, float) else ctypes.c_longlong
        plain.append(value)
        types.append(kind)
    return tuple(plain), tuple(types)


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
            if int(check(self.driver.cuCtxGetCurrent())) == 0:
                check(self.driver.cuCtxSetCurrent(self.context))
            status = self.driver.cuLaunchKernel(
                self.functions[kernel], *grid, 1, block, 1, 1, shared, stream, arguments(*values), 0
            )
        if int(status[0]) != 0:
            raise KernelError(f"{kernel} of {self.source}, grid {grid}, block {block}: {status[0].name}")


@functools.cache
def load(source: str, device: torch.device, options: tuple[str, ...] = ()) -> Module:
    """Return the kernels of `source` ("lars.cu") on a CUDA device with an index. Raises KernelError."""
    if device.type != "cuda":
        raise KernelError(f"{source}: the kernels run on CUDA devices, not on {device}")
    return Module(source, device, options)
