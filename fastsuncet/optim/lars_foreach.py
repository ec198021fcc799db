"""LARS on lists of tensors: a fixed number of calls for any number of layers, and no host sync.

The authors' code asks `if norm != 0` twice per tensor, and on a GPU each answer waits for all queued work
(110 waits for the 55 weight matrices of a ResNet-50). Here the norms of all tensors are stacked, and every
case is an elementwise choice on that stack.

On a GPU a foreach call is a few launches for all tensors, except the scaling by each tensor's trust ratio,
which is one launch per tensor. On a CPU launches are free and fresh memory is not: there the plain step adds g
and w straight to the momentum, which takes two thirds of the time.
"""

# pyright: reportPrivateImportUsage=false
# The names of torch's foreach operators begin with an underscore; its optimizers are built on them.

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

# A float is cleared through an integer of its width, because 0 * inf and 0 * nan are not 0.
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def require(name: str, value: float, below: float = math.inf) -> None:
    """Raise ValueError for a setting that is not a number from 0 to below `below`."""
    if not isinstance(value, Real) or not 0 <= value < below:
        raise ValueError(f"LARS: {name} must be a number from 0 to below {below}, not {value!r}")


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
        require("momentum", self.momentum, below=1)
        for name in ("weight_decay", "trust_coefficient", "eps"):
            require(name, getattr(self, name))
        if self.trust_coefficient == 0:
            raise ValueError("LARS: trust_coefficient must be above 0, not 0: nothing would learn")
        if self.nesterov and self.momentum == 0:
            raise ValueError("LARS: nesterov needs a momentum above 0")


def lars_foreach(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    lr: float | Tensor,
    settings: LARSSettings,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update `params` and `buffers` in place, by the formula of lars.py.

    All tensors have one device and one dtype. `lr`, `grad_scale` and `found_inf` can be 0-dim tensors on that
    device; they are read there, so a captured CUDA graph reads today's values. Where `found_inf` is not 0 the
    update is computed and changes nothing.
    """
    s = settings
    keep = None if found_inf is None else found_inf == 0
    dtype = torch.promote_types(params[0].dtype, torch.float32)  # a float16 norm overflows at 65,504
    if grad_scale is not None:
        grads = list(torch._foreach_mul(grads, grad_scale.reciprocal()))
    if s.lars and keep is None and not s.nesterov and params[0].device.type == "cpu":
        ratios = trust_ratios(_norms(params, dtype), _norms(grads, dtype), s)
        ratios = ratios * lr if s.lr_in_momentum else ratios
        torch._foreach_mul_(buffers, s.momentum)
        torch._foreach_addcmul_(buffers, grads, list(ratios.unbind()))
        torch._foreach_addcmul_(buffers, params, list((s.weight_decay * ratios).unbind()))
        _subtract_(params, buffers, 1.0 if s.lr_in_momentum else lr)
        return
    d = list(torch._foreach_add(grads, params, alpha=s.weight_decay))
    if keep is not None:
        bits = BITS[d[0].element_size()]
        torch._foreach_mul_([x.view(bits) for x in d], keep.to(bits))
    if s.lars:
        ratios = trust_ratios(_norms(params, dtype), _norms(grads, dtype), s)
        torch._foreach_mul_(d, list(_kept(ratios, keep, 0, dtype).unbind()))
    if s.lr_in_momentum:
        torch._foreach_mul_(d, lr)
    torch._foreach_mul_(buffers, _kept(s.momentum, keep, 1, dtype))
    torch._foreach_add_(buffers, d)
    if s.nesterov:
        torch._foreach_add_(d, buffers, alpha=s.momentum)
    _subtract_(params, d if s.nesterov else buffers, _kept(1.0 if s.lr_in_momentum else lr, keep, 0, dtype))


def trust_ratios(w_norm: Tensor, g_norm: Tensor, settings: LARSSettings) -> Tensor:
    """Return trust_coefficient |w| / (|g| + weight_decay |w| + eps) of each tensor, (N,), from its two norms.

    Where a norm is zero, (g + weight_decay w) x ratio must be the raw gradient: the ratio is 1 where |w| = 0
    (nothing decays there) and 0 where |g| = 0 (which also drops the decay).
    """
    ratios = settings.trust_coefficient * w_norm / (g_norm + settings.weight_decay * w_norm + settings.eps)
    return ratios.masked_fill(w_norm == 0, 1).masked_fill(g_norm == 0, 0)


def _norms(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))


def _kept(value, keep: Tensor | None, otherwise: float, dtype: torch.dtype):
    """Return `value` where the step is kept, else `otherwise`, chosen on the device. Without a scaler: `value`."""
    if keep is None:
        return value
    if not isinstance(value, Tensor):
        value = torch.full_like(keep, value, dtype=dtype)
    return torch.where(keep, value, otherwise)


def _subtract_(params: list[Tensor], update: list[Tensor], step: float | Tensor) -> None:
    """params -= step * update. A tensor cannot be foreach's `alpha`, so it costs one more pass."""
    if isinstance(step, Tensor):
        torch._foreach_sub_(params, torch._foreach_mul(update, step))
    else:
        torch._foreach_add_(params, update, alpha=-step)
