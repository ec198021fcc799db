"""The contenders of bench_norm.py: one BatchNorm with what follows it, forward and backward, by each of them.

apex is tried only where it is installed, and never installed from the package registry, where that name is another
project's. Both of its group BatchNorms know float16 alone, which is as many bytes as bf16: `BatchNorm2d_NHWC`
(apex.contrib.groupbn) takes (N, H, W, C) and fuses the residual and the ReLU; `GroupBatchNorm2d`
(apex.contrib.cudnn_gbn) takes channels-last and fuses neither.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fastsuncet.kernels.self_test import agrees
from fastsuncet.models.fused_batchnorm import ALONE, fused_norm, prove
from fastsuncet.models.sync_batchnorm import RankBatchNorm
from tools.bench.norm_layers import EPS, MOMENTUM, Layer

OPERATORS, COMPILED, OURS = "torch, three operators", "torch.compile of them", "fastsuncet kernels"
GROUPBN, CUDNN = "apex groupbn, float16", "apex cudnn_gbn, float16"

# One forward and backward pass: y, and the gradients of x, weight, bias and, where there is one, the residual.
Pass = Callable[[], list[Tensor]]
Forward = Callable[[Tensor, Tensor | None], Tensor]


class Absent(RuntimeError):
    """Why there is no such contender here."""


def passing(layer: Layer, weight: Tensor, bias: Tensor, forward: Forward) -> Pass:
    """A pass through `forward`, whose parameters `weight` and `bias` are."""
    leaves = [layer.x, weight, bias, *([] if layer.residual is None else [layer.residual])]

    def both() -> list[Tensor]:
        y = forward(layer.x, layer.residual)
        return [y.detach(), *torch.autograd.grad(y, leaves, layer.d_y)]

    return both


def followed(layer: Layer, norm: nn.Module) -> Forward:
    """BatchNorm by `norm`, then an addition, then a ReLU, each an operator of its own."""

    def forward(x: Tensor, residual: Tensor | None) -> Tensor:
        y = norm(x)
        y = y if residual is None else y + residual
        return y if layer.case.kind == "plain" else F.relu(y)

    return forward


def torchs(layer: Layer) -> nn.Module:
    """torch's BatchNorm; over several ranks its SyncBatchNorm, or ours on a CPU, where that does not train."""
    norm = layer.fill(nn.BatchNorm2d(layer.case.channels, eps=EPS, momentum=MOMENTUM))
    if layer.place.world_size == 1:
        return norm
    if layer.place.device.type == "cpu":
        return RankBatchNorm.take_over(norm, None)
    return nn.SyncBatchNorm.convert_sync_batchnorm(norm)


def operators(layer: Layer) -> Pass:
    """torch's three operators."""
    norm = torchs(layer)
    return passing(layer, norm.weight, norm.bias, followed(layer, norm))


def compiled(layer: Layer) -> Pass:
    """The three operators in torch.compile, a graph for each shape."""
    torch._dynamo.reset()  # it gives up on a function after some shapes
    norm = torchs(layer)
    return passing(layer, norm.weight, norm.bias, torch.compile(followed(layer, norm), dynamic=False))


def ours(layer: Layer) -> Pass:
    """Our kernels, where they run and agree with their twin."""
    device = layer.place.device
    if device.type != "cuda":
        raise Absent("they run on CUDA devices, and this is a CPU")
    if not agrees("norm.cu", device, prove):
        raise Absent("they do not agree with their twin here; the warning says where")
    return kernels(layer)


def kernels(layer: Layer) -> Pass:
    """Our kernels, whatever launches them."""
    running = [torch.zeros_like(layer.weight), torch.ones_like(layer.weight)]
    group = None if layer.place.world_size > 1 else ALONE
    rest = {"eps": EPS, "momentum": MOMENTUM, "relu": layer.case.kind != "plain", "group": group}

    def forward(x: Tensor, residual: Tensor | None) -> Tensor:
        return fused_norm(x, residual, layer.weight, layer.bias, *running, **rest)

    return passing(layer, layer.weight, layer.bias, forward)


def groupbn(layer: Layer) -> Pass:
    """apex's persistent NHWC BatchNorm with the residual and the ReLU in it; its group is all ranks, at most 8."""
    try:
        # Where it was built without these kernels, apex prints so and leaves the name out: an ImportError as well.
        from apex.contrib.groupbn import BatchNorm2d_NHWC
    except ImportError as error:
        raise Absent("not installed") from error
    case, half = layer.case, layer.to(torch.float16)
    norm = BatchNorm2d_NHWC(case.channels, fuse_relu=case.kind != "plain", bn_group=layer.place.world_size)
    norm = half.fill(norm).train()

    def forward(x: Tensor, residual: Tensor | None) -> Tensor:
        rows = None if residual is None else residual.permute(0, 2, 3, 1)  # views: no byte moves
        return norm(x.permute(0, 2, 3, 1), rows).permute(0, 3, 1, 2)

    return passing(half, norm.weight, norm.bias, forward)


def cudnn(layer: Layer) -> Pass:
    """apex's group BatchNorm by cuDNN, an addition and a ReLU behind it; its group is all ranks."""
    try:
        from apex.contrib.cudnn_gbn import GroupBatchNorm2d
    except ImportError as error:
        raise Absent("not installed") from error
    half = layer.to(torch.float16)
    alone = not dist.is_initialized()
    if alone:  # it asks for its rank, and exchanges addresses with itself
        backend = "nccl" if layer.place.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        norm = GroupBatchNorm2d(layer.case.channels, layer.place.world_size, eps=EPS, momentum=MOMENTUM)
    finally:
        if alone:
            dist.destroy_process_group()
    norm = half.fill(norm).train()
    return passing(half, norm.weight, norm.bias, followed(half, norm))


CONTENDERS: dict[str, Callable[[Layer], Pass]] = {
    OPERATORS: operators,
    COMPILED: compiled,
    OURS: ours,
    GROUPBN: groupbn,
    CUDNN: cudnn,
}
