"""Hold for each kernel and device whether it is used. In a run tuning/fast_paths.py decides (`switch`); in a program
without one, the first call compares the kernel with its twin and decides.

A kernel that was compiled and tested elsewhere meets a GPU, a driver and a torch version that were never tried
together. A wrong kernel is reported and not used.
"""

import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipelines.backend import NO_MEMORY
from pipelines.cuda_compiler import KernelError

# Runs a kernel and its twin on a small input; raises KernelError if they differ.
Proof = Callable[[torch.device], None]

# Why the kernels of a source stay off on a device, or None.
_reasons: dict[tuple[str, torch.device], str | None] = {}


def switched_off() -> str | None:
    """Return why no kernel is used in this process whatever its proof says, None if it decides."""
    off = os.environ.get("FASTSUNCET_KERNELS") == "off"
    return "FASTSUNCET_KERNELS is off: unset it" if off else None


def usable(source: str, example: Tensor, prove: Proof) -> bool:
    """Return whether the kernels of `source` take tensors like `example`, and agree with their twin on its device.

    Such tensors are on CUDA and have memory: neither traced nor fake.
    """
    plain = type(example) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
    return example.is_cuda and plain and agrees(source, example.device, prove)


def agrees(source: str, device: torch.device, prove: Proof) -> bool:
    """Return whether the kernels of `source` run on a CUDA device and agree with their twin; if not, warn once.

    The first call waits for the device. Also False with FASTSUNCET_KERNELS=off in the environment.
    """
    if switched_off():
        return False
    if (source, device) not in _reasons:
        if torch.cuda.is_current_stream_capturing():
            # Loading and waiting cannot be captured. Warm up before a capture, as PyTorch requires anyway.
            message = f"{source}: not tried before this CUDA graph was captured; PyTorch's kernels are used"
            warnings.warn(message, stacklevel=2)
            return False
        try:
            reason = why_not(device, prove)
        except torch.OutOfMemoryError:
            reason = "the device has too little memory for its proof"
        switch(source, device, reason)
        if reason is not None:
            message = f"{source} is off on {device}, PyTorch's kernels are used: {reason}"
            warnings.warn(message, stacklevel=2)
    return _reasons[source, device] is None


def switch(source: str, device: torch.device, reason: str | None) -> None:
    """Use the kernels of `source` on `device` from now on (`reason` is None), or not."""
    _reasons[source, device] = reason


def why_not(device: torch.device, prove: Proof) -> str | None:
    """Run the proof of some kernels; return None if it passed, else the reason. Waits for the device.

    Raises torch.OutOfMemoryError.
    """
    try:
        # In any state of the caller: a proof runs backward, and in the dtypes that it names.
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            prove(device)
    except KernelError as error:
        if NO_MEMORY.search(str(error)):  # another program can hold it: no verdict for good
            raise torch.OutOfMemoryError(str(error)) from error
        return str(error)
    return None


def require_close(what: str, found: Tensor, expected: Tensor) -> None:
    """Raise KernelError unless |found - expected| <= 1e-5 max|expected|, everywhere. Waits for the device."""
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    if not error <= 1e-5:  # also for NaN
        raise KernelError(f"{what} differs from its twin by {error:.1e} of the largest value, limit 1e-05")
