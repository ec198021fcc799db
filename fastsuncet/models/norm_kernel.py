"""BatchNorm by the CUDA kernels of fastsuncet/kernels/norm.cu, with its neighbors and over ranks: `fused_norm`.

sync_batchnorm.py calls it. `prove` compares it with PyTorch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fastsuncet.distributed.collectives import sum_over_ranks, sum_over_ranks_, world_size
from fastsuncet.kernels import launcher
from fastsuncet.kernels.switches import require_close, usable
from pipelines.cuda_compiler import KernelError

THREADS = 256
SUM_BLOCKS = 512  # blocks that leave partial sums: a few for every multiprocessor, few enough to join quickly
ROWS = 4  # a thread takes at least as many, or its channels' constants would be most of what it reads
ROW_BLOCKS = 2048  # and more rows where this many blocks are enough: several rounds on the largest GPU
ELEMENTS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
SMALL = ((2, 24, 9, 5), (300, 8))  # shapes of a quick proof
# Limit of a proof, as a share of a channel's largest value: float32 sums, products and roots, in any order. Emulated in
# torch's float32, the activations of a ResNet-50 need 2e-7.
ARITHMETIC = 1e-5
# Of the activations, as many as a proof computes in float64 at a time: 0.27 GB for each tensor.
TWIN_ELEMENTS = 1 << 25


def options(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the compiler options of norm.cu for activations of `dtype`."""
    return (f"-DTHREADS={THREADS}", f"-DELEMENT={ELEMENTS[dtype]}")


def fits(x: Tensor, residual: Tensor | None, *constants: Tensor) -> bool:
    """Return whether the kernels take these tensors: dense rows of channels in units of 16 bytes, two or more.

    `constants` are numbers of channels, (C,). False too where the kernels failed their proof.
    """
    return (
        all(t.dtype == torch.float32 for t in constants)
        and takes(x.shape, x.dtype)
        and x.is_contiguous(memory_format=_rows_of_channels(x))
        and usable("norm.cu", x, prove)  # not earlier: it proves what no vote of the ranks has settled
        and x.data_ptr() % 16 == 0
        and x.numel() > x.shape[1]
        and (residual is None or (residual.dtype == x.dtype and residual.shape == x.shape))
    )


def takes(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether the kernels take activations of this shape: channels in units of 16 bytes."""
    return dtype in ELEMENTS and len(shape) in (2, 4) and shape[1] % _per_thread(dtype) == 0


def _joined_statistics(
    x: Tensor, sums: Tensor, *running: Tensor, eps: float, momentum: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rows (1,), mean (C,), 1 / sqrt(variance + eps) (C,)), float32, of the ranks' `_sums` of x, added up.

    Of `_Grid.moments` (groups, 1 + 2C) those of this process. `running`, mean and variance (C,), are updated in place.
    """
    module, channels = launcher.load("norm.cu", x.device, options(x.dtype)), x.shape[1]
    # One tensor, in which means and inverses start at a multiple of 16 bytes. The kernels write from `count` on.
    numbers = x.new_empty(4 + 3 * channels, dtype=torch.float32)
    _, count, mean, _, inverse = numbers.split([3, 1, channels, channels, channels])
    written, rule = (inverse, *running), (float(eps), float(momentum))
    if sums.dim() == 1:
        blocks = (-(-channels // THREADS), 1)
        module.launch("norm_join_ranks", blocks, THREADS, sums, count, *written, channels, *rule)
    else:
        moments = (sums, count, None, *written, len(sums), channels, *rule)
        module.launch("norm_join", (_joining_blocks(channels), 1), THREADS, *moments)
    return count, mean, inverse


def fused_norm(
    inputs: Sequence[Tensor],
    norms: Sequence[_BatchNorm],
    residual: Tensor | None = None,
    *,
    relu: bool,
    shared: bool,
) -> Tensor:
    """Compute relu(norm(x) + residual) in training by the kernels, or over ranks relu(norm(x) + other norm(other x)).

    Inputs and residual (N, C) or channels-last (N, C, H, W) of one shape, as `fits` checks them. The statistics are
    those of all ranks if `shared`, joined by one all-reduce forward and one backward, else those of this process.
    Running statistics are updated in place, and their batches are not counted. Gradients are those of `RankBatchNorm`:
    this rank's share of that of the sum over ranks of the losses.
    """
    rules = [(norm.running_mean, norm.running_var, norm.eps, norm.momentum) for norm in norms]
    tensors = [t for x, norm in zip(inputs, norms) for t in (x, norm.weight, norm.bias)]
    return _Fused.apply(residual, relu, shared and world_size() > 1, rules, *tensors)


class _Fused(torch.autograd.Function):
    """`fused_norm`: x, weight and bias of each layer come last. The second layer is the residual of the first."""

    @staticmethod
    def forward(ctx, residual, relu, shared, rules, *tensors):
        inputs, weights, biases = tensors[::3], tensors[1::3], tensors[2::3]
        x, grid = inputs[0], _Grid(inputs[0])
        if residual is not None:
            residual = _aligned(residual, x)
        ctx.relu, ctx.shared, ctx.with_residual = relu, shared, residual is not None
        if shared:
            own = [_sums(grid.module, grid.moments(each)) for each in inputs]
            found = sum_together(own)
        else:
            found = [grid.moments(x)]
        layers = []
        for each, sums, (*running, eps, momentum), weight, bias in zip(inputs, found, rules, weights, biases):
            count, mean, inverse = _joined_statistics(each, sums, *running, eps=eps, momentum=momentum)
            layers.append((each, mean, inverse, weight, bias))
        for other, *constants in layers[1:]:
            residual = torch.empty_like(other)
            grid.launch("norm_apply", grid.rows, other, None, *constants, residual, None, more=(False,))
        y, signs = torch.empty_like(x), None
        if relu and residual is not None:
            signs = torch.empty(x.numel() // _per_thread(x.dtype), dtype=torch.uint8, device=x.device)
        grid.launch("norm_apply", grid.rows, x, residual, *layers[0][1:], y, signs, more=(relu,))
        ctx.save_for_backward(signs, count, *(t for layer in layers for t in layer))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        signs, count, *saved = ctx.saved_tensors
        x, grid = saved[0], _Grid(saved[0])
        dy, relu = _aligned(dy, x), ctx.relu
        # The signs are those of the sum: the same gradient reaches all layers.
        layers = [(dy, saved[i], signs, *saved[i + 1 : i + 5]) for i in range(0, len(saved), 5)]
        own = x.new_empty(len(layers), 2 * grid.channels, dtype=torch.float32)
        for layer, sums in zip(layers, own):
            grid.gradient_sums(layer, sums, relu)
        d_residual = None
        if ctx.with_residual:
            d_residual = torch.empty_like(x) if relu else dy
        found = []
        for layer, sums, all_sums in zip(layers, own, sum_over_ranks(own) if ctx.shared else own):
            d_x, (d_bias, d_weight) = torch.empty_like(x), sums.chunk(2)
            tensors = (*layer, all_sums, count, d_x, d_residual if relu else None)
            grid.launch("norm_gradient_apply", grid.rows, *tensors, more=(relu,))
            found += [d_x, d_weight, d_bias]
        return d_residual, None, None, None, *found


class _Grid:
    """The kernels and their blocks for activations: `width` threads side by side, (groups of rows, groups of channels).

    `rows` are the blocks of a kernel that writes activations, `sums` those of one that leaves partial sums.
    """

    def __init__(self, x: Tensor):
        self.module = launcher.load("norm.cu", x.device, options(x.dtype))
        self.channels = x.shape[1]
        self.n = x.numel() // self.channels
        columns = self.channels // _per_thread(x.dtype)
        # The largest power of two that divides it; 32 threads are 512 bytes.
        self.width = min(columns & -columns, THREADS, 32)
        tiles, lanes = columns // self.width, THREADS // self.width
        groups = -(-self.n // (lanes * ROWS))
        self.rows = (min(groups, max(1, ROW_BLOCKS // tiles)), tiles)
        self.sums = (min(groups, max(1, SUM_BLOCKS // tiles)), tiles)

    def launch(self, kernel: str, blocks: tuple[int, int], *tensors: Tensor | None, more: tuple = ()) -> None:
        self.module.launch(kernel, blocks, THREADS, *tensors, self.n, self.channels, self.width, *more)

    def moments(self, x: Tensor) -> Tensor:
        """Return a count, means and variances of each group of rows: (groups, 1 + 2C)."""
        moments = x.new_empty(self.sums[0], 1 + 2 * self.channels, dtype=torch.float32)
        self.launch("norm_moments", self.sums, x, moments)
        return moments

    def gradient_sums(self, norm: Sequence[Tensor | None], own: Tensor, relu: bool) -> None:
        """Write into `own` (2C,) the sums of this rank's gradient, and of it times the standardized rows."""
        parts = own.new_empty(self.sums[0], len(own))
        self.launch("norm_gradient_sums", self.sums, *norm, parts, more=(relu,))
        blocks = (_joining_blocks(len(own)), 1)
        self.module.launch("norm_gradient_join", blocks, THREADS, parts, own, len(parts), len(own))


def _sums(module: launcher.Module, moments: Tensor) -> Tensor:
    """Turn moments (groups, 1 + 2C) into the (1 + 2C) float64 sums that ranks add up: `sync_batchnorm.sums_of`."""
    sums, channels = moments.new_empty(moments.shape[1], dtype=torch.float64), moments.shape[1] // 2
    given = (moments, None, sums, None, None, None, len(moments), channels, 0.0, 0.0)
    module.launch("norm_join", (_joining_blocks(channels), 1), THREADS, *given)
    return sums


def sum_together(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return the sums over ranks of tensors of one length, which one message carries."""
    return sum_over_ranks_(torch.cat(tensors) if len(tensors) > 1 else tensors[0]).chunk(len(tensors))


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


def prove(
    device: torch.device,
    shapes: Sequence[Sequence[int]] | None = None,  # of activations, (N, C) or (N, C, H, W); None: SMALL
    dtypes: Sequence[torch.dtype] = tuple(ELEMENTS),
) -> None:
    """Compare values, gradients and running statistics of the kernels with PyTorch's in float64. Raises KernelError.

    Each shape that the kernels take is tried in each dtype with ReLU and residual, with ReLU alone, and without both.
    The largest shape needs about seven times its activations in memory. Waits for the device.
    """
    for shape in SMALL if shapes is None else shapes:
        for dtype in (dtype for dtype in dtypes if takes(shape, dtype)):
            for relu, with_residual in ((True, True), (True, False), (False, False)):
                _prove_one(device, tuple(shape), dtype, relu, with_residual)
    _prove_joins(device)


def _prove_one(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, relu: bool, with_residual: bool
) -> None:
    generator = torch.Generator(device).manual_seed(0)
    channels = shape[1]

    def draw() -> Tensor:
        rows = torch.randn(shape[0], *shape[2:], channels, generator=generator, device=device, dtype=dtype)
        # No part of the rows is like the others, so that a sum without it is another sum.
        slope = torch.linspace(-1, 1, rows.numel() // channels, device=device, dtype=dtype)
        return rows.add_(slope.view(*rows.shape[:-1], 1)).movedim(-1, 1)

    x, d_y = draw().add_(2), draw()
    residual = draw() if with_residual else None
    norm = _BatchNorm(channels, device=device)
    for p in norm.parameters():
        torch.nn.init.uniform_(p, 0.5, 1.5, generator=generator)
    activations = [x] if residual is None else [x, residual]
    given = [t.requires_grad_() for t in (*activations, norm.weight, norm.bias)]
    y = fused_norm([x], [norm], residual, relu=relu, shared=False)

    def twin(part: slice) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return, for some channels, what the ReLU takes, its leaves and the running statistics."""
        leaves = [_channels(t.detach(), part).double().requires_grad_() for t in given]
        averages = [torch.zeros_like(leaves[-1]), torch.ones_like(leaves[-1])]
        wide = F.batch_norm(leaves[0], *averages, *leaves[-2:], training=True, momentum=0.1, eps=1e-5)
        return wide if residual is None else wide + leaves[1], leaves, averages

    step = max(1, TWIN_ELEMENTS * channels // x.numel())
    parts = [slice(first, first + step) for first in range(0, channels, step)]
    with torch.no_grad():
        for part in parts:
            # Where rounding decides what the ReLU passes, either gradient is right.
            d_y[:, part].masked_fill_(twin(part)[0].abs() < 1e-2, 0)
    y.backward(d_y)
    for part in parts:
        wide, leaves, averages = twin(part)
        expected = F.relu(wide) if relu else wide
        expected.backward(d_y[:, part].double())
        for ours, theirs in zip(
            [y, norm.running_mean, norm.running_var, *(t.grad for t in given)],
            [expected, *averages, *(t.grad for t in leaves)],
        ):
            assert ours is not None and theirs is not None
            found, wanted = _channels(ours.detach(), part).double(), theirs.detach()
            _require_rounded(
                f"BatchNorm of {shape} in {dtype}", found, wanted, torch.finfo(ours.dtype).eps / 2
            )


def _require_rounded(what: str, found: Tensor, expected: Tensor, rounding: float) -> None:
    """Raise KernelError where |found - expected| > rounding |expected| + ARITHMETIC max|expected|.

    The maximum is that of the channel in (N, C, ...), of all channels in (C,). Waits for the device.
    """
    others = [d for d in range(expected.dim()) if d != 1]
    largest = expected.abs().amax(others if expected.dim() > 1 else 0, keepdim=True)
    excess = (found - expected).abs() - rounding * expected.abs()
    error = (excess / largest.clamp_(min=1e-30)).max().item()
    if not error <= ARITHMETIC:  # also for NaN
        raise KernelError(
            f"{what} differs from its twin by one rounding and {error:.1e} of the channel's largest value, limit "
            f"{ARITHMETIC:.0e}"
        )


def _channels(x: Tensor, part: slice) -> Tensor:
    """Return some channels of (C,) or (N, C, ...)."""
    return x[part] if x.dim() == 1 else x[:, part]


def _prove_joins(device: torch.device) -> None:
    """Compare the sums that ranks add up with what one rank has of the same rows, with a mean of 100 deviations."""
    module, channels = launcher.load("norm.cu", device, options(torch.float32)), 24
    wave = torch.sin(0.7 * torch.arange(3 * 2 * channels, device=device)).view(3, 2, channels)
    counts = torch.arange(2, 5, device=device, dtype=torch.float32).unsqueeze(1)
    moments = torch.cat([counts, 100 + wave[:, 0], 1 + wave[:, 1].square()], dim=1)
    x, results = moments.new_empty(1, channels), []
    for given in (_sums(module, moments), moments):
        running = torch.zeros(2, channels, device=device)
        joined = _joined_statistics(x, given, *running, eps=1e-5, momentum=0.1)
        results.append([*joined, *running])
    for found, expected in zip(*results):
        require_close("BatchNorm's statistics over ranks", found, expected)
