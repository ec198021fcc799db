"""The losses in the form of their authors, with all N x N similarities at once, and what a loss is given.

Each form takes ids (N,) int64 and returns the loss of z (N, D), with the constants that it keeps from step to step.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor], Tensor]  # z (N, D) -> scalar
TEMPERATURE, WIDTH = 0.1, 128


def suncet(ids: Tensor) -> Loss:
    """Return SuNCEt in the authors' later form: each class's probability, by a product with one-hot labels.

    It costs N x N x C more multiply-adds each way, but has no loop. -t log p is the log of a power, as they write it.
    """
    others, targets = off_diagonal(ids), F.one_hot(ids).float()

    def loss(z: Tensor) -> Tensor:
        exps = exponentials(z, others)
        probabilities = exps / exps.sum(dim=1, keepdim=True) @ targets
        return torch.log(probabilities**-targets).sum(dim=1).mean()

    return loss


def nt_xent(ids: Tensor) -> Loss:
    """Return NT-Xent: the exponentials times a mask of others and a mask of positives, summed."""
    others = off_diagonal(ids)
    positives = others * (ids[:, None] == ids[None, :])

    def loss(z: Tensor) -> Tensor:
        exps = exponentials(z, others)
        return -torch.log((exps * positives).sum(dim=1) / exps.sum(dim=1)).mean()

    return loss


def paws(labels: Tensor, targets: Tensor, target_supports: Tensor) -> Loss:
    """Return PAWS, with all probabilities at once: `z` holds the anchors, then the supports."""
    rows = 0.9 * F.one_hot(labels).float()
    rows += 0.1 / rows.shape[1]

    def snn(query: Tensor, supports: Tensor) -> Tensor:
        return torch.softmax(F.normalize(query) @ F.normalize(supports).T / TEMPERATURE, dim=1) @ rows

    def sharpen(p: Tensor) -> Tensor:
        return p**4 / (p**4).sum(dim=1, keepdim=True)

    def loss(z: Tensor) -> Tensor:
        with torch.no_grad():
            large = sharpen(snn(targets, target_supports))
            wanted = torch.cat([large, *[sum(large.chunk(2)) / 2] * 6])
            wanted.masked_fill_(wanted < 1e-4, 0)
        p = snn(z[: -len(labels)], z[-len(labels) :])
        mean = sharpen(p).mean(dim=0)
        return (p**-wanted).log().sum(dim=1).mean() - (mean**-mean).log().sum()

    return loss


def exponentials(z: Tensor, others: Tensor) -> Tensor:
    """Return exp of all N x N cosines over the temperature, without the anchor itself and without a maximum."""
    unit = z / z.norm(dim=1, keepdim=True)
    return torch.exp(unit @ unit.T / TEMPERATURE) * others


def off_diagonal(ids: Tensor) -> Tensor:
    """Return (N, N): 0 on the diagonal, else 1."""
    return 1 - torch.eye(len(ids), device=ids.device)


def paws_targets(labels: Tensor) -> list[Tensor]:
    """Return the targets (2 B, D) and target supports (S, D) of PAWS, which carry no gradient."""
    generator, sizes = torch.Generator().manual_seed(1), (2 * (len(labels) * 512 // 105) // 8, len(labels))
    return [torch.randn(n, WIDTH, generator=generator).to(labels.device) for n in sizes]


def inputs(loss: str, rows: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return z (N, D), which requires a gradient, and ids (N,): classes of 8, or two views of N/2 images.

    Of PAWS z are N anchors and S supports (N + S, D), and ids the labels of the supports (S,), 7 of each class.
    """
    supports = rows * 105 // 512 if loss == "paws" else 0
    z = torch.randn(rows + supports, WIDTH, generator=torch.Generator().manual_seed(rows))
    count, each = (supports, 7) if supports else (rows, 8 if loss == "suncet" else 2)
    return z.to(device).requires_grad_(), torch.arange(count, device=device) % max(1, count // each)


def forward_backward(function: Loss, z: Tensor) -> Tensor:
    """Compute one value and its gradient, without the previous gradient."""
    z.grad = None
    value = function(z)
    value.backward()
    return value.detach()
