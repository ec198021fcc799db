"""The contenders of bench_norm.py: one BatchNorm with its residual and ReLU, forward and backward, by each of them.

apex is used only where it is installed. Never install it from the package registry, where that name is another
project's. Both of its group BatchNorms support only float16, which has as many bytes as bf16: `BatchNorm2d_NHWC`
(apex.contrib.groupbn) takes (N, H, W, C) and fuses the residual and the ReLU; `GroupBatchNorm2d`
(apex.contrib.cudnn_gbn) takes channels-last and fuses neither.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fastsuncet.kernels.self_test import agrees
from fastsuncet.models.norm_kernel import fused_norm, prove
from fastsuncet.models.sync_batchnorm import RankBatchNorm
from tools.bench.norm_layers import EPS, MOMENTUM, NormLayer

OPERATORS, COMPILED, OURS = "torch, three operators", "torch.compile of them", "fastsuncet kernels"
GROUPBN, CUDNN = "apex groupbn, float16", "apex cudnn_gbn, float16"

# One forward and backward pass: y, and the gradients of x, weight, bias and, where there is one, the residual.
Pass = Callable[[], list[Tensor]]
Forward = Callable[[Tensor, Tensor | None], Tensor]


class Unavailable(RuntimeError):
    """A contender cannot run here; the message says why."""


def pass_of(layer: NormLayer, weight: Tensor, bias: Tensor, forward: Forward) -> Pass:
    """Return a pass through `forward`, whose parameters are `weight` and `bias`."""
    leaves = [layer.x, weight, bias, *([] if layer.residual is None else [layer.residual])]

    def forward_backward() -> list[Tensor]:
        y = forward(layer.x, layer.residual)
        return [y.detach(), *torch.autograd.grad(y, leaves, layer.d_y)]

    return forward_backward


def separate(layer: NormLayer, norm: nn.Module) -> Forward:
    """Return BatchNorm by `norm`, an addition and a ReLU as separate operators."""

    def forward(x: Tensor, residual: Tensor | None) -> Tensor:
        y = norm(x)
        y = y if residual is None else y + residual
        return y if layer.shape.kind == "plain" else F.relu(y)

    return forward


def torch_norm(layer: NormLayer) -> Any:
    """Return torch's BatchNorm; over several ranks its SyncBatchNorm, or ours on a CPU, where torch's cannot train."""
    norm = layer.fill(nn.BatchNorm2d(layer.shape.channels, eps=EPS, momentum=MOMENTUM))
    if layer.place.world_size == 1:
        return norm
    if layer.place.device.type == "cpu":
        return RankBatchNorm.take_over(norm)
    return nn.SyncBatchNorm.convert_sync_batchnorm(norm)


def operators(layer: NormLayer) -> Pass:
    """Return torch's three operators."""
    norm = torch_norm(layer)
    return pass_of(layer, norm.weight, norm.bias, separate(layer, norm))


def compiled(layer: NormLayer) -> Pass:
    """Return the three operators in torch.compile, a graph for each shape."""
    # Without a reset torch.compile stops compiling a function after some shapes.
    torch._dynamo.reset()
    norm = torch_norm(layer)
    return pass_of(layer, norm.weight, norm.bias, torch.compile(separate(layer, norm), dynamic=False))


def ours(layer: NormLayer) -> Pass:
    """Return our kernels, where they run and agree with their reference."""
    device = layer.place.device
    if device.type != "cuda":
        raise Unavailable("needs a CUDA device")
    if not agrees("norm.cu", device, prove):
        raise Unavailable("its results differ from those of its reference; see the warning above")
    return kernels(layer)


def kernels(layer: NormLayer) -> Pass:
    """Return our kernels without a check of the device."""
    running = [torch.zeros_like(layer.weight), torch.ones_like(layer.weight)]
    rest = {"eps": EPS, "momentum": MOMENTUM, "relu": layer.shape.kind != "plain", "shared": True}

    def forward(x: Tensor, residual: Tensor | None) -> Tensor:
        return fused_norm(x, residual, layer.weight, layer.bias, *running, **rest)

    return pass_of(layer, layer.weight, layer.bias, forward)


def groupbn(layer: NormLayer) -> Pass:
    """Return apex's persistent NHWC BatchNorm with residual and ReLU; its group is all ranks, at most 8."""
    try:
        # An apex that was built without these kernels leaves the name out, which is an ImportError too.
        from apex.contrib.groupbn import BatchNorm2d_NHWC
    except ImportError as error:
        raise Unavailable("not installed") from error
    shape, half = layer.shape, layer.to(torch.float16)
    norm = BatchNorm2d_NHWC(shape.channels, fuse_relu=shape.kind != "plain", bn_group=layer.place.world_size)
    norm = half.fill(norm).train()

    def forward(x: Tensor, residual: Tensor | None) -> Tensor:
        # Views: no byte moves.
        rows = None if residual is None else residual.permute(0, 2, 3, 1)
        return norm(x.permute(0, 2, 3, 1), rows).permute(0, 3, 1, 2)

    return pass_of(half, norm.weight, norm.bias, forward)


def cudnn(layer: NormLayer) -> Pass:
    """Return apex's group BatchNorm by cuDNN, then an addition and a ReLU; its group is all ranks."""
    try:
        from apex.contrib.cudnn_gbn import GroupBatchNorm2d
    except ImportError as error:
        raise Unavailable("not installed") from error
    half = layer.to(torch.float16)
    # It asks for its rank and exchanges addresses, even with itself.
    alone = not dist.is_initialized()
    if alone:
        backend = "nccl" if layer.place.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        norm = GroupBatchNorm2d(layer.shape.channels, layer.place.world_size, eps=EPS, momentum=MOMENTUM)
    finally:
        if alone:
            dist.destroy_process_group()
    norm = half.fill(norm).train()
    return pass_of(half, norm.weight, norm.bias, separate(half, norm))


CONTENDERS: dict[str, Callable[[NormLayer], Pass]] = {
    OPERATORS: operators,
    COMPILED: compiled,
    OURS: ours,
    GROUPBN: groupbn,
    CUDNN: cudnn,
}
