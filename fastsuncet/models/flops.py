"""What a run costs: multiply-adds, petaFLOPs, bytes of memory.

One MAC is one multiply and one add, so 2 FLOP. A view costs 3 forward passes in training (forward, gradient
of the inputs, gradient of the weights), so 6 FLOP per MAC: this project's reading of the paper's petaFLOPs,
which the paper does not define; its "50 PF and more than 10,000 updates" on CIFAR-10 fits 6 and not 3
(recipe section 6).

Counted are the convolutions and fully connected layers of encoder and head, and the products of attention in timm's
networks. Not counted: BatchNorm, ReLU, pooling, losses, optimizer, augmentation (memory traffic rather than
arithmetic). The gradient of the images is counted although nothing computes it (1.0 % of a ResNet-50 at 224 px), so
that the factor stays 6 (8 with criterion.micro_batch, `update_macs`).
"""

import functools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastsuncet.config import Arithmetic, Config
from fastsuncet.config.schema import TIMM
from fastsuncet.errors import ConfigError
from fastsuncet.models.resnet import Model, build_model, zeroed

FLOP_PER_MAC = 6  # forward 2, backward 4


@dataclass(frozen=True)
class NetworkCost:
    """What one image costs in a forward pass, and what the network holds."""

    macs: int  # encoder and heads
    encoder_macs: int
    parameters: int
    cast_parameters: int  # of convolutions and linear layers: autocast copies them to 16 bits
    activations: int  # elements kept for the backward pass, the image among them
    indices: int  # int64 positions kept for the backward pass, by max-pooling
    norms: frozenset[tuple[int, ...]]  # shapes of the activations that BatchNorm sees

    def norm_shapes(self, images: int) -> set[tuple[int, ...]]:
        """Return the shapes of the activations that BatchNorm sees in a pass of so many images."""
        return {(images * first, *rest) for first, *rest in self.norms}


@functools.cache
def network_cost(name: str, stem: str, size: int, *head: Any) -> NetworkCost:
    """Count one forward pass on images of `size` pixels; `head` has `build_model`'s arguments from `hidden` on.

    Takes the time of that pass, a second for a ResNet-50; each network is counted once per process. Of a network of
    timm's, which can be large, no value is computed: torch counts its operators on the meta device. A ResNet-50
    and its head have 4.0871 + 0.0045 GMAC at 224 px, 1.2978 + 0.0045 at 32 px with the CIFAR stem. Raises ConfigError
    for a network that does not take this size.
    """
    model = build_model(name, stem, *head, device="meta")
    of_timm = name.startswith(TIMM)
    model.eval()  # BatchNorm then takes a single image, and autograd keeps the same
    if not of_timm:
        zeroed(model)
    own = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}
    norms: set[tuple[int, ...]] = set()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(lambda _, inputs: norms.add(tuple(inputs[0].shape)))

    def keep(tensor: Tensor) -> Tensor:
        # Means and deviations of channels, the 1-D tensors, do not grow with the batch.
        if tensor.dim() > 1 and _storage(tensor) not in own:
            kept[_storage(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        try:
            macs, encoder_macs = (_counted_by_torch if of_timm else _counted)(model, size)
        except (AssertionError, RuntimeError) as error:  # a network of timm that takes one size only
            raise ConfigError(f"model.name: {name} does not take images of {size} pixels: {error}") from error
    sixteen_bit = (m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear))
    return NetworkCost(
        macs=macs,
        encoder_macs=encoder_macs,
        parameters=sum(p.numel() for p in model.parameters()),
        cast_parameters=sum(p.numel() for module in sixteen_bit for p in module.parameters()),
        activations=sum(t.numel() for t in kept.values() if t.is_floating_point()),
        indices=sum(t.numel() for t in kept.values() if not t.is_floating_point()),
        norms=frozenset(norms),
    )


def _counted(model: Model, size: int) -> tuple[int, int]:
    """Return the multiply-adds of a pass and of its encoder: an output of a layer has one for each of its weights."""
    found: dict[nn.Module, int] = {}

    def count(layer: nn.Module, _: object, output: Tensor) -> None:
        found[layer] = output.numel() * cast(Tensor, layer.weight)[0].numel()

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    model(torch.zeros(1, 3, size, size))
    return sum(found.values()), sum(found.get(layer, 0) for layer in model.encoder.modules())


def _counted_by_torch(model: Model, size: int) -> tuple[int, int]:
    """Do what `_counted` does for any operators, without computing them."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, size, size, device="meta"))
    counts = counter.get_flop_counts()
    macs, encoder_macs = (sum(counts[part].values()) // 2 for part in ("Global", "Model.encoder"))
    return macs, encoder_macs


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory: a meta tensor has no address."""
    return tensor.untyped_storage()._cdata


def classifier_macs(name: str, stem: str, size: int, width: int, classes: int) -> int:
    """Return the multiply-adds of one image through the encoder, `width` wide, and a linear classifier."""
    return network_cost(name, stem, size).encoder_macs + width * classes


def view_macs(config: Config, size: int | None = None) -> int:
    """Return the multiply-adds of one view's forward pass; `size` in pixels, by default that of a labeled image."""
    m = config.model
    size = size or config.data.augmentation.size
    return network_cost(m.name, m.stem, size, *m.head).macs


def update_macs(config: Config, arithmetic: Arithmetic, supervised: bool) -> int:
    """Return the multiply-adds of one update's forward passes, over all processes, with or without labeled images.

    An update in pieces has a second forward pass: 8 FLOP a multiply-add instead of 6, counted as 4/3 of them.
    """
    a, large = arithmetic, view_macs(config)
    unlabeled = a.large_views * large
    if a.small_views:
        unlabeled += a.small_views * view_macs(config, config.swav.small_size)
    total = a.global_unlabeled * unlabeled + (a.global_labeled * large if supervised else 0)
    return total * 4 // 3 if len(a.pieces(supervised)) > 1 else total


def norm_shapes(config: Config, arithmetic: Arithmetic) -> list[tuple[int, ...]]:
    """Return the shapes of the activations that BatchNorm sees on one rank, with labeled images and without."""
    a, m, shapes = arithmetic, config.model, set()
    for supervised in {False, a.supervised_steps > 0}:
        for unlabeled, labeled in a.pieces(supervised):
            for images, size in (
                (a.large_views * unlabeled + labeled, config.data.augmentation.size),
                (a.small_views * unlabeled, config.swav.small_size),
            ):
                if images:
                    shapes |= network_cost(m.name, m.stem, size, *m.head).norm_shapes(images)
    return sorted(shapes)


def run_macs(config: Config, arithmetic: Arithmetic) -> int:
    """Return the multiply-adds of all forward passes of a run, over all processes."""
    on, off = arithmetic.supervised_steps, arithmetic.steps - arithmetic.supervised_steps
    return on * update_macs(config, arithmetic, True) + off * update_macs(config, arithmetic, False)


def petaflops(macs: int) -> float:
    """Return the cost of a training whose forward passes have `macs` multiply-adds, in 1e15 FLOP."""
    return FLOP_PER_MAC * macs / 1e15


@dataclass(frozen=True)
class Memory:
    """Bytes on one device; without the convolutions' workspace, the allocator's gaps and DALI's buffers."""

    weights: int  # in float32, with gradients and momentum; and autocast's in 16 bits, kept for backward
    activations: int  # what autograd keeps, and the batch itself

    @property
    def total(self) -> int:
        """All of it at once, a little more than the peak: gradients fill while activations are freed."""
        return self.weights + self.activations


def memory_estimate(
    name: str, stem: str, size: int, *head: Any, views: int, precision: str, copies: int = 3
) -> Memory:
    """Return the bytes that one rank needs to train on `views` views per step.

    `head` as of `network_cost`; `copies` of the weights are float32 in every precision: themselves, gradients and
    momentum. "bf16" and "fp16" keep activations in 16 bits, "fp32" in 32. A ResNet-50 at 224 px keeps 45 MB per view in
    bf16, 23 GB for 512 views. Under DDP with gradient_as_bucket_view the buckets are the gradients; without, add their
    size again.
    """
    half = {"bf16": True, "fp16": True, "fp32": False}[precision]
    cost = network_cost(name, stem, size, *head)
    kept = cost.activations * (2 if half else 4) + 8 * cost.indices
    images = 3 * size**2 * 4 if half else 0  # in float32 the batch is what the first convolution keeps
    in_16_bits = 2 * cost.cast_parameters if half else 0
    return Memory(4 * copies * cost.parameters + in_16_bits, views * (kept + images))
