"""Whether a kernel may stand in for its twin on this device: it is asked, once, to agree with it there.

A kernel that was compiled and tested elsewhere meets here a card, a driver and a torch that nobody may have tried
together. Milliseconds at a run's start buy that a wrong one is said and left out, and not found in a loss curve.
"""

import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipelines.cuda_compiler import KernelError

_reasons: dict[tuple[str, torch.device], str | None] = {}


def usable(source: str, example: Tensor, prove: Callable[[torch.device], None]) -> bool:
    """Whether the kernels of `source` take tensors like `example`: on CUDA, with memory behind them, not traced.

    And agree with their twin on its device; see `agrees`.
    """
    # A fake or a functional tensor has no address to give. What is compiled or counted with those is the twin.
    plain = type(example) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
    return example.is_cuda and plain and agrees(source, example.device, prove)


def agrees(source: str, device: torch.device, prove: Callable[[torch.device], None]) -> bool:
    """Whether the kernels of `source` run on a CUDA device and agree with their twin; if not, one warning says why.

    `prove(device)` runs both on something small and raises KernelError where they differ; it waits for the device.
    False, too, with FASTSUNCET_KERNELS=off in the environment.
    """
    if os.environ.get("FASTSUNCET_KERNELS") == "off":
        return False
    if (source, device) not in _reasons:
        if torch.cuda.is_current_stream_capturing():
            # Loading and waiting cannot be captured. Warm up before a capture, as PyTorch asks anyway.
            warnings.warn(
                f"{source}: not tried before this CUDA graph was captured; PyTorch's kernels stand in",
                stacklevel=2,
            )
            return False
        _reasons[source, device] = reason = _why_not(device, prove)
        if reason is not None:
            warnings.warn(
                f"{source} stays off on {device}, PyTorch's kernels stand in: {reason}", stacklevel=2
            )
    return _reasons[source, device] is None


def _why_not(device: torch.device, prove: Callable[[torch.device], None]) -> str | None:
    try:
        # Whatever the caller is in the middle of: a proof runs backward, and in the types it names.
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            prove(device)
    except KernelError as error:
        return str(error)
    return None


def require_close(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raises KernelError unless |found - expected| <= tolerance max|expected|, everywhere. Waits for the device."""
    error = (found - expected).abs().max() / expected.abs().max()
    if not error.item() <= tolerance:  # NaN is not
        told = f"{error.item():.1e} of the largest where {tolerance:.0e} is allowed"
        raise KernelError(f"{what} differs from its twin by {told}")
