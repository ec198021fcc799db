"""The losses as the paper writes them: dense, without a subtracted maximum, gradient by autograd. For float64."""

import torch
from torch import Tensor


def cosines(z: Tensor, keys: str = "attached") -> Tensor:
    unit = z / z.norm(dim=1, keepdim=True)
    return unit @ (unit if keys == "attached" else unit.detach()).T


def nt_xent(z: Tensor, temperature: float, keys: str = "attached") -> Tensor:
    """Compute equation 1 as a classification: which of the other rows is the other view?"""
    rows = len(z)
    logits = (cosines(z, keys) / temperature).masked_fill(torch.eye(rows, dtype=torch.bool), -torch.inf)
    other_view = (torch.arange(rows) + rows // 2) % rows
    return torch.nn.functional.cross_entropy(logits, other_view)


def suncet(z: Tensor, labels: Tensor, temperature: float, average="sample", keys="attached") -> Tensor:
    """Compute equation 2 without the anchor above and below."""
    exps = torch.exp(cosines(z, keys) / temperature)
    others, positive = _others_and_positives(labels)
    anchors = positive.any(dim=1)
    above, below = (exps * positive).sum(dim=1), (exps * others).sum(dim=1)
    return _mean(-torch.log(above[anchors] / below[anchors]), labels[anchors], average)


def sup_con(z: Tensor, labels: Tensor, temperature: float, average="sample", keys="attached") -> Tensor:
    """Compute L_sup_out without the anchor."""
    logits = cosines(z, keys) / temperature
    others, positive = _others_and_positives(labels)
    anchors = positive.any(dim=1)
    log_p = logits - torch.log((torch.exp(logits) * others).sum(dim=1, keepdim=True))
    losses = -(log_p * positive).sum(dim=1)[anchors] / positive.sum(dim=1)[anchors]
    return _mean(losses, labels[anchors], average)


def sinkhorn(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Return codes (B, K) as SwAV does: one exponential of the transposed scores, rows and columns scaled in turn."""
    q = torch.exp(scores.detach() / epsilon).T
    q = q / q.sum()
    for _ in range(iterations):
        q = q / q.sum(dim=1, keepdim=True) / q.shape[0]
        q = q / q.sum(dim=0, keepdim=True) / q.shape[1]
    return (q * q.shape[1]).T


def swav(scores: Tensor, temperature: float, *, crops: int, epsilon=0.05, iterations=3) -> Tensor:
    """Compute swapped prediction, pair by pair."""
    parts = scores.chunk(crops)
    total = torch.zeros((), dtype=scores.dtype)
    for a in (0, 1):
        code = sinkhorn(parts[a], epsilon, iterations)
        others = [parts[v] for v in range(crops) if v != a]
        entropies = [-(code * (each / temperature).softmax(dim=1).log()).sum(dim=1).mean() for each in others]
        total = total + sum(entropies) / len(entropies)
    return total / 2


def paws(anchors: Tensor, supports: Tensor, labels: Tensor, targets: Tensor, target_supports: Tensor, *, views: int,
         temperature=0.1, sharpen=0.25, smoothing=0.1, prior=None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute cross-entropy and me-max with one label row per support, class by class in ascending order."""
    classes = sorted(set(labels.tolist()))
    rows = torch.tensor([[float(label == each) for each in classes] for label in labels.tolist()])
    rows = rows.to(supports) * (1 - smoothing) + smoothing / len(classes)

    def p(queries: Tensor, keys: Tensor) -> Tensor:
        cosine = torch.cosine_similarity(queries[:, None], keys[None], dim=-1)
        return (cosine / temperature).softmax(dim=1) @ rows

    def sharpened(p: Tensor) -> Tensor:
        return p ** (1 / sharpen) / (p ** (1 / sharpen)).sum(dim=1, keepdim=True)

    large = sharpened(p(targets, target_supports)).detach()
    target = torch.cat([large, *[(large.chunk(2)[0] + large.chunk(2)[1]) / 2] * (views - 2)])
    target = target * (target >= 1e-4)
    predicted = p(anchors, supports)
    mean = sharpened(predicted).mean(dim=0)
    wanted = torch.ones(len(classes)).to(mean)
    if prior is not None:
        wanted = torch.stack([prior[labels == each][0] for each in classes])
        wanted = len(classes) * wanted / wanted.sum()
    return -(target * predicted.log()).sum(dim=1).mean(), (mean * (mean / wanted).log()).sum()


def gradient(loss, z: Tensor, *arguments, **settings) -> tuple[Tensor, Tensor]:
    """Return the value of `loss` at `z` and its gradient."""
    z = z.detach().clone().requires_grad_()
    value = loss(z, *arguments, **settings)
    (slope,) = torch.autograd.grad(value, z)
    return value.detach(), slope


def _others_and_positives(labels: Tensor) -> tuple[Tensor, Tensor]:
    others = ~torch.eye(len(labels), dtype=torch.bool)
    return others, (labels[:, None] == labels[None, :]) & others


def _mean(losses: Tensor, labels: Tensor, average: str) -> Tensor:
    if average == "sample":
        return losses.mean()
    return torch.stack([losses[labels == each].mean() for each in sorted(set(labels.tolist()))]).mean()


def draw(seed: int, rows: int, width: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return normal numbers (rows, width), the same ones for a seed in every dtype but for their rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, dtype=torch.float64, generator=generator).to(dtype)


def labeled_batch(rows=24, width=8, classes=5, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    """Return rows (rows, width) and labels (rows,), always the same."""
    labels = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(1))
    return draw(0, rows, width, dtype), labels


def by_view(images: int, x: Tensor, views: int) -> Tensor:
    """Order rows of ranks (W, V, images) as one process has them: view 0 of all images, then view 1, ..."""
    return x.unflatten(0, (-1, views, images)).transpose(0, 1).flatten(0, 2)
