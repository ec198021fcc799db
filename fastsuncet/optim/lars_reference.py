"""The formula of LARS, one tensor at a time: the oracle of the fast implementations."""

import torch
from torch import Tensor

from fastsuncet.optim.lars_foreach import LARSSettings


def lars_reference(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    lr: float | Tensor,
    settings: LARSSettings,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update `params` and `buffers` in place. The host waits for the device at every tensor."""
    s = settings
    if found_inf is not None and found_inf > 0:
        return
    for w, g, b in zip(params, grads, buffers):
        if grad_scale is not None:
            g = g / grad_scale
        w_norm, g_norm = _norm(w), _norm(g)
        if not s.lars:
            d = g + s.weight_decay * w
        elif w_norm == 0 or g_norm == 0:
            d = g
        else:
            ratio = s.trust_coefficient * w_norm / (g_norm + s.weight_decay * w_norm + s.eps)
            d = (g + s.weight_decay * w) * ratio
        if s.lr_in_momentum:
            d = lr * d
        b.mul_(s.momentum).add_(d)
        update = d + s.momentum * b if s.nesterov else b
        w.sub_(update if s.lr_in_momentum else lr * update)


def _norm(x: Tensor) -> Tensor:
    """Return the Euclidean norm, in float32 for 16-bit tensors: a float16 norm overflows at 65,504."""
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
