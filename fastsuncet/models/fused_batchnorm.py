"""BatchNorm with the ReLU behind it and the residual before it as one operation, on CUDA by kernels of our own.

One by one, BatchNorm, addition and ReLU move 26 to 32 bytes an activation through memory, forward and backward and in
16 bits; as one they move 16 to 20 (fastsuncet/kernels/norm.cu). What is kept for the backward pass is BatchNorm's
input, which PyTorch keeps too, and a bit an activation where a residual was added.

`implementation="torch"` is the twin: `RankBatchNorm` or torch's BatchNorm, an addition, a ReLU. It runs wherever the
kernels do not. The kernels have not run on a card yet, so nothing chooses them unasked.
"""

from typing import Any, Literal

import torch
from timm.models import resnet as timm_resnet
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models import resnet

from fastsuncet.distributed.collectives import Group, sum_over_ranks, sum_over_ranks_, world_size
from fastsuncet.kernels import launcher as launch
from fastsuncet.kernels.self_test import require_close, usable
from fastsuncet.models.sync_batchnorm import RankBatchNorm

THREADS = 256
SUM_BLOCKS = 512  # that leave partial sums: a few for every multiprocessor, few enough to join quickly
ROWS = 4  # a thread walks down at least as many, or its channels' constants would be most of what it reads
ROW_BLOCKS = 2048  # and more of them where these are enough: several rounds of blocks on the largest card
ELEMENTS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
BLOCKS = (resnet.BasicBlock, resnet.Bottleneck, timm_resnet.BasicBlock, timm_resnet.Bottleneck)


def options(dtype: torch.dtype) -> tuple[str, ...]:
    """What norm.cu is compiled with for activations of `dtype`."""
    return (f"-DTHREADS={THREADS}", f"-DELEMENT={ELEMENTS[dtype]}")


def fuse(
    model: nn.Module,
    *,
    shared: bool,
    group: Group = None,
    implementation: Literal["torch", "kernel"] = "torch",
) -> nn.Module:
    """`model`, its ResNet's BatchNorms fused with what follows them; `shared`: with the statistics of all ranks.

    In place of `fastsuncet.models.sync_batchnorm.synchronise`, before DDP. Parameters, buffers and state_dict keys stay the very same.
    Takes torchvision's and timm's plain residual blocks; a block with more in it (squeeze-and-excitation, drop path)
    keeps its form and gets the BatchNorms alone. Raises ValueError for another implementation.
    """
    if implementation not in ("torch", "kernel"):
        raise ValueError(f'fuse: implementation is {implementation!r}; it is "torch" or "kernel"')

    def convert(module: nn.Module) -> nn.Module:
        if isinstance(module, _BatchNorm):
            norm = FusedNorm.take_over(module, group)
            norm.shared, norm.kernel = shared, implementation == "kernel"
            return norm
        for name, child in module.named_children():
            setattr(module, name, convert(child))
        if isinstance(module, BLOCKS) and _is_plain(module):
            return FusedBlock.take_over(module)
        for activation in ("relu", "act1"):  # the stem's, in torchvision and timm
            stem = isinstance(getattr(module, "conv1", None), nn.Conv2d) and not isinstance(module, BLOCKS)
            if stem and isinstance(getattr(module, activation, None), nn.ReLU):
                module.bn1.relu = True
                setattr(module, activation, nn.Identity())
        return module

    return convert(model)


def _is_plain(block: nn.Module) -> bool:
    """Nothing but convolutions, BatchNorms, ReLUs and a shortcut."""
    ours = ("conv", "bn", "downsample")
    return all(
        name.startswith(ours) or isinstance(child, nn.Identity | nn.ReLU)
        for name, child in block.named_children()
    )


class FusedBlock(nn.Module):
    """A residual block of two or three convolutions, the last BatchNorm taking the shortcut with it."""

    @classmethod
    def take_over(cls, block: nn.Module) -> "FusedBlock":
        """Its modules, the same; its BatchNorms are `FusedNorm` already."""
        fused = cls()
        fused._modules = block._modules
        fused.downsample = block.downsample  # None is no module
        for name in ("bn1", "bn2", "bn3"):
            if hasattr(fused, name):
                getattr(fused, name).relu = True
        return fused.train(block.training)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, S, S) to what the block makes of it."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn1(self.conv1(x))
        if not hasattr(self, "conv3"):
            return self.bn2(self.conv2(x), shortcut)
        return self.bn3(self.conv3(self.bn2(self.conv2(x))), shortcut)


class FusedNorm(RankBatchNorm):
    """relu(BatchNorm(x) + residual), the residual and the ReLU where there are any."""

    relu = False
    shared = True  # statistics of all ranks
    kernel = False  # asked for; it is used where it can be

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x and residual (N, C, ...) -> the same shape and dtype; a collective where statistics are shared."""
        if self.kernel and self._takes(x, residual):
            if self.num_batches_tracked is not None:
                self.num_batches_tracked += 1
            return fused_norm(
                x,
                residual,
                self.weight,
                self.bias,
                self.running_mean,
                self.running_var,
                eps=self.eps,
                momentum=self.momentum,
                relu=self.relu,
                group=self.group if self.shared else ALONE,
            )
        y = super().forward(x) if self.shared else _BatchNorm.forward(self, x)
        y = y if residual is None else y + residual
        return F.relu(y) if self.relu else y

    def _takes(self, x: Tensor, residual: Tensor | None) -> bool:
        plain = self.training and self.momentum is not None
        floats = all(
            t is None or t.dtype == torch.float32 for t in (self.weight, self.bias, self.running_mean)
        )
        return plain and floats and usable("norm.cu", x, prove) and fits(x, residual)


ALONE: Any = "alone"  # in place of a group: this process's statistics, whatever groups there are


def fits(x: Tensor, residual: Tensor | None) -> bool:
    """Whether the kernels take these activations: dense rows of channels, 16 bytes at a time, more than one row."""
    return (
        x.dtype in ELEMENTS
        and x.dim() in (2, 4)
        and x.is_contiguous(memory_format=_rows_of_channels(x))
        and x.shape[1] % _per_thread(x.dtype) == 0
        and x.data_ptr() % 16 == 0
        and x.numel() > x.shape[1]
        and (residual is None or (residual.dtype == x.dtype and residual.shape == x.shape))
    )


def fused_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    *,
    eps: float,
    momentum: float,
    relu: bool,
    group: Group = None,
) -> Tensor:
    """relu((x - mean) / sqrt(variance + eps) * weight + bias + residual) in training, by the kernels.

    x, residual (N, C) or channels-last (N, C, H, W), as `fits` says; the others (C,) float32 or None. Statistics of all
    ranks of `group`, which join by two all-reduces, or with group=ALONE of this process. Running statistics are updated
    in place. Gradients as of `RankBatchNorm`: this rank's share of that of the sum over ranks of the losses.
    """
    setting = (running_mean, running_variance, eps, momentum, relu, group)
    return _Fused.apply(x, residual, weight, bias, *setting)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, running_mean, running_variance, eps, momentum, relu, group):
        module, grid = launch.load("norm.cu", x.device, options(x.dtype)), _Grid(x)
        channels, ranks = x.shape[1], 1 if group is ALONE else world_size(group)
        if residual is not None:
            residual = _aligned(residual, x)

        moments = x.new_empty(grid.sums[0], 1 + 2 * channels, dtype=torch.float32)
        grid.launch(module, "norm_moments", grid.sums, x, moments)
        inverse = x.new_empty(channels, dtype=torch.float32)
        wanted = (inverse, running_mean, running_variance, eps, momentum)
        if ranks > 1:
            joined = _join_ranks(module, sum_over_ranks_(_sums(module, moments), group), *wanted)
        else:
            joined = _join(module, moments, *wanted)
        count, mean = joined[:1], joined[1 : 1 + channels]

        y = torch.empty_like(x)
        signs = None
        if relu and residual is not None:
            signs = torch.empty(x.numel() // _per_thread(x.dtype), dtype=torch.uint8, device=x.device)
        grid.launch(
            module, "norm_apply", grid.rows, x, residual, mean, inverse, weight, bias, y, signs, more=(relu,)
        )
        ctx.save_for_backward(x, signs, mean, inverse, weight, bias, count)
        ctx.relu, ctx.group, ctx.ranks, ctx.with_residual = relu, group, ranks, residual is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, signs, mean, inverse, weight, bias, count = ctx.saved_tensors
        module, grid = launch.load("norm.cu", x.device, options(x.dtype)), _Grid(x)
        channels, dy = x.shape[1], _aligned(dy, x)
        norm = (dy, x, signs, mean, inverse, weight, bias)

        parts = x.new_empty(grid.sums[0], 2 * channels, dtype=torch.float32)
        grid.launch(module, "norm_gradient_sums", grid.sums, *norm, parts, more=(ctx.relu,))
        own = parts.new_empty(2 * channels)
        arguments = launch.Arguments(parts, own, len(parts), 2 * channels)
        module.launch("norm_gradient_join", (_joining_blocks(2 * channels), 1), THREADS, arguments)
        sums = sum_over_ranks(own, ctx.group) if ctx.ranks > 1 else own

        d_x, d_residual = torch.empty_like(x), None
        if ctx.with_residual:
            d_residual = torch.empty_like(x) if ctx.relu else dy
        written = d_residual if ctx.relu else None
        grid.launch(
            module, "norm_gradient_apply", grid.rows, *norm, sums, count, d_x, written, more=(ctx.relu,)
        )
        d_weight = None if weight is None else own[channels:]
        d_bias = None if bias is None else own[:channels]
        return d_x, d_residual, d_weight, d_bias, *[None] * 6


class _Grid:
    """How activations are laid over blocks: `width` threads side by side, (groups of rows, groups of channels)."""

    def __init__(self, x: Tensor):
        self.channels = x.shape[1]
        self.n = x.numel() // self.channels
        columns = self.channels // _per_thread(x.dtype)
        self.width = min(columns & -columns, THREADS, 32)  # the largest power of two in it; 32 are 512 bytes
        tiles, lanes = columns // self.width, THREADS // self.width
        groups = -(-self.n // (lanes * ROWS))
        self.rows = (min(groups, max(1, ROW_BLOCKS // tiles)), tiles)
        self.sums = (min(groups, max(1, SUM_BLOCKS // tiles)), tiles)

    def launch(
        self, module, kernel: str, grid: tuple[int, int], *tensors: Tensor | None, more: tuple = ()
    ) -> None:
        arguments = launch.Arguments(*tensors, self.n, self.channels, self.width, *more)
        module.launch(kernel, grid, THREADS, arguments)


def _join(
    module,
    moments: Tensor,
    inverse: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    eps: float,
    momentum: float,
) -> Tensor:
    """(groups, 1 + 2C) -> (1 + 2C): the count, the means, the variances of all together. Writes the next three."""
    joined, channels = _statistics(moments, moments.shape[1]), moments.shape[1] // 2
    wanted = (inverse, running_mean, running_variance, len(moments), channels, float(eps), float(momentum))
    arguments = launch.Arguments(moments, joined, None, *wanted)
    module.launch("norm_join", (_joining_blocks(channels), 1), THREADS, arguments)
    return joined


def _statistics(like: Tensor, columns: int) -> Tensor:
    """Room for a count, means and variances, the means where 16 bytes can be read at a time."""
    return like.new_empty(3 + columns)[3:]


def _sums(module, moments: Tensor) -> Tensor:
    """(groups, 1 + 2C) -> (1 + 2C) float64: what ranks add up, as `join_statistics` does."""
    sums, channels = moments.new_empty(moments.shape[1], dtype=torch.float64), moments.shape[1] // 2
    arguments = launch.Arguments(moments, None, sums, None, None, None, len(moments), channels, 0.0, 0.0)
    module.launch("norm_join", (_joining_blocks(channels), 1), THREADS, arguments)
    return sums


def _join_ranks(
    module,
    sums: Tensor,
    inverse: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    eps: float,
    momentum: float,
) -> Tensor:
    """`_join` of `_sums` that were added over ranks."""
    joined, channels = _statistics(inverse, len(sums)), len(sums) // 2
    wanted = (inverse, running_mean, running_variance, channels, float(eps), float(momentum))
    arguments = launch.Arguments(sums, joined, *wanted)
    module.launch("norm_join_ranks", (-(-channels // THREADS), 1), THREADS, arguments)
    return joined


def _joining_blocks(columns: int) -> int:
    return -(-columns // (THREADS // 8))  # eight threads a column


def _per_thread(dtype: torch.dtype) -> int:
    return 16 // dtype.itemsize


def _rows_of_channels(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format


def _aligned(y: Tensor, x: Tensor) -> Tensor:
    """`y` in the dtype and layout that the kernels read beside `x`; as a rule it is so already."""
    y = y.to(x.dtype).contiguous(memory_format=_rows_of_channels(x))
    return y if y.data_ptr() % 16 == 0 else y.clone()


def prove(device: torch.device) -> None:
    """Values, gradients and running statistics of kernels and twin, in each dtype. Raises KernelError."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)):
        wave = torch.arange(2 * 24 * 9 * 5, device=device).view(2, 24, 9, 5)
        x, residual, d_y = (
            torch.sin(wave * step).to(dtype).contiguous(memory_format=torch.channels_last)
            for step in (0.7, 0.9, 1.1)
        )
        weight, bias = (torch.cos(torch.arange(24, device=device) * step) for step in (0.3, 0.5))
        seen: list[list[Tensor]] = []
        for kernel in (True, False):
            leaves = [t.detach().clone().requires_grad_() for t in (x, residual, weight, bias)]
            running = [torch.zeros(24, device=device), torch.ones(24, device=device)]
            if kernel:
                y = fused_norm(*leaves, *running, eps=1e-5, momentum=0.1, relu=True, group=ALONE)
            else:
                wide = F.batch_norm(
                    leaves[0].float(), *running, *leaves[2:], training=True, momentum=0.1, eps=1e-5
                )
                y = F.relu(wide + leaves[1].float()).to(dtype)
            y.backward(d_y)
            seen.append([y.detach(), *running, *(leaf.grad for leaf in leaves)])
        for found, expected in zip(*seen):
            require_close(f"BatchNorm in {dtype}", found.float(), expected.float(), tolerance)
    _prove_joining_ranks(device)


def _prove_joining_ranks(device: torch.device) -> None:
    """That what is added over ranks comes to what one rank has of the same rows, with a mean of 100 deviations."""
    module, channels = launch.load("norm.cu", device, options(torch.float32)), 24
    wave = torch.sin(0.7 * torch.arange(3 * 2 * channels, device=device)).view(3, 2, channels)
    counts = torch.arange(2, 5, device=device, dtype=torch.float32).unsqueeze(1)
    moments = torch.cat([counts, 100 + wave[:, 0], 1 + wave[:, 1].square()], dim=1)
    seen = []
    for join, given in ((_join_ranks, _sums(module, moments)), (_join, moments)):
        inverse, mean, variance = (torch.zeros(channels, device=device) for _ in range(3))
        joined = join(module, given, inverse, mean, variance, 1e-5, 0.1)
        seen.append((joined, inverse, mean, variance))
    for found, expected in zip(*seen):
        require_close("BatchNorm's statistics over ranks", found, expected, 1e-5)
