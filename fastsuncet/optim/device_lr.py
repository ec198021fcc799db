"""Optimizers whose learning rate is a tensor on the device, which a schedule fills: LARS's base, and torch's own two.

A captured CUDA graph reads the rate of the present step from that tensor.
"""

from collections.abc import Iterable
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# How a group is held and computed belongs to this machine and not to the run.
HELD = ("lr", "implementation", "fused", "foreach", "capturable")


def fill(held: Tensor, lr: float | Tensor) -> None:
    """Fill the 0-dim tensor of a learning rate, and note the number, if it is one, for `on_host`."""
    held.fill_(lr)
    noted = None if isinstance(lr, Tensor) else float(lr)
    # The version tells a later change of the tensor by others.
    setattr(held, "_on_host", (noted, held._version))  # noqa: B010 - the stubs do not know it


def on_host(lr: float | Tensor) -> float | None:
    """Return a learning rate as a number without waiting for the device, None where only the device knows it."""
    if not isinstance(lr, Tensor):
        return float(lr)
    noted, version = getattr(lr, "_on_host", (None, lr._version))
    return noted if version == lr._version else None


class DeviceLR(Optimizer):
    """An optimizer with `set_lr`, whose `load_state_dict` keeps how the learning rate is held."""

    # torch's own, without the wrapper for an optimizer that is compiled: its first call imports torch._dynamo, which
    # takes as long as torch itself.
    add_param_group = unwrap(Optimizer.add_param_group)
    state_dict = unwrap(Optimizer.state_dict)
    zero_grad = unwrap(Optimizer.zero_grad)

    def set_lr(self, lr: float | Tensor) -> None:
        """Set the learning rate of every group; a tensor is filled, without waiting for the device.

        Groups that hold a tensor also take a 0-dim one of the same device, so a captured step reads today's value.
        """
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor):
                fill(group["lr"], lr)
            else:
                group["lr"] = lr

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but fill a tensor learning rate in place, and keep each group's HELD settings."""
        held = [{key: group[key] for key in HELD if key in group} for group in self.param_groups]
        unwrap(Optimizer.load_state_dict)(self, state_dict)
        for group, own in zip(self.param_groups, held):
            saved = float(group["lr"])
            group |= own
            group["lr"] = own["lr"].fill_(saved) if isinstance(own["lr"], Tensor) else saved


class AdamW(DeviceLR, torch.optim.AdamW):
    """torch's fused AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101): the weight decay is lr x weight_decay.

    Under `torch.amp.GradScaler` the scale and the overflow flag are read on the device. Its state is made in the first
    step; CUDA graphs are captured after that.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor, *, momentum: float, weight_decay: float):
        on_gpu = isinstance(lr, Tensor) and lr.device.type == "cuda"
        options = {"betas": (momentum, 0.999), "weight_decay": weight_decay}
        # torch refuses to capture a step in a graph unless it is capturable; the fused kernel is the same.
        super().__init__(params, lr=lr, **options, fused=True, capturable=on_gpu)


class SGD(DeviceLR, torch.optim.SGD):
    """torch's fused SGD with momentum: b = momentum b + g + weight_decay w, w = w - lr b.

    Momentum buffers are zeros from construction, which is torch's first step to the bit: a parameter whose gradients
    begin later, such as SwAV's prototypes, has one too. torch's own are memory that nothing has written where the first
    step overflows in fp16, and the second step would read it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        momentum: float,
        weight_decay: float,
        nesterov: bool = False,
    ):
        options = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, lr=lr, **options, fused=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and give each new parameter its momentum buffer."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p, requires_grad=False)
