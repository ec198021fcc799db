"""What left-out images tell: they are classified by a classifier that has not learned from them, and calibrate it.

Probabilities that are as often right as they say have one temperature for all logits (Guo et al. 2017, 1706.04599).

Shapes: N labeled images, n of them that can be judged, C classes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

FOLDS = 5
BINS, IN_BIN = 15, 20  # of the calibration error: at most so many bins, and at least so many images in each
FEW_JUDGED = 100  # images: with fewer, the standard error of an accuracy is 5 points and more
COLDEST, HOTTEST = 1e-6, 1e6  # temperatures
# Masks (N,) bool of the images to learn from and of those left out -> a row for each of the latter.
Classify = Callable[[Tensor, Tensor], Tensor]


class Calibration(NamedTuple):
    """One temperature, and the expected calibration error with it and without it, on the images it was fitted to."""

    temperature: float
    error: float
    error_before: float

    def said_of(self, images: int) -> str:
        """Return it in words; `images` it was fitted to."""
        # The fit makes the error of a single bin nearly 0.
        if images < 2 * IN_BIN:
            least = f"{2 * IN_BIN} or more can tell how far probabilities are off"
            return f"temperature {self.temperature:.2f}, fitted to {images} images; {least}"
        few = f"; {images} images tell this only roughly" if images < FEW_JUDGED else ""
        return (
            f"probabilities are off by {100 * self.error:.1f} points on average, "
            f"{100 * self.error_before:.1f} before temperature {self.temperature:.2f}{few}"
        )


def calibrate(logits: Tensor, labels: Tensor) -> Calibration:
    """Return the calibration of logits (N, C) of images that the classifier has not learned from, labels int64 (N,)."""
    temperature, _ = fit_temperature(logits, labels)
    after, before = (calibration_error((logits.double() / t).softmax(1), labels) for t in (temperature, 1.0))
    return Calibration(temperature, after, before)


def fit_temperature(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the T that minimizes the mean cross-entropy of softmax(logits / T), and this cross-entropy.

    logits (N, C), labels int64 (N,). The targets hold one more image that is of each class alike. Without it, T would
    fall to 0 where all N images are classified right, and a hundred labels would make every probability 1.
    """
    logits = logits.double()
    n = len(labels)
    target = (logits.gather(1, labels[:, None])[:, 0] * n + logits.mean(1)) / (n + 1)
    low, high = 1 / HOTTEST, 1 / COLDEST
    # The loss is convex in 1 / T, so its derivative has at most one sign change.
    for _ in range(60):
        inverse = (low * high) ** 0.5
        slope = ((inverse * logits).softmax(1) * logits).sum(1) - target
        low, high = (inverse, high) if slope.mean() < 0 else (low, inverse)
    inverse = (low * high) ** 0.5
    return 1 / inverse, ((inverse * logits).logsumexp(1) - inverse * target).mean().item()


def calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """Return the expected calibration error of `probabilities` (N, C): mean of |confidence - accuracy| over bins.

    Images are sorted by their highest probability and cut into BINS bins of equal numbers, fewer where a bin would hold
    fewer than IN_BIN images: small bins differ from their confidence by chance alone.
    """
    confidence, predicted = probabilities.double().max(1)
    order = confidence.argsort(stable=True)
    gap = (confidence - (predicted == labels).double())[order]
    bins = gap.tensor_split(max(1, min(BINS, len(gap) // IN_BIN)))
    return float(sum(part.sum().abs() for part in bins) / len(gap))


def folds(labels: Tensor, seed: int = 0) -> Tensor:
    """Return the fold of each image, (N,) int64 in [0, FOLDS): drawn at random from `seed`, and stratified."""
    drawn = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(labels.device)
    order = drawn[labels[drawn].argsort(stable=True)]
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device) % FOLDS)


def out_of_fold(
    labels: Tensor, classify: Classify, seed: int = 0, learned: Tensor | None = None, most: int = FOLDS
) -> tuple[Tensor, Tensor]:
    """Return (numbers of the images that can be judged, int64 (n,), their rows, (n, ...)).

    Each of `most` folds of FOLDS is left out once, and classified by what `classify` learns from the others. An image
    that is the only one of its class cannot be judged, and one that the encoder has `learned` from, bool (N,), tells
    nothing: neither is ever left out. Without one that can be judged, both are empty.
    """
    fold_of, judged = folds(labels, seed), torch.bincount(labels)[labels] > 1
    if learned is not None:
        judged &= ~learned
    numbers, rows = [labels.new_zeros(0)], []
    for fold in fold_of[judged].unique()[:most]:
        left_out = (fold_of == fold) & judged
        numbers.append(left_out.nonzero()[:, 0])
        rows.append(classify(~left_out, left_out))
    found = torch.cat(numbers)
    order = found.argsort()
    return found[order], torch.cat(rows)[order] if rows else found
