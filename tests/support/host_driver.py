"""Run all kernels through launcher.py, NVIDIA's bindings and a driver without a GPU (host_shim/libcuda.cpp).

A separate program, `python -m tests.support.host_driver`, because LD_LIBRARY_PATH must name the driver at its start.
"""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from fastsuncet.kernels import launcher
from fastsuncet.losses import contrast, contrast_kernel
from fastsuncet.models import norm_kernel
from fastsuncet.optim import lars_kernel
from pipelines.cuda_compiler import KernelError, bindings
from tests.support.host_kernels import SIZES

STREAM = 0x1234  # what the driver expects
HERE = torch.device("cpu")


def main() -> None:
    for caller in (lars_kernel, contrast_kernel, norm_kernel):
        for key, value in SIZES.items():
            if hasattr(caller, key):
                setattr(caller, key, value)
    contrast_kernel.STAGED = 40
    norm_kernel.SMALL = ((2, 24, 9, 5),)
    pretend_a_gpu()
    lars_kernel.prove(HERE)
    contrast_kernel.prove(HERE, contrast.row_pass)
    norm_kernel.prove(HERE)
    with ThreadPoolExecutor(1) as elsewhere:  # as backward does: a thread without a CUDA context
        elsewhere.submit(lars_kernel.prove, HERE).result()
    torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=1)
    try:
        lars_kernel.prove(HERE)
    except KernelError as error:
        print(error)


def begin() -> None:
    """Bind torch's context to this thread, as any call of CUDA's runtime does."""
    bindings("driver").cuCtxSetCurrent(0x77)


def pretend_a_gpu() -> None:
    """Answer what launcher.py asks torch.cuda, with tensors on the CPU; NVRTC compiles the sources for sm_90."""
    torch.cuda.get_device_capability = lambda device: (9, 0)
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=STREAM, synchronize=begin)
    compiled, load = launcher.compiled, launcher.load

    def compiled_for_whole_warps(source, arch, options):
        threads = f"-DTHREADS={SIZES['THREADS']}"
        return compiled(source, arch, tuple(o.replace(threads, "-DTHREADS=256") for o in options))

    def loaded(source, device, options=()):
        element = [option.removeprefix("-DELEMENT=") for option in options if "ELEMENT" in option]
        os.environ["FASTSUNCET_SPACE"] = element[0] if element else source.removesuffix(".cu")
        return load(source, torch.device("cuda", 0), options)

    launcher.compiled, launcher.load = compiled_for_whole_warps, loaded


if __name__ == "__main__":
    main()
