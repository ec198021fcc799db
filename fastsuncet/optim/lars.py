"""LARS, layer-wise adaptive rate scaling (arXiv 1708.03888), as the authors of SuNCEt ran it.

The default, `nesterov=False, lr_in_momentum=False`, is the paper's: apex LARC without clipping around SGD
with momentum (recipe section 4.1, column V0). Per tensor, with gradient g, weight w, momentum buffer b:

    d = (g + weight_decay w) * trust_coefficient |w| / (|g| + weight_decay |w| + eps),  or g where |w| |g| = 0
    b = momentum b + d
    w = w - lr b

`lr_in_momentum` is the authors' later code (V1) and the original LARS: b = momentum b + lr d, w = w - b.
The two differ only while the learning rate changes. `nesterov` steps along d + momentum b instead of b.
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from fastsuncet.optim.device_lr import DeviceLR
from fastsuncet.optim.lars_foreach import LARSSettings, lars_foreach, require

IMPLEMENTATIONS = ("auto", "foreach", "kernel", "apex")


def lars_auto(params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], *rest) -> None:
    """Run `lars_kernel`, else `lars_apex`, where it takes the tensors and agreed with its twin; else `lars_foreach`."""
    if params[0].is_cuda:
        from fastsuncet.kernels.switches import usable
        from fastsuncet.optim import lars_kernel  # a CPU compiles no kernels

        # Tensors are not checked beforehand: on the host the check is half the cost of a step.
        with contextlib.suppress(lars_kernel.UnsupportedTensors):
            if usable("lars.cu", params[0], lars_kernel.prove):
                return lars_kernel.lars_kernel(params, grads, buffers, *rest)
        with contextlib.suppress(lars_kernel.UnsupportedTensors):
            if lars_kernel.apex() is not None and usable(lars_kernel.APEX, params[0], lars_kernel.prove_apex):
                return lars_kernel.lars_apex(params, grads, buffers, *rest)
    return lars_foreach(params, grads, buffers, *rest)


def _implementation(name: str) -> Callable[..., None]:
    if name in ("auto", "foreach"):
        return {"auto": lars_auto, "foreach": lars_foreach}[name]
    from fastsuncet.optim import lars_kernel  # a CPU compiles no kernels

    return getattr(lars_kernel, f"lars_{name}")


class LARS(DeviceLR):
    """SGD with momentum whose step in each tensor is proportional to the tensor's norm.

    params: parameters, or parameter groups that can override every keyword (see `parameter_groups`). momentum, from 0
    to below 1; weight_decay, added to the gradient; trust_coefficient, above 0, the local learning rate; eps, added to
    the norms' sum; nesterov and lr_in_momentum as in the formula above; lars=False: SGD with momentum and weight
    decay, without the trust ratio.
    lr: a float, or a 0-dim tensor on the parameters' device, which `set_lr` fills in place: a captured CUDA
    graph needs that. Both round alike to float32, but are not the same bits. implementation: "foreach" (all
    tensors at once), "kernel" (two CUDA launches, float32 only), "apex" (NVIDIA's kernels, where they are installed),
    "auto" (the kernel, else apex, where it runs and agreed with foreach when it was first tried, else foreach).

    Works on float64, float32, bfloat16 and float16 in any memory layout, norms in float32 or better. A
    parameter without gradient is left as it is. Under `torch.amp.GradScaler` the scale and the overflow
    flag are read on the device: a step with an overflow changes neither weights nor momentum, and the host
    does not wait. The gradients stay scaled.

    Momentum buffers exist from construction and are filled in place by `load_state_dict`, so that no step
    allocates state (a CUDA graph would replay its zeros). They copy the layout of the parameters: convert
    the model first.

    Raises ValueError for settings out of range and for parameters that FSDP has sharded, RuntimeError for a sparse
    gradient.
    """

    _step_supports_amp_scaling = True  # GradScaler then leaves `grad_scale` and `found_inf` here for step()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        nesterov: bool = False,
        lr_in_momentum: bool = False,
        lars: bool = True,
        implementation: str = "auto",
    ):
        settings = LARSSettings(
            momentum, weight_decay, trust_coefficient, eps, nesterov, lr_in_momentum, lars
        )
        super().__init__(params, {"lr": lr, **asdict(settings), "implementation": implementation})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check a group's settings, add it as torch does, and give each new parameter its momentum buffer."""
        group = {**self.defaults, **param_group}
        _settings_of(group)
        lr, implementation = group["lr"], group["implementation"]
        if isinstance(lr, Tensor) and (lr.dim() > 0 or not lr.is_floating_point()):
            got = f"{lr.dtype} of shape {tuple(lr.shape)}"
            raise ValueError(f"LARS: lr must be a number or a floating 0-dim tensor, got {got}")
        if not isinstance(lr, Tensor):
            require("lr", lr)
        if implementation not in IMPLEMENTATIONS:
            names = ", ".join(IMPLEMENTATIONS)
            raise ValueError(f"LARS: implementation {implementation!r} is not one of {names}")
        super().add_param_group(param_group)
        added = self.param_groups[-1]["params"]
        for p in added:
            # A shard has its own norm, and by FSDP's first version nothing shows that it is not the tensor's.
            if hasattr(p, "placements") or hasattr(p, "_fsdp_flattened"):
                self.param_groups.pop()
                raise ValueError(
                    f"LARS: a parameter of shape {tuple(p.shape)} is sharded over ranks, and LARS needs the norm of "
                    "the whole tensor: wrap the network in DDP instead of FSDP"
                )
        for p in added:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, once. Returns what `closure` returns, else None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaling = (getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        # All of them first: a gradient that is refused must leave every weight as it was.
        every = [(group, self._lists(group["params"])) for group in self.param_groups]
        for group, lists in every:
            update, settings = _implementation(group["implementation"]), _settings_of(group)
            for params, grads, buffers in lists:
                update(params, grads, buffers, group["lr"], settings, *scaling)
        return loss

    def _lists(self, parameters: list[Tensor]) -> Iterable[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        """Return (parameters, gradients, momentum buffers) for each device and dtype; usually that is one triple."""
        lists: dict[tuple, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
        for p in parameters:
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                shape = tuple(p.shape)
                raise RuntimeError(
                    f"LARS: the gradient of a parameter of shape {shape} is sparse: make it dense"
                )
            triple = lists.setdefault((p.device, p.dtype), ([], [], []))
            for kind, tensor in zip(triple, (p, p.grad, self.state[p]["momentum_buffer"])):
                # A 0-dim tensor of 16 bits times the scaler's is one of 32.
                kind.append(tensor if tensor.ndim else tensor.view(1))
        return lists.values()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Fill momentum buffers and a tensor learning rate in place, bit for bit; take all other settings.

        How the learning rate is held and which implementation runs stay as constructed: they belong to
        this machine, not to the run. A parameter that the file does not have starts from zero momentum.
        Raises ValueError, and changes nothing, for the state of another optimizer, settings out of range and a buffer
        of another shape.
        """
        needed = {"lr", *(field.name for field in fields(LARSSettings))}
        for group in state_dict["param_groups"]:
            if missing := needed.difference(group):
                raise ValueError(f"LARS: this is the state of another optimizer, without {sorted(missing)}")
            _settings_of(group)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(saved, own):
            loaded = state_dict["state"].get(number, {}).get("momentum_buffer")
            if loaded is not None and loaded.shape != p.shape:
                shapes = f"{tuple(loaded.shape)} for a parameter of shape {tuple(p.shape)}"
                raise ValueError(f"LARS: the state holds a momentum buffer of shape {shapes}")
        buffers = {p: state["momentum_buffer"] for p, state in self.state.items()}
        super().load_state_dict(state_dict)
        for p in own:
            loaded = self.state[p].pop("momentum_buffer", None)
            buffer = buffers[p].zero_() if loaded is None else buffers[p].copy_(loaded)
            self.state[p]["momentum_buffer"] = buffer


def _settings_of(group: dict[str, Any]) -> LARSSettings:
    return LARSSettings(**{field.name: group[field.name] for field in fields(LARSSettings)})


def parameter_groups(model: nn.Module, *, exclude_bias_and_norm: bool = False) -> list[dict[str, Any]]:
    """Return the trainable parameters of `model` as groups for `LARS`, in the model's order.

    False: one group, everything scaled and decayed, also BatchNorm and biases: the paper's runs (recipe
    4.1, V0). True: parameters of one dimension, which are biases and those of normalization layers, become plain
    SGD without weight decay, as in SimCLR and the authors' later code. Theirs matches the names "bn" and "bias"
    and so misses the four shortcut BatchNorms of a ResNet-50, whose gammas are called
    `layer1.0.downsample.1.weight`.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    least = 2 if exclude_bias_and_norm else 0  # dimensions
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.ndim >= least]},
        {"params": [p for p in trainable if p.ndim < least], "lars": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
