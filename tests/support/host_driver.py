"""All kernels through launch.py, NVIDIA's own bindings and a driver without a card (tests/support/host_shim/libcuda.cpp).

A program of its own, `python -m tests.support.host_driver`, because the driver must be in LD_LIBRARY_PATH from the start.
"""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from fastsuncet.kernels import launcher as launch
from fastsuncet.kernels import nvrtc
from fastsuncet.losses import contrast, contrast_kernel
from fastsuncet.models import fused_batchnorm as norm_kernels
from fastsuncet.optim import lars_kernel
from pipelines.cuda_compiler import KernelError, bindings
from tests.support.host_kernels import SIZES

STREAM = 0x1234  # what the driver expects
HERE = torch.device("cpu")


def main() -> None:
    for caller in (lars_kernel, contrast_kernel, norm_kernels):
        for key, value in SIZES.items():
            if hasattr(caller, key):
                setattr(caller, key, value)
    contrast_kernel.STAGED = 40
    pretend_a_card()
    lars_kernel.prove(HERE)
    contrast_kernel.prove(HERE, contrast.row_pass)
    norm_kernels.prove(HERE)
    with ThreadPoolExecutor(1) as elsewhere:  # as backward does: a thread that has asked nothing of CUDA yet
        elsewhere.submit(lars_kernel.prove, HERE).result()
    torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=1)
    try:
        lars_kernel.prove(HERE)
    except KernelError as error:
        print(error)


def begin() -> None:
    """What any call of CUDA's runtime does to a thread: it has torch's context from then on."""
    bindings("driver").cuCtxSetCurrent(0x77)


def pretend_a_card() -> None:
    """Tensors stay on the CPU; what torch.cuda is asked by launch.py is answered, and sources go to NVRTC for sm_90."""
    torch.cuda.get_device_capability = lambda device: (9, 0)
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=STREAM, synchronize=begin)
    compiled, load = nvrtc.compiled, launch.load

    def compiled_for_whole_warps(source, arch, options):
        threads = f"-DTHREADS={SIZES['THREADS']}"
        return compiled(source, arch, tuple(o.replace(threads, "-DTHREADS=256") for o in options))

    def loaded(source, device, options=()):
        element = [option.removeprefix("-DELEMENT=") for option in options if "ELEMENT" in option]
        os.environ["FASTSUNCET_SPACE"] = element[0] if element else source.removesuffix(".cu")
        return load(source, torch.device("cuda", 0), options)

    nvrtc.compiled, launch.load = compiled_for_whole_warps, loaded


if __name__ == "__main__":
    main()
