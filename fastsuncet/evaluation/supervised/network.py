"""An encoder with a new classifier, the network that trains the two, and one update of it.

Shapes: m images of (3, S, S) a pass -> logits (m, C).
"""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastsuncet.config import Config
from fastsuncet.distributed.ddp import parallel
from fastsuncet.distributed.launch import Place
from fastsuncet.evaluation.supervised.stream import FitStream


class Classifier(nn.Module):
    """Images (m, 3, S, S) to logits (m, C): `encoder`, then one linear layer that begins at zero.

    Weight and bias start at 0, so all classes begin equally likely (paper, appendix B). The authors' first release
    says nothing of the bias and leaves it at torch's random start.
    """

    def __init__(self, encoder: nn.Module, width: int, classes: int):
        super().__init__()
        self.encoder = encoder
        # torch's own start would draw numbers
        self.classifier = nn.utils.skip_init(nn.Linear, width, classes)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.encoder(images))


def set_batchnorm_momentum(model: nn.Module, momentum: float) -> None:
    """`momentum` is torch's: the share of the running statistics that a batch replaces."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = momentum


def trained(model: Classifier, config: Config, place: Place, size: int, autocast: Callable) -> nn.Module:
    """What runs the training passes of `model`: itself, compiled where the config says so, in DDP on several ranks.

    BatchNorm is each rank's own, as in the paper. So are its running statistics: rank 0's are those that are saved and
    evaluated, and DDP need not send them around in every pass.
    """

    def blank(network: nn.Module) -> Tensor:
        with autocast():
            logits = network(torch.zeros(2, 3, size, size, device=place.device))
        return logits.float().sum()

    # Not static: passes of a batch in parts leave the exchange of gradients to the last one.
    return parallel(model, place, compiled=config.meta.compile, static_graph=False, blank=blank)


def softmax_terms(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(mean cross-entropy, share of the images whose highest logit is their class's); labels int64 (m,)."""
    right = logits.detach().argmax(1) == labels
    return F.cross_entropy(logits, labels), right.float().mean()


def sigmoid_terms(logits: Tensor, presence: Tensor) -> tuple[Tensor, Tensor]:
    """(binary cross-entropy, share of right answers), each a mean over all m C entries of `presence`.

    An entry of 1 is there, -1 is not; 0 is not asked and counts as no loss and no right answer, so that parts of a
    batch have the mean of the whole whatever is asked in each.
    """
    asked, there = presence != 0, presence > 0
    loss = F.binary_cross_entropy_with_logits(logits, there.float(), weight=asked.float())
    right = asked & ((logits.detach() > 0) == there)
    return loss, right.float().mean()


TERMS = {"softmax": softmax_terms, "sigmoid": sigmoid_terms}


def fit_step(
    network: nn.Module,
    optimizer: torch.optim.SGD,
    scaler: torch.amp.GradScaler,
    autocast: Callable,
    terms: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    stream: FitStream,
    step: int,
    lr: float,
) -> tuple[Tensor, float]:
    """One update. Returns loss and share right, (2,), on the device, of this rank.

    Gradients of all passes add up; ranks exchange them in the last one only. The host reads nothing of the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    total = 0
    for part in range(stream.passes):
        images, targets = stream(step, part)
        apart = part < stream.passes - 1 and isinstance(network, nn.parallel.DistributedDataParallel)
        with network.no_sync() if apart else contextlib.nullcontext():
            with autocast():
                logits = network(images)
            loss, right = terms(logits.float(), targets)
            scaler.scale(loss / stream.passes).backward()
        total = total + torch.stack([loss.detach(), right]) / stream.passes
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total
