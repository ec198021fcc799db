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
class Case:
    """Layers of one shape and kind, and how many of them a network has."""

    kind: Kind
    channels: int
    size: int  # pixels of a side
    layers: int = 1

    def __str__(self) -> str:
        return f"{self.channels} x {self.size} x {self.size}: {WORDS[self.kind]}"

    def moved(self, images: int) -> int:
        """Bytes that forward and backward must read and write at least, in 16 bits, for one layer.

        Forward reads x for the statistics, reads it again with the residual, and writes y; backward reads dy and x for
        the sums and again for the gradient, and writes that, and the residual's.
        """
        return 2 * PASSES[self.kind] * images * self.channels * self.size**2


def cases() -> list[Case]:
    """What torchvision's ResNet-50 has at 224 pixels, by walking it; most bytes first."""
    seen: Counter[tuple[Kind, int, int]] = Counter()

    def note(kind: Kind) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, y: Tensor) -> None:
            seen[kind, y.shape[1], y.shape[2]] += 1

        return hook

    with torch.device("meta"):
        network = resnet50()
        for name, module in network.named_modules():
            if isinstance(module, Bottleneck):
                module.bn3.register_forward_hook(note("add"))
            elif isinstance(module, nn.BatchNorm2d) and not name.endswith("bn3"):
                module.register_forward_hook(note("plain" if "downsample" in name else "relu"))
        network(torch.empty(1, 3, 224, 224))
    found = [Case(*key, layers) for key, layers in seen.items()]
    return sorted(found, key=lambda case: -case.layers * case.moved(1))


class Layer:
    """One case's tensors on this rank, which all contenders share: channels-last, weight and bias in float32."""

    def __init__(self, case: Case, images: int, place: Place, dtype: torch.dtype = torch.bfloat16):
        self.case, self.place = case, place
        generator = torch.Generator(place.device).manual_seed(place.rank)
        shape = (images, case.channels, case.size, case.size)

        def draw(mean: float) -> Tensor:
            x = torch.empty(shape, dtype=dtype, device=place.device, memory_format=torch.channels_last)
            return x.normal_(mean, generator=generator)

        # A gradient of mean 1: its sums over a layer are then large beside their rounding.
        self.x, self.d_y = draw(0.5).requires_grad_(), draw(1.0)
        self.residual = draw(0.0).requires_grad_() if case.kind == "add" else None
        wave = torch.arange(case.channels, device=place.device)
        self.weight, self.bias = ((1 + 0.5 * torch.sin(wave * step)).requires_grad_() for step in (0.3, 0.7))

    def to(self, dtype: torch.dtype) -> "Layer":
        """The same activations in another dtype."""
        other = Layer.__new__(Layer)
        other.__dict__.update(self.__dict__)
        other.d_y = self.d_y.to(dtype)
        other.x = self.x.detach().to(dtype).requires_grad_()
        if self.residual is not None:
            other.residual = self.residual.detach().to(dtype).requires_grad_()
        return other

    def fill(self, norm: nn.Module) -> nn.Module:
        """A BatchNorm module on this layer's device, with its weight and bias."""
        norm = norm.to(self.place.device)
        with torch.no_grad():
            norm.weight.copy_(self.weight)
            norm.bias.copy_(self.bias)
        return norm
