"""LARS in two launches of our own (fastsuncet/kernels/lars.cu): 28 bytes a parameter, where foreach moves 60.

A group with `lars=False` needs no norms and is one launch, so the three launches of a model with biases and BatchNorm
left out are its step. Nothing is allocated, copied or waited for once a list of tensors has been seen.
"""

import ctypes

import torch
from torch import Tensor

from fastsuncet.kernels import launcher as launch
from fastsuncet.kernels.self_test import require_close, usable
from fastsuncet.optim.lars_foreach import lars_foreach

THREADS = 256
CHUNK = 8192  # elements a block: 3,500 blocks for a ResNet-50 level out, and its largest tensor has 512 partial sums
TENSORS = (
    448  # in one launch: their gradients' addresses and the rest stay under the 4 KB that any driver takes
)


class Unfit(launch.KernelError):
    """Tensors the kernel cannot take; nothing was launched."""


def options() -> tuple[str, ...]:
    """What lars.cu is compiled with."""
    return (f"-DTHREADS={THREADS}", f"-DCHUNK={CHUNK}", f"-DTENSORS={TENSORS}")


def lars_kernel(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    weight_decay: float,
    trust_coefficient: float,
    eps: float,
    nesterov: bool,
    lr_in_momentum: bool,
    lars: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Updates `params` and `buffers` in place as `lars_foreach` does. All float32, on one CUDA device, dense, each
    with the layout of its parameter; `lr`, `grad_scale` and `found_inf` are read on the device.

    Under a captured CUDA graph the tensors' addresses are those of the capture, and a plain float `lr` its value.
    The same bits in every run. Raises Unfit for tensors that are anything else.
    """
    reason = why_not(params, grads, buffers, lr, grad_scale, found_inf)
    if reason is not None:
        raise Unfit(f"LARS: the kernel cannot take these tensors: {reason}")
    module = launch.load("lars.cu", params[0].device, options())
    lr_on_device, lr = (lr, 0.0) if isinstance(lr, Tensor) else (None, float(lr))
    rule = (momentum, weight_decay, trust_coefficient, eps, nesterov, lr_in_momentum, lars)
    for start in range(0, len(params), TENSORS):
        part = slice(start, start + TENSORS)
        tensors, chunks, slots = _table(params[part], buffers[part])
        addresses = [g.data_ptr() for g in grads[part]]
        gradients = (ctypes.c_void_p * TENSORS)(*addresses)
        grid = (len(chunks), 1)
        if lars:
            arguments = launch.Arguments(tensors, chunks, gradients, grad_scale, slots)
            module.launch("lars_norms", grid, THREADS, arguments)
        arguments = launch.Arguments(
            tensors, chunks, gradients, grad_scale, found_inf, slots, lr_on_device, lr, *rule
        )
        module.launch("lars_update", grid, THREADS, arguments)


def lars_auto(params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], **setting) -> None:
    """`lars_kernel` where it takes these tensors and has agreed with its twin on this device, else `lars_foreach`."""
    if usable("lars.cu", params[0], prove):
        try:
            return lars_kernel(params, grads, buffers, **setting)
        except Unfit:  # not asked beforehand: on the host the answer is half of what a step costs
            pass
    return lars_foreach(params, grads, buffers, **setting)


def why_not(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    *scalars: float | Tensor | None,
) -> str | None:
    """What about these tensors the kernel cannot take, or None. Reads no value."""
    device = params[0].device
    for kind, tensors in (("parameter", params), ("gradient", grads), ("momentum", buffers)):
        for x, p in zip(tensors, params):
            if x.dtype != torch.float32 or x.device != device:
                return f"a {kind} is {x.dtype} on {x.device}; all must be float32 on one device"
            if x is p and not (p.is_contiguous() or p.is_contiguous(memory_format=torch.channels_last)):
                return f"a {kind} of shape {tuple(x.shape)} is not dense"
            if x is not p and not _same_order(x, p):
                return (
                    f"a {kind} of shape {tuple(x.shape)} lies in memory in another order than its parameter"
                )
    for x in scalars:
        if isinstance(x, Tensor) and (x.dtype != torch.float32 or x.device != device):
            return f"a setting is {x.dtype} on {x.device}; it must be float32 on {device}"
    return None


def _same_order(x: Tensor, y: Tensor) -> bool:
    """The stride of a dimension of one says nothing: a 1 x 1 convolution is contiguous and channels-last alike."""
    return x.stride() == y.stride() or all(
        a == b for size, a, b in zip(x.shape, x.stride(), y.stride()) if size > 1
    )


# Built once for a list of tensors and never dropped: a captured graph may hold their addresses. What is in one follows
# from its key alone, so one that outlived its tensors is still right. Tens of kilobytes a model.
_tables: dict[tuple, tuple[Tensor, Tensor, Tensor]] = {}


def _table(params: list[Tensor], buffers: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """On the device: what lars.cu calls Tensor, one a row (T, 4) int64; the tensor of each chunk (C,) int32; and the
    slots for two partial sums a chunk (C, 2) float32."""
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


def prove(device: torch.device) -> None:
    """Three steps of kernel and twin over tensors of odd sizes, several chunks and a zero. Raises KernelError."""
    rule = {"momentum": 0.9, "weight_decay": 1e-2, "trust_coefficient": 1e-3, "eps": 1e-8, "lars": True}
    rule |= {"nesterov": True, "lr_in_momentum": False, "grad_scale": None, "found_inf": None}
    lr = torch.full((), 0.5, device=device)
    waves = [torch.sin(torch.arange(n, device=device) * 0.7) for n in (3, 2 * CHUNK + 5, 64)]
    waves.append(torch.zeros(7, device=device))
    kernel, twin = ([w.clone() for w in waves] for _ in range(2))
    buffers = [[torch.zeros_like(w) for w in waves] for _ in range(2)]
    for step in range(3):
        grads = [torch.cos(w * (step + 1)) for w in waves]
        lars_kernel(kernel, grads, buffers[0], lr=lr, **rule)
        lars_foreach(twin, grads, buffers[1], lr=lr, **rule)
    require_close("LARS' weights", torch.cat(kernel), torch.cat(twin), 1e-5)
    require_close("LARS' momentum", torch.cat(buffers[0]), torch.cat(buffers[1]), 1e-5)
