"""An encoder with a new classifier, its losses, and one update of it.

Shapes: m images of (3, S, S) a pass -> logits (m, C).
"""

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(nn.Module):
    """Images (m, 3, S, S) to logits (m, C): `encoder`, then one linear layer that begins at zero, or at `head`.

    Weight and bias begin at 0, so all classes begin equally likely (paper, appendix B). The authors' first release does
    not mention the bias and leaves it at torch's random initial value.
    """

    def __init__(
        self, encoder: nn.Module, width: int, classes: int, head: tuple[Tensor, Tensor] | None = None
    ):
        super().__init__()
        self.encoder = encoder
        # Without skip_init torch would draw random numbers.
        self.classifier = nn.utils.skip_init(nn.Linear, width, classes)
        for number, parameter in enumerate(self.classifier.parameters()):
            nn.init.zeros_(parameter) if head is None else parameter.data.copy_(head[number])

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.encoder(images))


def softmax_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (mean cross-entropy, fraction of the images whose highest logit is their class's); labels int64 (m,)."""
    right = logits.detach().argmax(1) == labels
    return F.cross_entropy(logits, labels), right.float().mean()


def sigmoid_loss(logits: Tensor, presence: Tensor) -> tuple[Tensor, Tensor]:
    """Return (binary cross-entropy, fraction of right answers), each a mean over all m C entries of `presence`.

    A class with entry 1 is in the image, one with -1 is not. One with 0 is not annotated: it counts as no loss and no
    right answer, so the parts of a batch have the mean of the whole whatever is annotated in each.
    """
    known, present = presence != 0, presence > 0
    loss = F.binary_cross_entropy_with_logits(logits, present.float(), weight=known.float())
    right = known & ((logits.detach() > 0) == present)
    return loss, right.float().mean()


def finetune_step(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    autocast: Callable[[], torch.autocast],
    loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    batch: Iterable[tuple[Tensor, Tensor]],  # images and targets, pass by pass
    passes: int,
    lr: float,
) -> Tensor:
    """Make one update. Return this rank's loss and fraction of right answers, (2,), on the device.

    Gradients of all passes add up, and ranks exchange them in the last pass only. No host sync.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)
    total = torch.zeros(())
    ddp = network if isinstance(network, nn.parallel.DistributedDataParallel) else None
    for part, (images, targets) in enumerate(batch):
        with ddp.no_sync() if ddp and part < passes - 1 else contextlib.nullcontext():
            with autocast():
                logits = network(images)
            value, right = loss(logits.float(), targets)
            scaler.scale(value / passes).backward()
        values = torch.stack([value.detach(), right]) / passes
        total = values if part == 0 else total + values
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total
