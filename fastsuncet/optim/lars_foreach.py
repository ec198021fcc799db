"""LARS on lists of tensors: a fixed number of calls however many layers there are, and no question to the
host.

The authors' code asks `if norm != 0` twice a tensor; on a GPU each answer waits for all work queued so far
(110 waits for a ResNet-50's 55 weight matrices alone). Here the norms of all tensors are stacked and every
case is an elementwise choice on that stack.

On a GPU a foreach call is a few launches for all tensors, with one exception: the scaling by each tensor's
own trust ratio is one launch a tensor. In bytes: 60 a float32 parameter, of which a kernel of its own
would need 28. On a CPU launches are free and fresh memory is not: there the plain step adds g and w straight
to the momentum, 52 bytes and no list of its own, in two thirds of the time.
"""

import torch
from torch import Tensor

# A float is cleared through an integer of its width, because 0 * inf and 0 * nan are not 0.
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def lars_foreach(
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
    """Updates `params` and `buffers` in place: `lars_reference` without a loop or a branch on a value.

    All tensors of one device and one dtype. `lr`, `grad_scale` and `found_inf` may be 0-dim tensors on
    that device; they are read there, so a captured CUDA graph sees today's values. Where `found_inf` is
    not 0 the update is computed and nothing is changed by it.
    """
    keep = None if found_inf is None else found_inf == 0
    dtype = torch.promote_types(params[0].dtype, torch.float32)  # a float16 norm overflows at 65,504
    if grad_scale is not None:
        grads = torch._foreach_mul(grads, grad_scale.reciprocal())
    if lars and keep is None and not nesterov and params[0].device.type == "cpu":
        ratios = trust_ratios(params, grads, weight_decay, trust_coefficient, eps, dtype)
        ratios = ratios * lr if lr_in_momentum else ratios
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_addcmul_(buffers, grads, list(ratios.unbind()))
        torch._foreach_addcmul_(buffers, params, list((weight_decay * ratios).unbind()))
        _subtract_(params, buffers, 1.0 if lr_in_momentum else lr)
        return
    d = torch._foreach_add(grads, params, alpha=weight_decay)
    if keep is not None:
        bits = BITS[d[0].element_size()]
        torch._foreach_mul_([x.view(bits) for x in d], keep.to(bits))
    if lars:
        ratios = trust_ratios(params, grads, weight_decay, trust_coefficient, eps, dtype)
        torch._foreach_mul_(d, list(_kept(ratios, keep, 0, dtype).unbind()))
    if lr_in_momentum:
        torch._foreach_mul_(d, lr)
    torch._foreach_mul_(buffers, _kept(momentum, keep, 1, dtype))
    torch._foreach_add_(buffers, d)
    if nesterov:
        torch._foreach_add_(d, buffers, alpha=momentum)
    _subtract_(params, d if nesterov else buffers, _kept(1.0 if lr_in_momentum else lr, keep, 0, dtype))


def trust_ratios(
    params: list[Tensor],
    grads: list[Tensor],
    weight_decay: float,
    trust_coefficient: float,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """trust_coefficient |w| / (|g| + weight_decay |w| + eps) of each tensor, (N,), norms and all in `dtype`.

    Two exceptions let (g + weight_decay w) x ratio say "the raw gradient" where a norm is zero: a ratio of
    1 where |w| = 0 (nothing decays there), and of 0 where |g| = 0 (which also drops the decay).
    """
    w_norm = torch.stack(torch._foreach_norm(params, 2, dtype=dtype))
    g_norm = torch.stack(torch._foreach_norm(grads, 2, dtype=dtype))
    ratios = trust_coefficient * w_norm / (g_norm + weight_decay * w_norm + eps)
    return ratios.masked_fill(w_norm == 0, 1).masked_fill(g_norm == 0, 0)


def _kept(value: float | Tensor, keep: Tensor | None, otherwise: float, dtype: torch.dtype) -> float | Tensor:
    """`value` if the step is kept, else `otherwise`, chosen on the device; without a scaler just `value`."""
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
