"""What a run costs, by arithmetic alone: multiply-adds, petaFLOPs, SimCLR-equivalent epochs, bytes.

One MAC is one multiply and one add, so 2 FLOP. A training sample costs 3 forward passes (forward, gradient
of the inputs, gradient of the weights), so 6 FLOP a MAC: this project's reading of the paper's petaFLOPs,
which the paper does not define; its "50 PF and more than 10,000 updates" on CIFAR-10 fits 6 and not 3
(recipe section 6).

Counted: convolutions and fully connected layers of encoder and head. Not counted: BatchNorm, ReLU, pooling,
losses, optimizer, augmentation (memory traffic rather than arithmetic); and the first convolution's input
gradient is counted though nobody computes it (0.9 % of a ResNet-50 at 224 px), so that the factor stays 6.
"""

from collections.abc import Iterator
from dataclasses import dataclass

FLOP_PER_MAC = 6  # forward 2, backward 4


@dataclass(frozen=True)
class Shape:
    """A ResNet by its numbers: blocks and width of each stage. A bottleneck's output is 4 times its width."""

    bottleneck: bool
    blocks: tuple[int, ...]
    widths: tuple[int, ...]


SHAPES = {
    "resnet50": Shape(True, (3, 4, 6, 3), (64, 128, 256, 512)),
    "resnet34": Shape(False, (3, 4, 6, 3), (64, 128, 256, 512)),
    "resnet18": Shape(False, (2, 2, 2, 2), (64, 128, 256, 512)),
    "resnet_tiny": Shape(False, (1, 1, 1), (16, 32, 64)),
}


@dataclass(frozen=True)
class Layer:
    """One layer, for one sample."""

    name: str
    macs: int
    parameters: int
    saved: int  # elements kept for backward that no other layer keeps already
    indices: int = 0  # int64 positions kept beside them


def _side(side: int, kernel: int, stride: int) -> int:
    """Output side of a convolution or pooling padded by half its kernel."""
    return (side + 2 * (kernel // 2) - kernel) // stride + 1


def _convolution(
    name: str, inputs: int, outputs: int, kernel: int, stride: int, side: int, shared=False
) -> Layer:
    """Without bias. `shared`: another layer keeps its input already (a shortcut reads its block's)."""
    weights = outputs * inputs * kernel**2
    return Layer(name, weights * _side(side, kernel, stride) ** 2, weights, 0 if shared else inputs * side**2)


def _batchnorm(name: str, channels: int, side: int) -> Layer:
    return Layer(name, 0, 2 * channels, channels * side**2)


def _linear(name: str, inputs: int, outputs: int) -> Layer:
    return Layer(name, inputs * outputs, inputs * outputs + outputs, inputs)


def _block(name: str, bottleneck: bool, inputs: int, width: int, stride: int, side: int) -> Iterator[Layer]:
    """Bottleneck (1x1, 3x3, 1x1) or basic (3x3, 3x3). The stride is in the first 3x3: "v1.5"."""
    after = _side(side, 3, stride)
    outputs = 4 * width if bottleneck else width
    if bottleneck:
        yield _convolution(f"{name}.conv1", inputs, width, 1, 1, side)
        yield _batchnorm(f"{name}.bn1", width, side)
        yield _convolution(f"{name}.conv2", width, width, 3, stride, side)
        yield _batchnorm(f"{name}.bn2", width, after)
        yield _convolution(f"{name}.conv3", width, outputs, 1, 1, after)
        yield _batchnorm(f"{name}.bn3", outputs, after)
    else:
        yield _convolution(f"{name}.conv1", inputs, width, 3, stride, side)
        yield _batchnorm(f"{name}.bn1", width, after)
        yield _convolution(f"{name}.conv2", width, width, 3, 1, after)
        yield _batchnorm(f"{name}.bn2", width, after)
    if stride != 1 or inputs != outputs:
        yield _convolution(f"{name}.downsample.0", inputs, outputs, 1, stride, side, shared=True)
        yield _batchnorm(f"{name}.downsample.1", outputs, after)


def encoder_layers(name: str, stem: str, size: int) -> Iterator[Layer]:
    """The encoder's layers in order, for one sample of `size` x `size` pixels."""
    shape = SHAPES[name]
    channels = shape.widths[0]
    kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
    yield _convolution("conv1", 3, channels, kernel, stride, size)
    side = _side(size, kernel, stride)
    yield _batchnorm("bn1", channels, side)
    if stem == "imagenet":
        # Keeps the ReLU's output; with the CIFAR stem the first block's convolution reads and keeps that.
        after = _side(side, 3, 2)
        yield Layer("maxpool", 0, 0, channels * side**2, indices=channels * after**2)
        side = after
    for stage, (blocks, width) in enumerate(zip(shape.blocks, shape.widths), start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            yield from _block(f"layer{stage}.{block}", shape.bottleneck, channels, width, stride, side)
            channels = 4 * width if shape.bottleneck else width
            side = _side(side, 3, stride)
    yield Layer("relu", 0, 0, channels * side**2)  # the last block's, kept for its own backward


def head_layers(width: int, hidden: int, output: int, head_batchnorm: bool = False) -> Iterator[Layer]:
    """The projection head's layers, for one sample."""
    yield _linear("head.0", width, hidden)
    if head_batchnorm:
        yield _batchnorm("head.1", hidden, 1)
    yield _linear("head.3" if head_batchnorm else "head.2", hidden, output)


def layers(
    name: str, stem: str, size: int, hidden: int, output: int, head_batchnorm: bool = False
) -> list[Layer]:
    """Encoder and head, in order, for one sample."""
    shape = SHAPES[name]
    width = shape.widths[-1] * (4 if shape.bottleneck else 1)
    return [*encoder_layers(name, stem, size), *head_layers(width, hidden, output, head_batchnorm)]


def analytic_macs(name: str, stem: str, size: int, hidden: int, output: int) -> int:
    """Multiply-adds of one sample's forward pass through encoder and head.

    ResNet-50 and its head: 4.0871 + 0.0045 G at 224 px, 1.2978 + 0.0045 G at 32 px with the CIFAR stem.
    """
    return sum(layer.macs for layer in layers(name, stem, size, hidden, output))


def petaflops(macs: int, samples: int) -> float:
    """Training on `samples` samples, `macs` MAC each forward, in 1e15 FLOP: 6 x macs x samples / 1e15."""
    return FLOP_PER_MAC * macs * samples / 1e15


def run_samples(steps: int, supervised_steps: int, unlabeled: int, labeled: int) -> int:
    """Samples through the network in `steps` updates: two views an unlabeled image, one a labeled image.

    `unlabeled` and `labeled` are images an update, over all ranks; the labeled ones only come in the first
    `supervised_steps` updates, after which the batch is smaller and the update cheaper.
    """
    return 2 * unlabeled * steps + labeled * min(steps, supervised_steps)


def equivalent_epochs(samples: int, images: int, batch: int) -> float:
    """`samples` in epochs of plain SimCLR on `images` images, `batch` an update, the last partial dropped.

    With it a SuNCEt run and a SimCLR run are compared at equal compute: 100 epochs of SuNCEt on ImageNet
    (2,816 + 2,560 images an update) are 145.5 of SimCLR (4,096), recipe section 6. ValueError for fewer
    images than one batch.
    """
    if images < batch:
        raise ValueError(f"equivalent_epochs: {images} images are fewer than one batch of {batch}")
    return samples / (2 * (images // batch) * batch)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device; without the convolutions' workspace, the allocator's gaps and DALI's buffers."""

    parameters: int
    gradients: int
    momentum: int
    weight_copies: int  # autocast's 16-bit weights, kept for backward
    activations: int  # what autograd keeps, and the batch itself

    @property
    def total(self) -> int:
        """All of it at once, a little more than the peak: gradients fill while activations are let go."""
        return self.parameters + self.gradients + self.momentum + self.weight_copies + self.activations


def memory_estimate(
    name: str,
    stem: str,
    size: int,
    hidden: int,
    output: int,
    *,
    samples: int,
    precision: str = "bf16",
    head_batchnorm: bool = False,
) -> Memory:
    """Bytes one rank needs to train on `samples` samples (views and labeled images) a step.

    Weights, gradients and momentum are float32 in every precision; "bf16" and "fp16" keep activations in 16
    bits, "fp32" in 32. A ResNet-50 at 224 px keeps 45 MB a view in bf16, 23 GB for 512 views. Under DDP
    with gradient_as_bucket_view the buckets are the gradients; without, add their size again.
    """
    half = {"bf16": True, "fp16": True, "fp32": False}[precision]
    walk = layers(name, stem, size, hidden, output, head_batchnorm)
    parameters = 4 * sum(layer.parameters for layer in walk)
    kept = sum(layer.saved for layer in walk) * (2 if half else 4)
    indices = 8 * sum(layer.indices for layer in walk)
    images = 3 * size**2 * 4 if half else 0  # in float32 the batch is what the first convolution keeps
    return Memory(
        parameters=parameters,
        gradients=parameters,
        momentum=parameters,
        weight_copies=2 * sum(layer.parameters for layer in walk if layer.macs) if half else 0,
        activations=samples * (kept + indices + images),
    )
