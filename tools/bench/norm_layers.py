"""The BatchNorm layers of a ResNet-50, and one of them with its activations: what bench_norm.py times."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models import resnet50
from torchvision.models.resnet import Bottleneck

from fastsuncet.distributed.launch import Place

Kind = Literal["plain", "relu", "add"]  # y = n, relu(n), relu(n + residual), with n = BatchNorm(x)
WORDS = {"plain": "BatchNorm", "relu": "BatchNorm, ReLU", "add": "BatchNorm, residual, ReLU"}
PASSES = {"plain": 8, "relu": 8, "add": 10}  # over the activations, reads and writes together
EPS, MOMENTUM = 1e-5, 0.1


@dataclass(frozen=True)
class LayerShape:
    """Layers of one shape and kind, and how many of them the network has."""

    kind: Kind
    channels: int
    size: int  # height and width in pixels
    layers: int = 1

    def __str__(self) -> str:
        return f"{self.channels} x {self.size} x {self.size}: {WORDS[self.kind]}"

    def moved(self, images: int) -> int:
        """Return the bytes that forward and backward of one layer must read and write at least, in 16 bits.

        Forward reads x for the statistics, reads it again with the residual, and writes y. Backward reads dy and x for
        the sums and again for the gradient, and writes that and the residual's.
        """
        return 2 * PASSES[self.kind] * images * self.channels * self.size**2


def resnet50_shapes() -> list[LayerShape]:
    """Return the shapes of torchvision's ResNet-50 at 224 pixels, those that move most bytes first."""
    counts: Counter[tuple[Kind, int, int]] = Counter()

    def count(kind: Kind) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, y: Tensor) -> None:
            counts[kind, y.shape[1], y.shape[2]] += 1

        return hook

    with torch.device("meta"):
        network = resnet50()
        for name, module in network.named_modules():
            if isinstance(module, Bottleneck):
                module.bn3.register_forward_hook(count("add"))
            elif isinstance(module, nn.BatchNorm2d) and not name.endswith("bn3"):
                module.register_forward_hook(count("plain" if "downsample" in name else "relu"))
        network(torch.empty(1, 3, 224, 224))
    shapes = [LayerShape(*key, layers) for key, layers in counts.items()]
    return sorted(shapes, key=lambda shape: -shape.layers * shape.moved(1))


class NormLayer:
    """The tensors of one layer on this rank, which all contenders share: channels-last; weight and bias float32."""

    def __init__(self, shape: LayerShape, images: int, place: Place):
        self.shape, self.place = shape, place
        generator = torch.Generator(place.device).manual_seed(place.rank)
        size = (images, shape.channels, shape.size, shape.size)

        def draw(mean: float) -> Tensor:
            x = torch.empty(
                size, dtype=torch.bfloat16, device=place.device, memory_format=torch.channels_last
            )
            return x.normal_(mean, generator=generator)

        # A gradient of mean 1, so that its sums over a layer are large compared with their rounding.
        self.x, self.d_y = draw(0.5).requires_grad_(), draw(1.0)
        self.residual = draw(0.0).requires_grad_() if shape.kind == "add" else None
        wave = torch.arange(shape.channels, device=place.device)
        self.weight, self.bias = ((1 + 0.5 * torch.sin(wave * step)).requires_grad_() for step in (0.3, 0.7))

    def to(self, dtype: torch.dtype) -> "NormLayer":
        """Return the same layer with activations of another dtype."""
        other = NormLayer.__new__(NormLayer)
        other.__dict__.update(self.__dict__)
        other.d_y = self.d_y.to(dtype)
        other.x = self.x.detach().to(dtype).requires_grad_()
        if self.residual is not None:
            other.residual = self.residual.detach().to(dtype).requires_grad_()
        return other

    def fill(self, norm: Any) -> Any:
        """Return a BatchNorm module on this layer's device, with this layer's weight and bias."""
        norm = norm.to(self.place.device)
        with torch.no_grad():
            norm.weight.copy_(self.weight)
            norm.bias.copy_(self.bias)
        return norm
