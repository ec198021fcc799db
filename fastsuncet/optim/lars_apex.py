"""LARS by the multi-tensor kernels of NVIDIA's apex, where they are installed: 48 bytes per parameter, foreach 60.

lars_kernel.py moves 28 and is preferred. The kernels are those of the extension module `amp_C` (csrc/ of
github.com/NVIDIA/apex), which NVIDIA's images have; the package named apex on the registry is another project's.
They take the learning rate from the host, so a step whose rate only the device knows, as in a CUDA graph, is refused.
"""

# pyright: reportPrivateImportUsage=false

import functools
import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fastsuncet.optim import lars_kernel
from fastsuncet.optim.device_lr import on_host
from fastsuncet.optim.lars_foreach import LARSSettings, trust_ratios
from fastsuncet.optim.lars_kernel import UnsupportedTensors
from pipelines.cuda_compiler import KernelError

APEX = "apex"  # the name of the path
CHUNK = 2048 * 32  # elements of a block, as apex itself has it


@functools.cache
def extension() -> Any:
    """Return apex's module of kernels, None where it is not installed or cannot be loaded."""
    try:
        return importlib.import_module("amp_C")
    except (ImportError, OSError):
        return None


def lars_apex(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    lr: float | Tensor,
    settings: LARSSettings,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update `params` and `buffers` in place, as `lars_foreach` does. No host sync.

    The tensors are those that `lars_kernel` takes. Raises UnsupportedTensors for others, without momentum, for a
    learning rate that only the device knows, and where apex is not installed.
    """
    s, kernels, rate = settings, extension(), on_host(lr)
    reason = lars_kernel.why_not(params, grads, buffers, lr, grad_scale, found_inf)
    if s.momentum == 0:
        reason = "without momentum its SGD leaves the buffers as they are"
    elif rate is None and not s.lr_in_momentum:
        reason = "only the device knows the learning rate"
    if kernels is None or reason:
        reason = reason or "NVIDIA's apex is not installed"
        raise UnsupportedTensors(f"LARS: apex cannot take these tensors: {reason}")
    # Nothing is written where the first flag is set. The norms set the second one, which nothing reads.
    skip, overflow = torch.zeros(2, 1, dtype=torch.int32, device=params[0].device)
    if found_inf is not None:
        skip = (found_inf != 0).to(torch.int32).view(1)
    if grad_scale is not None:
        grads = list(torch._foreach_mul(grads, grad_scale.reciprocal()))
    d, decay = grads, float(s.weight_decay)
    if s.lars or s.lr_in_momentum:
        d, decay = list(torch._foreach_add(grads, params, alpha=decay)), 0.0
    if s.lars:
        w_norm, g_norm = (kernels.multi_tensor_l2norm(CHUNK, overflow, [x], True)[1] for x in (params, grads))
        torch._foreach_mul_(d, list(trust_ratios(w_norm, g_norm, s).unbind()))
    if s.lr_in_momentum:
        torch._foreach_mul_(d, lr)
        rate = 1.0
    # weight decay, momentum, dampening, rate, nesterov, first run, decay after momentum, scale of the gradients
    rule = (decay, float(s.momentum), 0.0, rate, s.nesterov, False, False, 1.0)
    kernels.multi_tensor_sgd(CHUNK, skip, [d, params, buffers], *rule)


def prove(device: torch.device, sizes: Iterable[int] = ()) -> None:
    """Compare four steps of apex and foreach, as `lars_kernel.prove` does. Raises KernelError."""
    try:
        lars_kernel.prove(device, sizes, lars_apex)
    # An extension of another version of torch or CUDA, or with other arguments.
    except (RuntimeError, TypeError, AttributeError) as error:
        raise KernelError(f"apex: {error}") from error
