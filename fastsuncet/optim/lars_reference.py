"""LARS one tensor at a time: the formula as one would write it on a board, to check the fast one against."""

import torch
from torch import Tensor


def lars_reference(
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
    """Updates `params` and `buffers` in place. Waits for the device at every tensor."""
    if found_inf is not None and found_inf > 0:
        return
    for w, g, b in zip(params, grads, buffers):
        if grad_scale is not None:
            g = g / grad_scale
        w_norm, g_norm = norm(w), norm(g)
        if not lars:
            d = g + weight_decay * w
        elif w_norm == 0 or g_norm == 0:
            d = g
        else:
            d = (g + weight_decay * w) * (trust_coefficient * w_norm / (g_norm + weight_decay * w_norm + eps))
        if lr_in_momentum:
            d = lr * d
        b.mul_(momentum).add_(d)
        update = d + momentum * b if nesterov else b
        w.sub_(update if lr_in_momentum else lr * update)


def norm(x: Tensor) -> Tensor:
    """Euclidean norm, in float32 for 16-bit tensors: a float16 norm overflows at 65,504."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
