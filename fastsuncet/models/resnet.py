"""The network: a ResNet encoder, and the projection head that the contrastive losses use.

Shapes: B images of (3, S, S) -> encoder output h (B, width) -> head output z (B, output). The losses use z;
everything after pre-training (fine-tuning, linear classifier, nearest neighbors) uses h and drops the head.
Some methods have one more part: cross-entropy a classifier on h, SwAV prototypes on z, PAWS a prediction head on z.

The encoder's state_dict has torchvision's names, so its weights load wherever those of a `torchvision.models.resnet50`
without `fc` do.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from fastsuncet.config.schema import TIMM, HeadBatchNorm


class Model(nn.Module):
    """An encoder and a projection head (paper section 4; 23,508,032 + 4,458,624 parameters for a ResNet-50).

    `encoder` maps (B, 3, S, S) to (B, width); its keys are torchvision's, `fc` is an identity. `head` is
    Linear - ReLU - Linear with keys 0.* and 2.*, or has one more layer. Move the model to its device and to
    channels-last before you build an optimizer, whose state copies the layout that it finds.
    """

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Sequential,
        width: int,
        classifier: nn.Linear | None = None,  # (B, width) -> (B, C), SimCLR + cross-entropy
        prototypes: nn.Linear | None = None,  # (B, output) -> (B, K) without bias, SwAV
        predictor: nn.Module | None = None,  # (B, output) -> (B, output), PAWS
    ):
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.width = width
        self.classifier = classifier
        self.prototypes = prototypes
        self.predictor = predictor

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (B, 3, S, S) to projections z (B, output), with a predictor to predictions (B, output).

        They are not normalized: the losses take the cosine.
        """
        z = self.head(self.encoder(images))
        return z if self.predictor is None else self.predictor(z)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut: torchvision's block, with its keys and bits."""

    expansion = 1

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.conv1 = _convolution(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu: nn.Module = nn.ReLU(inplace=True)
        self.conv2 = _convolution(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = _downsample(inputs, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, inputs, S, S) to (B, outputs, S / stride, S / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        return join(self, self.bn2, self.conv2(y), x)


class Bottleneck(nn.Module):
    """A 3 x 3 convolution, with the stride, between two of 1 x 1, and a shortcut: as `BasicBlock`."""

    expansion = 4

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        narrow = outputs // self.expansion
        self.conv1 = nn.Conv2d(inputs, narrow, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(narrow)
        self.conv2 = _convolution(narrow, narrow, stride)
        self.bn2 = nn.BatchNorm2d(narrow)
        self.conv3 = nn.Conv2d(narrow, outputs, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu: nn.Module = nn.ReLU(inplace=True)
        self.downsample = _downsample(inputs, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, inputs, S, S) to (B, outputs, S / stride, S / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return join(self, self.bn3, self.conv3(y), x)


def join(block: BasicBlock | Bottleneck, norm: nn.Module, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return relu(norm(y) + shortcut of x), which a fused norm computes at once."""
    if getattr(norm, "relu", False):  # `sync_batchnorm.fuse` has set it
        return cast(Any, norm).join(y, x, block.downsample)
    return block.relu(norm(y).add_(x if block.downsample is None else block.downsample(x)))


class ResNet(nn.Sequential):
    """torchvision's ResNet, with its keys and bits: maps (B, 3, S, S) to (B, width).

    The import of torchvision takes longer than that of torch. Each stage after the first halves the side and doubles
    the channels.
    """

    def __init__(self, block: type[BasicBlock | Bottleneck], channels: int, blocks: Sequence[int]):
        stages, inputs = {}, channels
        for stage, number in enumerate(blocks):
            outputs = block.expansion * channels * 2**stage
            first = block(inputs, outputs, stride=2 if stage else 1)
            more = (block(outputs, outputs) for _ in range(number - 1))
            stages[f"layer{stage + 1}"], inputs = nn.Sequential(first, *more), outputs
        layers: dict[str, nn.Module] = {
            "conv1": nn.Conv2d(3, channels, kernel_size=7, stride=2, padding=3, bias=False),
            "bn1": nn.BatchNorm2d(channels),
            "relu": nn.ReLU(inplace=True),
            "maxpool": nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
            **stages,
            "avgpool": nn.AdaptiveAvgPool2d(1),
            "flatten": nn.Flatten(),
            "fc": nn.Identity(),
        }
        super().__init__(OrderedDict(layers))


class WideResNet(nn.Module):
    """WRN-28-2 as PAWS has it for CIFAR-10: three stages of four pre-activation blocks; 128-wide output.

    facebookresearch/suncet 731547d, without its biases of convolutions: a BatchNorm behind each takes them away. As
    there, the second convolution of a block has the stride.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = _convolution(3, 16)
        self.layer1 = nn.Sequential(WideBlock(16, 32), *(WideBlock(32, 32) for _ in range(3)))
        self.layer2 = nn.Sequential(WideBlock(32, 64, stride=2), *(WideBlock(64, 64) for _ in range(3)))
        self.layer3 = nn.Sequential(WideBlock(64, 128, stride=2), *(WideBlock(128, 128) for _ in range(3)))
        self.bn1 = nn.BatchNorm2d(128)
        self.relu: nn.Module = nn.ReLU(inplace=True)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (B, 3, S, S) to (B, 128)."""
        x = self.layer3(self.layer2(self.layer1(self.conv1(images))))
        return self.fc(self.avgpool(self.relu(self.bn1(x))).flatten(1))


class WideBlock(nn.Module):
    """A residual block whose BatchNorms and ReLUs are before its convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = _convolution(inputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = _convolution(outputs, outputs, stride)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, inputs, S, S) to (B, outputs, S / stride, S / stride)."""
        inner = self.conv1(F.relu(self.bn1(x)))
        return self.conv2(F.relu(self.bn2(inner))) + self.shortcut(x)


class Convolution(nn.Conv2d):
    """A convolution whose stride does not matter where the input is one pixel.

    oneDNN's bfloat16 gradient of a stride over one pixel is memory that nothing has written (torch 2.15 on a CPU with
    AMX). Small views come to that: 8 pixels in resnet_tiny, 16 in a ResNet-18.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, inputs, S, S) to (B, outputs, S / stride, S / stride)."""
        if x.dtype == torch.bfloat16 and x.shape[-2:] == (1, 1):
            return F.conv2d(x, self.weight, padding=self.padding)
        return super().forward(x)


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return Convolution(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """Return what a shortcut does that changes shape."""
    if inputs == outputs and stride == 1:
        return None
    shortcut = nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False)
    return nn.Sequential(shortcut, nn.BatchNorm2d(outputs))


# Of h.
WIDTHS = {"resnet50": 2048, "resnet34": 512, "resnet18": 512, "wide_resnet28w2": 128, "resnet_tiny": 64}
# Not in torchvision. resnet_tiny has 77,392 parameters with the CIFAR stem: few enough for two CPU cores.
OWN = {"resnet_tiny": partial(ResNet, BasicBlock, 16, (1, 1, 1)), "wide_resnet28w2": WideResNet}
NETWORKS = {
    "resnet50": partial(ResNet, Bottleneck, 64, (3, 4, 6, 3)),
    "resnet34": partial(ResNet, BasicBlock, 64, (3, 4, 6, 3)),
    "resnet18": partial(ResNet, BasicBlock, 64, (2, 2, 2, 2)),
    **OWN,
}


def width_of(name: str) -> int:
    """Return the width of h of the encoder `name`, as in model.name."""
    if not name.startswith(TIMM):
        return WIDTHS[name]
    from fastsuncet.models import timm_backbone

    return timm_backbone.width_of(name)


def _encoder(name: str, stem: str) -> nn.Module:
    encoder = NETWORKS[name]()
    if stem == "cifar" and name != "wide_resnet28w2":  # which has no other
        # No stride and no max-pool: 32 px reach the first block as 32 px, not as 8.
        width = len(encoder.get_parameter("bn1.weight"))
        encoder.conv1 = _convolution(3, width)
        encoder.maxpool = nn.Identity()
    return encoder


def _projection_head(
    width: int, hidden: int, output: int, batchnorm: HeadBatchNorm, layers: int
) -> nn.Sequential:
    # Appendix H says only "before the final layer"; SimCLR, SwAV and PAWS have it before the ReLU. The keys become
    # 0.*, 1.* (BatchNorm) and 3.*, so neither head can be loaded into the other by mistake.
    inner: list[nn.Module] = []
    for inputs in [width, *[hidden] * (layers - 2)]:
        norm = [nn.BatchNorm1d(hidden)] if batchnorm else []
        inner += [nn.Linear(inputs, hidden), *norm, nn.ReLU(inplace=True)]
    last = [nn.BatchNorm1d(output)] if batchnorm == "all" else []
    return nn.Sequential(*inner, nn.Linear(hidden, output), *last)


def projection_head_of(tensors: Mapping[str, torch.Tensor]) -> nn.Sequential | None:
    """Return a projection head, not filled, whose state_dict has these keys and shapes; None if no such head has."""
    weights = [tensor for _, tensor in sorted(tensors.items()) if tensor.ndim == 2]
    if len(weights) not in (2, 3):
        return None
    (hidden, width), output = weights[0].shape, len(weights[-1])
    after_last = f"{3 * len(weights) - 2}.running_mean"
    batchnorm = "all" if after_last in tensors else "1.running_mean" in tensors
    head = _projection_head(width, hidden, output, batchnorm, len(weights))
    shapes = ({key: x.shape for key, x in each.items()} for each in (head.state_dict(), tensors))
    return head if next(shapes) == next(shapes) else None


def _prediction_head(output: int) -> nn.Sequential:
    """Return PAWS's: it begins with a BatchNorm and is a fourth as wide inside."""
    narrow = max(1, output // 4)
    return nn.Sequential(
        nn.BatchNorm1d(output),
        nn.Linear(output, narrow),
        nn.BatchNorm1d(narrow),
        nn.ReLU(inplace=True),
        nn.Linear(narrow, output),
    )


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Draw every parameter from one generator seeded with `seed`, without the global random state.

    The distributions are torchvision's and the authors': Kaiming normal (fan out) for convolutions, PyTorch's
    default for Linear, gamma 1 and beta 0 everywhere. The draw depends on the seed and on the order of the modules.
    Raises TypeError for a layer without a rule.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)  # nn.Linear's own default, which takes no generator
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_parameters()
        elif next(module.parameters(recurse=False), None) is not None:
            # Built without values, so an unknown layer would start from zeros.
            raise TypeError(f"initialize: no rule for the parameters of {type(module).__name__}")


def zeroed(module: nn.Module) -> nn.Module:
    """Give a module of the device meta its memory on the CPU, all zero, and return it.

    Torch's `to_empty` imports sympy, a second, for that. timm's networks have tables that only timm can fill.
    """
    return module._apply(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))


def build_model(
    name: str = "resnet50",
    stem: str = "imagenet",
    hidden: int = 2048,
    output: int = 128,
    head_batchnorm: HeadBatchNorm = False,
    head_layers: int = 2,
    prediction_head: bool = False,
    *,
    predicts: bool = False,
    classes: int | None = None,
    prototypes: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Model:
    """Build the paper's network in float32: encoder `name` and its projection head.

    name: resnet50 (the paper's), resnet34, resnet18, wide_resnet28w2 (PAWS's for CIFAR-10, whose stem is "cifar"),
        resnet_tiny (for tests and the demo), or timm/NAME.
    stem: "imagenet" (7 x 7 stride 2, max-pool) or "cifar" (3 x 3 stride 1, no max-pool; for under 64 px).
    hidden, output: widths of the head, Linear(width, hidden) - ReLU - Linear(hidden, output), no BatchNorm;
    head_batchnorm adds one before each ReLU (paper Appendix H, where L_sup_out did not converge without); "all":
    one of the output too, as SimCLR's authors have it;
    head_layers: 2, or 3 with one more Linear(hidden, hidden) - ReLU.
    prediction_head: PAWS's, on z; predicts: without such a head z itself predicts.
    classes: outputs of a linear classifier on h; prototypes: outputs of a bias-free one on z; None: no such layer.

    The weights depend on the arguments alone and are drawn on the CPU: every rank builds the same ones, for
    any device. On the device "meta" there are shapes and no weights, which costs no time and no memory.
    """
    without_weights, of_timm = torch.device(device).type == "meta", name.startswith(TIMM)
    # Shapes only: the libraries would draw weights, which costs seconds and moves the global random state.
    with torch.device("meta"):
        width = width_of(name)
        model = Model(
            nn.Module() if of_timm else _encoder(name, stem),
            _projection_head(width, hidden, output, head_batchnorm, head_layers),
            width,
            None if classes is None else nn.Linear(width, classes),
            None if prototypes is None else nn.Linear(output, prototypes, bias=False),
            _prediction_head(output) if prediction_head else nn.Identity() if predicts else None,
        )
    if not without_weights:
        initialize(zeroed(model), seed)
    # timm's networks have parameters that only timm knows how to draw.
    if of_timm:
        from fastsuncet.models import timm_backbone

        model.encoder = timm_backbone.create(name, "meta" if without_weights else "cpu", seed)
    return model.to(device)
