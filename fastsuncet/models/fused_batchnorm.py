"""BatchNorm with the residual before it and the ReLU after it as one operation, on CUDA by kernels.

One by one, BatchNorm, addition and ReLU move 26 to 32 bytes per activation through memory, forward and backward
and in 16 bits; as one they move 16 to 20 (fastsuncet/kernels/norm.cu). For the backward pass it keeps
BatchNorm's input, as PyTorch does, and one bit per activation where a residual was added.

Without `kernel` it is the twin: `RankBatchNorm` or torch's BatchNorm, an addition, a ReLU. The twin also runs
where the kernels cannot. The kernels have not run on a GPU yet, so they are off by default.
"""

import torch
from timm.models import resnet as timm_resnet
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models import resnet

from fastsuncet.distributed.collectives import sum_over_ranks, sum_over_ranks_, world_size
from fastsuncet.kernels import launcher
from fastsuncet.kernels.self_test import require_close, usable
from fastsuncet.models.sync_batchnorm import RankBatchNorm

THREADS = 256
SUM_BLOCKS = 512  # blocks that leave partial sums: a few for every multiprocessor, few enough to join quickly
ROWS = 4  # a thread takes at least as many, or its channels' constants would be most of what it reads
ROW_BLOCKS = 2048  # and more rows where this many blocks are enough: several rounds on the largest GPU
ELEMENTS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
BLOCKS = (resnet.BasicBlock, resnet.Bottleneck, timm_resnet.BasicBlock, timm_resnet.Bottleneck)


def options(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the compiler options of norm.cu for activations of `dtype`."""
    return (f"-DTHREADS={THREADS}", f"-DELEMENT={ELEMENTS[dtype]}")


def fuse(model: nn.Module, *, shared: bool, kernel: bool = False) -> nn.Module:
    """Fuse the BatchNorms of a ResNet with what follows them; `shared`: with the statistics of all ranks.

    Replaces `synchronize`, and must come before DDP. Parameters, buffers and state_dict keys stay the same
    objects. Takes torchvision's and timm's plain residual blocks; a block with more in it
    (squeeze-and-excitation, drop path) keeps its form, and only its BatchNorms are replaced.
    """
    if isinstance(model, _BatchNorm):
        norm = FusedNorm.take_over(model)
        norm.shared, norm.kernel = shared, kernel
        return norm
    for name, child in model.named_children():
        setattr(model, name, fuse(child, shared=shared, kernel=kernel))
    if isinstance(model, BLOCKS):
        return FusedBlock.take_over(model) if _is_plain(model) else model
    for activation in ("relu", "act1"):  # of the stem, in torchvision and timm
        norm = getattr(model, "bn1", None)
        if isinstance(norm, FusedNorm) and isinstance(getattr(model, activation, None), nn.ReLU):
            norm.relu = True
            setattr(model, activation, nn.Identity())
    return model


def _is_plain(block: nn.Module) -> bool:
    """Return whether a block has only convolutions, BatchNorms, ReLUs and a shortcut."""
    return all(
        name.startswith(("conv", "bn", "downsample")) or isinstance(child, nn.Identity | nn.ReLU)
        for name, child in block.named_children()
    )


class FusedBlock(nn.Module):
    """A residual block of two or three convolutions whose last BatchNorm adds the shortcut."""

    conv1: nn.Module
    conv2: nn.Module
    conv3: nn.Module  # in a bottleneck
    bn1: nn.Module
    bn2: nn.Module
    bn3: nn.Module
    downsample: nn.Module | None

    @classmethod
    def take_over(cls, block: nn.Module) -> "FusedBlock":
        """Build a block from the very modules of `block`, whose BatchNorms are `FusedNorm` already."""
        fused = cls()
        fused._modules = block._modules
        fused.downsample = block._modules.get("downsample")
        for norm in fused.children():
            if isinstance(norm, FusedNorm):
                norm.relu = True
        return fused.train(block.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, S, S) as the original block does."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn1(self.conv1(x))
        if not hasattr(self, "conv3"):
            return self.bn2(self.conv2(x), shortcut)
        return self.bn3(self.conv3(self.bn2(self.conv2(x))), shortcut)


class FusedNorm(RankBatchNorm):
    """relu(BatchNorm(x) + residual), with or without the residual and the ReLU."""

    relu: bool = False
    shared: bool = True  # statistics of all ranks
    kernel: bool = False  # use the kernels where they can run

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map input and residual (N, C, ...) to the same shape and dtype; a collective if statistics are shared."""
        if self.kernel and self.training and self.momentum is not None and self._fits(input, residual):
            if self.num_batches_tracked is not None:
                self.num_batches_tracked += 1
            return fused_norm(
                input,
                residual,
                self.weight,
                self.bias,
                self.running_mean,
                self.running_var,
                eps=self.eps,
                momentum=self.momentum,
                relu=self.relu,
                shared=self.shared,
            )
        y = super().forward(input) if self.shared else _BatchNorm.forward(self, input)
        y = y if residual is None else y + residual
        return F.relu(y) if self.relu else y

    def _fits(self, x: Tensor, residual: Tensor | None) -> bool:
        """Return whether the kernels take these tensors: dense rows of channels in units of 16 bytes, two or more."""
        numbers = (self.weight, self.bias, self.running_mean)
        return (
            all(t is None or t.dtype == torch.float32 for t in numbers)
            and usable("norm.cu", x, prove)
            and x.dtype in ELEMENTS
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
    shared: bool,
) -> Tensor:
    """Compute relu((x - mean) / sqrt(variance + eps) * weight + bias + residual) in training, by the kernels.

    x, residual (N, C) or channels-last (N, C, H, W), as `FusedNorm` checks them; the others (C,) float32 or None.
    The statistics are those of all ranks if `shared`, joined by one all-reduce forward and one backward, else
    those of this process. Running statistics are updated in place. Gradients are those of `RankBatchNorm`: this
    rank's share of that of the sum over ranks of the losses.
    """
    settings = (running_mean, running_variance, eps, momentum, relu, shared and world_size() > 1)
    return _Fused.apply(x, residual, weight, bias, *settings)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, running_mean, running_variance, eps, momentum, relu, shared):
        module, grid = launcher.load("norm.cu", x.device, options(x.dtype)), _Grid(x)
        channels = x.shape[1]
        if residual is not None:
            residual = _aligned(residual, x)

        moments = x.new_empty(grid.sums[0], 1 + 2 * channels, dtype=torch.float32)
        grid.launch(module, "norm_moments", grid.sums, x, moments)
        inverse = x.new_empty(channels, dtype=torch.float32)
        given = sum_over_ranks_(_sums(module, moments)) if shared else moments
        joined = _join(module, given, inverse, running_mean, running_variance, eps, momentum)
        count, mean = joined[:1], joined[1 : 1 + channels]

        y = torch.empty_like(x)
        signs = None
        if relu and residual is not None:
            signs = torch.empty(x.numel() // _per_thread(x.dtype), dtype=torch.uint8, device=x.device)
        tensors = (x, residual, mean, inverse, weight, bias, y, signs)
        grid.launch(module, "norm_apply", grid.rows, *tensors, more=(relu,))
        ctx.save_for_backward(x, signs, mean, inverse, weight, bias, count)
        ctx.relu, ctx.shared, ctx.with_residual = relu, shared, residual is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, signs, mean, inverse, weight, bias, count = ctx.saved_tensors
        module, grid = launcher.load("norm.cu", x.device, options(x.dtype)), _Grid(x)
        channels, dy = x.shape[1], _aligned(dy, x)
        norm = (dy, x, signs, mean, inverse, weight, bias)

        parts = x.new_empty(grid.sums[0], 2 * channels, dtype=torch.float32)
        grid.launch(module, "norm_gradient_sums", grid.sums, *norm, parts, more=(ctx.relu,))
        own = parts.new_empty(2 * channels)
        arguments = launcher.Arguments(parts, own, len(parts), 2 * channels)
        module.launch("norm_gradient_join", (_joining_blocks(2 * channels), 1), THREADS, arguments)
        sums = sum_over_ranks(own) if ctx.shared else own

        d_x, d_residual = torch.empty_like(x), None
        if ctx.with_residual:
            d_residual = torch.empty_like(x) if ctx.relu else dy
        tensors = (*norm, sums, count, d_x, d_residual if ctx.relu else None)
        grid.launch(module, "norm_gradient_apply", grid.rows, *tensors, more=(ctx.relu,))
        d_weight = None if weight is None else own[channels:]
        d_bias = None if bias is None else own[:channels]
        return d_x, d_residual, d_weight, d_bias, *[None] * 6


class _Grid:
    """The blocks for activations: `width` threads side by side, (groups of rows, groups of channels)."""

    def __init__(self, x: Tensor):
        self.channels = x.shape[1]
        self.n = x.numel() // self.channels
        columns = self.channels // _per_thread(x.dtype)
        # The largest power of two that divides it; 32 threads are 512 bytes.
        self.width = min(columns & -columns, THREADS, 32)
        tiles, lanes = columns // self.width, THREADS // self.width
        groups = -(-self.n // (lanes * ROWS))
        self.rows = (min(groups, max(1, ROW_BLOCKS // tiles)), tiles)
        self.sums = (min(groups, max(1, SUM_BLOCKS // tiles)), tiles)

    def launch(
        self,
        module: launcher.Module,
        kernel: str,
        grid: tuple[int, int],
        *tensors: Tensor | None,
        more: tuple = (),
    ) -> None:
        arguments = launcher.Arguments(*tensors, self.n, self.channels, self.width, *more)
        module.launch(kernel, grid, THREADS, arguments)


def _sums(module: launcher.Module, moments: Tensor) -> Tensor:
    """Turn moments (groups, 1 + 2C) into the (1 + 2C) float64 sums that ranks add up, as `join_statistics` does."""
    sums, channels = moments.new_empty(moments.shape[1], dtype=torch.float64), moments.shape[1] // 2
    arguments = launcher.Arguments(moments, None, sums, None, None, None, len(moments), channels, 0.0, 0.0)
    module.launch("norm_join", (_joining_blocks(channels), 1), THREADS, arguments)
    return sums


def _join(
    module: launcher.Module,
    given: Tensor,
    inverse: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    eps: float,
    momentum: float,
) -> Tensor:
    """Return (1 + 2C): the count, the means and the variances of all rows; write `inverse` and running statistics.

    `given`: moments (groups, 1 + 2C) of this process, or `_sums` (1 + 2C) that were added over ranks.
    """
    channels = given.shape[-1] // 2
    joined = inverse.new_empty(4 + 2 * channels)[3:]  # the means start at a multiple of 16 bytes
    written, numbers = (inverse, running_mean, running_variance), (float(eps), float(momentum))
    if given.dim() == 1:
        arguments = launcher.Arguments(given, joined, *written, channels, *numbers)
        module.launch("norm_join_ranks", (-(-channels // THREADS), 1), THREADS, arguments)
    else:
        arguments = launcher.Arguments(given, joined, None, *written, len(given), channels, *numbers)
        module.launch("norm_join", (_joining_blocks(channels), 1), THREADS, arguments)
    return joined


def _joining_blocks(columns: int) -> int:
    return -(-columns // (THREADS // 8))  # eight threads per column


def _per_thread(dtype: torch.dtype) -> int:
    return 16 // dtype.itemsize


def _rows_of_channels(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format


def _aligned(y: Tensor, x: Tensor) -> Tensor:
    """Return `y` in the dtype, layout and alignment that the kernels read together with `x`; usually `y` itself."""
    y = y.to(x.dtype).contiguous(memory_format=_rows_of_channels(x))
    return y if y.data_ptr() % 16 == 0 else y.clone()


def prove(device: torch.device) -> None:
    """Compare values, gradients and running statistics of kernels and twin in each dtype. Raises KernelError."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)):
        wave = torch.arange(2 * 24 * 9 * 5, device=device).view(2, 24, 9, 5)
        x, residual, d_y = (
            torch.sin(wave * step).to(dtype).contiguous(memory_format=torch.channels_last)
            for step in (0.7, 0.9, 1.1)
        )
        weight, bias = (torch.cos(torch.arange(24, device=device) * step) for step in (0.3, 0.5))
        results: list[list[Tensor]] = []
        for kernel in (True, False):
            leaves = [t.detach().clone().requires_grad_() for t in (x, residual, weight, bias)]
            running = [torch.zeros(24, device=device), torch.ones(24, device=device)]
            if kernel:
                y = fused_norm(*leaves, *running, eps=1e-5, momentum=0.1, relu=True, shared=False)
            else:
                wide = F.batch_norm(
                    leaves[0].float(), *running, *leaves[2:], training=True, momentum=0.1, eps=1e-5
                )
                y = F.relu(wide + leaves[1].float()).to(dtype)
            y.backward(d_y)
            gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
            results.append([y.detach(), *running, *gradients])
        for found, expected in zip(*results):
            require_close(f"BatchNorm in {dtype}", found.float(), expected.float(), tolerance)
    # The sums that ranks add up must give what one rank has of the same rows, with a mean of 100 deviations.
    module, channels = launcher.load("norm.cu", device, options(torch.float32)), 24
    wave = torch.sin(0.7 * torch.arange(3 * 2 * channels, device=device)).view(3, 2, channels)
    counts = torch.arange(2, 5, device=device, dtype=torch.float32).unsqueeze(1)
    moments = torch.cat([counts, 100 + wave[:, 0], 1 + wave[:, 1].square()], dim=1)
    results = []
    for given in (_sums(module, moments), moments):
        inverse, mean, variance = (torch.zeros(channels, device=device) for _ in range(3))
        joined = _join(module, given, inverse, mean, variance, 1e-5, 0.1)
        results.append([joined, inverse, mean, variance])
    for found, expected in zip(*results):
        require_close("BatchNorm's statistics over ranks", found, expected, 1e-5)
