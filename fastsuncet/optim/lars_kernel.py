"""LARS in two CUDA launches (fastsuncet/kernels/lars.cu): 28 bytes per parameter, where foreach moves 60.

A group with `lars=False` needs no norms and is one launch, so a model with biases and BatchNorm in a plain
group takes three. Once a list of tensors has been seen, nothing is allocated, copied or waited for.

Where lars.cu cannot be used, and NVIDIA's apex is installed, its multi-tensor kernels move 48. They are those of the
extension module `amp_C` (csrc/ of github.com/NVIDIA/apex), which NVIDIA's images have; the package named apex on the
registry is another project's. They take the learning rate from the host, so a step whose rate only the device knows,
as in a CUDA graph, is refused.
"""

# pyright: reportPrivateImportUsage=false

import ctypes
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fastsuncet.kernels import launcher
from fastsuncet.kernels.switches import require_close
from fastsuncet.optim.device_lr import fill, on_host
from fastsuncet.optim.lars_foreach import LARSSettings, lars_foreach, trust_ratios
from pipelines.cuda_compiler import KernelError

THREADS = 256
# Elements per block: 3,500 blocks for a ResNet-50 are balanced, and its largest tensor has 512 partial sums.
CHUNK = 8192
# Tensors per launch: their gradients' addresses and the rest stay under the 4 KB that any driver takes.
TENSORS = 448
APEX = "apex"  # the name of the path
APEX_CHUNK = 2048 * 32  # elements of a block, as apex itself has it


class Gradients(ctypes.Structure):
    """The addresses of the gradients of a launch, as lars.cu takes them."""

    _fields_ = (("of", ctypes.c_void_p * TENSORS),)


class UnsupportedTensors(KernelError):
    """The kernel cannot take these tensors; nothing was launched."""


def options() -> tuple[str, ...]:
    """Return the compiler options of lars.cu."""
    return (f"-DTHREADS={THREADS}", f"-DCHUNK={CHUNK}", f"-DTENSORS={TENSORS}")


def lars_kernel(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    lr: float | Tensor,
    settings: LARSSettings,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update `params` and `buffers` in place, as `lars_foreach` does.

    All tensors are float32 on one CUDA device, dense, each in the layout of its parameter. `lr`, `grad_scale`
    and `found_inf` are read on the device. A captured CUDA graph keeps the addresses of the capture, and the
    value of a plain float `lr`. Gives the same bits in every run. Raises UnsupportedTensors for other tensors.
    """
    if reason := why_not(params, grads, buffers, lr, grad_scale, found_inf):
        raise UnsupportedTensors(f"LARS: the kernel cannot take these tensors: {reason}")
    module = launcher.load("lars.cu", params[0].device, options())
    s = settings
    rates = (lr, 0.0) if isinstance(lr, Tensor) else (None, float(lr))
    # An int has another layout.
    numbers = map(float, (s.momentum, s.weight_decay, s.trust_coefficient, s.eps))
    rule = (*numbers, s.nesterov, s.lr_in_momentum, s.lars)
    for start in range(0, len(params), TENSORS):
        part = slice(start, start + TENSORS)
        tensors, chunks, slots = _table(params[part], buffers[part])
        gradients = Gradients(tuple(g.data_ptr() for g in grads[part]))
        common, grid = (tensors, chunks, gradients, grad_scale), (len(chunks), 1)
        if s.lars:
            module.launch("lars_norms", grid, THREADS, *common, slots)
        module.launch("lars_update", grid, THREADS, *common, found_inf, slots, *rates, *rule)


def why_not(
    params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], *scalars: float | Tensor | None
) -> str | None:
    """Return why the kernel cannot take these tensors, or None. Reads no value."""
    device = params[0].device
    for kind, tensors in (("parameter", params), ("gradient", grads), ("momentum", buffers)):
        for x, p in zip(tensors, params):
            if x.dtype != torch.float32 or x.device != device:
                return f"a {kind} is {x.dtype} on {x.device}; all must be float32 on one device"
            if x is p and not (p.is_contiguous() or p.is_contiguous(memory_format=torch.channels_last)):
                return f"a {kind} of shape {tuple(x.shape)} is not dense"
            if x is not p and not _same_order(x, p):
                return f"a {kind} of shape {tuple(x.shape)} has another memory layout than its parameter"
    for x in scalars:
        if isinstance(x, Tensor) and (x.dtype != torch.float32 or x.device != device):
            return f"a setting is {x.dtype} on {x.device}; it must be float32 on {device}"
    return None


def _same_order(x: Tensor, y: Tensor) -> bool:
    """Compare strides where a dimension is larger than one: a 1 x 1 convolution is contiguous and channels-last."""
    return x.stride() == y.stride() or all(
        a == b for size, a, b in zip(x.shape, x.stride(), y.stride()) if size > 1
    )


# One entry per list of tensors, tens of kilobytes per model, never dropped: a captured graph can hold their addresses.
# The content follows from the key, so an entry that outlives its tensors is still right.
_tables: dict[tuple, tuple[Tensor, Tensor, Tensor]] = {}


def _table(params: list[Tensor], buffers: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors on the device: a row of lars.cu's `Tensor` for each parameter (T, 4) int64; the
    parameter of each chunk (C,) int32; two partial sums per chunk (C, 2) float32."""
    device = params[0].device
    key = (device, CHUNK, *((p.data_ptr(), b.data_ptr(), p.numel()) for p, b in zip(params, buffers)))
    if key not in _tables:
        rows, chunks = [], []
        for number, (p, b) in enumerate(zip(params, buffers)):
            rows.append([p.data_ptr(), b.data_ptr(), p.numel(), len(chunks)])
            chunks += [number] * -(-p.numel() // CHUNK)
        _tables[key] = (
            torch.tensor(rows, dtype=torch.int64, device=device),
            torch.tensor(chunks, dtype=torch.int32, device=device),
            torch.zeros(len(chunks), 2, dtype=torch.float32, device=device),
        )
    return _tables[key]


def prove(
    device: torch.device, sizes: Iterable[int] = (), implementation: Callable[..., None] = lars_kernel
) -> None:
    """Compare four steps of kernel and foreach. Raises KernelError.

    The tensors have odd sizes, several chunks, zeros, and each of `sizes`. Two steps are under a GradScaler: one with
    scaled gradients, and one with an overflow, which must change nothing.
    """
    settings = LARSSettings(weight_decay=1e-2, nesterov=True)
    lr, scale = torch.zeros((), device=device), torch.full((), 1024.0, device=device)
    fill(lr, 0.5)
    waves = [torch.sin(torch.arange(n, device=device) * 0.7) for n in (3, 2 * CHUNK + 5, 64, *sizes)]
    waves.append(torch.zeros(7, device=device))
    kernel, twin = ([w.clone() for w in waves] for _ in range(2))
    buffers = [[torch.zeros_like(w) for w in waves] for _ in range(2)]
    for step, overflow in enumerate((None, 0.0, 1.0, None)):
        grads = [torch.cos(w * (step + 1)) for w in waves]
        scaling = []
        if overflow is not None:
            grads = [g * scale for g in grads]
            scaling = [scale, torch.full((), overflow, device=device)]
        implementation(kernel, grads, buffers[0], lr, settings, *scaling)
        lars_foreach(twin, grads, buffers[1], lr, settings, *scaling)
    require_close("LARS' weights", torch.cat(kernel), torch.cat(twin))
    require_close("LARS' momentum", torch.cat(buffers[0]), torch.cat(buffers[1]))


@functools.cache
def apex() -> Any:
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
    s, kernels, rate = settings, apex(), on_host(lr)
    reason = why_not(params, grads, buffers, lr, grad_scale, found_inf)
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
        w_norm, g_norm = (
            kernels.multi_tensor_l2norm(APEX_CHUNK, overflow, [x], True)[1] for x in (params, grads)
        )
        torch._foreach_mul_(d, list(trust_ratios(w_norm, g_norm, s).unbind()))
    if s.lr_in_momentum:
        torch._foreach_mul_(d, lr)
        rate = 1.0
    # weight decay, momentum, dampening, rate, nesterov, first run, decay after momentum, scale of the gradients
    rule = (decay, float(s.momentum), 0.0, rate, s.nesterov, False, False, 1.0)
    kernels.multi_tensor_sgd(APEX_CHUNK, skip, [d, params, buffers], *rule)


def prove_apex(device: torch.device, sizes: Iterable[int] = ()) -> None:
    """Compare four steps of apex and foreach, as `prove` does. Raises KernelError."""
    try:
        prove(device, sizes, lars_apex)
    # An extension of another version of torch or CUDA, or with other arguments.
    except (RuntimeError, TypeError, AttributeError) as error:
        raise KernelError(f"apex: {error}") from error
