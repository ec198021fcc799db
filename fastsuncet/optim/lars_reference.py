"""The settings of LARS, and its formula one tensor at a time: the oracle of the fast implementations."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LARSSettings:
    """What LARS does to one parameter group, apart from the learning rate, which changes from step to step.

    Raises ValueError for a value out of range.
    """

    momentum: float = 0.9
    weight_decay: float = 0.0
    trust_coefficient: float = 0.001
    eps: float = 1e-8
    nesterov: bool = False
    lr_in_momentum: bool = False
    lars: bool = True  # False: SGD with momentum and this group's weight decay, without the trust ratio

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"LARS: momentum must be in [0, 1), got {self.momentum}")
        if self.weight_decay < 0 or self.eps < 0:
            values = f"{self.weight_decay} and {self.eps}"
            raise ValueError(f"LARS: weight_decay and eps must not be negative, got {values}")
        if self.trust_coefficient <= 0:
            raise ValueError(f"LARS: trust_coefficient must be positive, got {self.trust_coefficient}")
        if self.nesterov and self.momentum == 0:
            raise ValueError("LARS: nesterov needs a momentum above 0")


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
