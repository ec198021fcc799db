"""A ResNet-50's BatchNorm layers with their residual and ReLU, forward and backward, by torch and by our kernels."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastsuncet.distributed.place import Place
from fastsuncet.models.fused_batchnorm import FusedNorm, fuse
from fastsuncet.models.norm_kernel import fused_norm
from fastsuncet.models.resnet import build_model
from fastsuncet.models.sync_batchnorm import RankBatchNorm

RULE: dict[str, Any] = {"eps": 1e-5, "momentum": 0.1}  # of every BatchNorm
Kind = Literal["plain", "relu", "add"]  # y = n, relu(n), relu(n + residual), with n = BatchNorm(x)
PASSES = {"plain": 8, "relu": 8, "add": 10}  # over the activations, reads and writes together
# One forward and backward pass: y, and the gradients of x, weight, bias and, where there is one, the residual.
Pass = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class LayerShape:
    """Layers of one shape and kind, and how many of them the network has."""

    kind: Kind
    channels: int
    size: int  # height and width in pixels
    layers: int = 1

    def moved(self, images: int) -> int:
        """Return the bytes that forward and backward of one layer must read and write at least, in 16 bits.

        Forward reads x for the statistics, reads it again with the residual, and writes y. Backward reads dy and x for
        the sums and again for the gradient, and writes that and the residual's.
        """
        return 2 * PASSES[self.kind] * images * self.channels * self.size**2


def resnet50_shapes() -> list[LayerShape]:
    """Return the shapes of torchvision's ResNet-50 at 224 pixels, those that move most bytes first."""
    encoder = fuse(build_model("resnet50", device="meta").encoder, shared=False)
    found: Counter[tuple[Kind, int, int]] = Counter()

    def count(norm: FusedNorm, inputs: tuple[Tensor, ...]) -> None:
        kind: Kind = "add" if len(inputs) == 2 else "relu" if norm.relu else "plain"
        found[kind, inputs[0].shape[1], inputs[0].shape[2]] += 1

    for module in encoder.modules():
        if isinstance(module, FusedNorm):
            module.register_forward_pre_hook(count)
    encoder(torch.empty(2, 3, 224, 224, device="meta"))
    shapes = [LayerShape(*shape, layers) for shape, layers in found.items()]
    return sorted(shapes, key=lambda shape: -shape.layers * shape.moved(1))


class NormLayer:
    """The tensors of one layer on this rank, which all contenders share: channels-last; weight and bias float32."""

    def __init__(self, shape: LayerShape, images: int, place: Place, dtype: torch.dtype = torch.bfloat16):
        self.shape, self.place = shape, place
        generator = torch.Generator(place.device).manual_seed(place.rank)
        size, layout = (images, shape.channels, shape.size, shape.size), torch.channels_last

        def draw(mean: float) -> Tensor:
            # Drawn in 16 bits for every dtype, so that all have the same values.
            x = torch.empty(size, dtype=torch.bfloat16, device=place.device, memory_format=layout)
            return x.normal_(mean, generator=generator).to(dtype)

        # A gradient of mean 1, so that its sums over a layer are large compared with their rounding.
        self.x, self.d_y = draw(0.5).requires_grad_(), draw(1.0)
        self.residual = draw(0.0).requires_grad_() if shape.kind == "add" else None
        wave = torch.arange(shape.channels, device=place.device)
        self.weight, self.bias = (nn.Parameter(1 + 0.5 * torch.sin(wave * step)) for step in (0.3, 0.7))

    def through(self, forward: Callable[[Tensor, Tensor | None], Tensor]) -> Pass:
        """Return a pass through `forward`."""
        leaves = [self.x, self.weight, self.bias, *([] if self.residual is None else [self.residual])]

        def forward_backward() -> list[Tensor]:
            y = forward(self.x, self.residual)
            return [y.detach(), *torch.autograd.grad(y, leaves, self.d_y)]

        return forward_backward


def operators(layer: NormLayer, *, compile: bool = False) -> Pass:
    """Return BatchNorm, an addition and a ReLU of torch, in torch.compile if asked.

    Over several ranks the BatchNorm is torch's SyncBatchNorm, or ours on a CPU, where torch's cannot train.
    """
    norm: Any = nn.BatchNorm2d(layer.shape.channels, **RULE).to(layer.place.device)
    norm.weight, norm.bias = layer.weight, layer.bias
    if layer.place.world_size > 1:
        on_cpu = layer.place.device.type == "cpu"
        norm = RankBatchNorm.take_over(norm) if on_cpu else nn.SyncBatchNorm.convert_sync_batchnorm(norm)

    def forward(x: Tensor, residual: Tensor | None) -> Tensor:
        y = norm(x)
        y = y if residual is None else y + residual
        return y if layer.shape.kind == "plain" else F.relu(y)

    if compile:
        # Without a reset torch.compile stops compiling a function after some shapes.
        torch._dynamo.reset()
        forward = torch.compile(forward, dynamic=False)
    return layer.through(forward)


def kernels(layer: NormLayer) -> Pass:
    """Return our kernels, without a check of the device."""
    running = [torch.zeros_like(layer.weight), torch.ones_like(layer.weight)]
    rest = {"relu": layer.shape.kind != "plain", "shared": True, **RULE}
    return layer.through(lambda x, r: fused_norm(x, r, layer.weight, layer.bias, *running, **rest))


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest mean difference of two lists of tensors, as a share of the mean value.

    A mean, because where y rounds to the other side of 0 its ReLU correctly passes another gradient.
    """
    return max(
        ((a.double() - b.double()).abs().mean() / b.double().abs().mean()).item()
        for a, b in zip(found, expected)
    )
