"""Multinomial logistic regression on frozen representations of the labeled images.

The fit is full batch, by torch's L-BFGS, and ends at the optimum: there is no learning rate, number of epochs or seed
to choose or to report. The L2 penalty is chosen by cross-validation on the labeled images, or given. The tests compare
both with scikit-learn's.

Shapes: N labeled images, Q query images, E the width of the encoder's output, C classes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsuncet.distributed.collectives import rank, sum_over_ranks, world_size
from fastsuncet.evaluation.calibration import FOLDS, fit_temperature, out_of_fold
from pipelines.output import show_progress

TOLERANCE = 1e-6  # the fit has converged when no element of the mean loss's gradient is larger
HISTORY = 20  # gradients that L-BFGS keeps: 2 x 20 x C x E float64, 0.7 GB for ImageNet
STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)  # that linear.strength=auto chooses from
MANY = 10_000  # above this number of labeled images one fold measures: 2,000 images and more
FEW_NUMBERS = 2_000_000  # of features: 4,000 labels of a ResNet-18
ROWS = 16_384  # images in a piece: its features and logits as float64 are 0.4 GB for ImageNet


@dataclass(frozen=True)
class LinearFit:
    """A linear classifier of raw features: the standardization is folded in. Tensors are float64."""

    weight: Tensor  # (C, E)
    bias: Tensor  # (C,)
    iterations: int
    gradient: float  # its largest element, where the fit ended

    @property
    def converged(self) -> bool:
        """Whether the fit ended at the optimum and not at its last iteration."""
        return self.gradient <= TOLERANCE

    def scores(self, features: Tensor) -> Tensor:
        """Return the logits (Q, C) of features (Q, E)."""
        return F.linear(features.double(), self.weight, self.bias)


@torch.no_grad()
def fit_linear(
    features: Tensor,  # (N, E) float
    labels: Tensor,  # (N,) int64 in [0, C)
    num_classes: int,
    *,
    strength: float = 1.0,  # inverse of the L2 penalty, scikit-learn's C
    max_iterations: int = 1000,
    tolerance: float = TOLERANCE,
) -> LinearFit:
    """Minimize mean cross-entropy + |W|^2 / (2 strength N) from zero, as scikit-learn does; the bias is free.

    Features are standardized by their own mean and standard deviation. The arithmetic is float64 in pieces of ROWS
    images, so the features need no second copy. Deterministic. `LinearFit.converged` says whether the optimum was
    reached within `max_iterations`. Each rank makes the fit, of features that all have: that of all of ImageNet takes
    hours on some cards, and a rank that waited for it would run into the time limit of a collective.
    """
    # In float32 the loss near the optimum is constant to its last bit: the line search then stops at gradients of 1e-5
    # and more, and at which one depends on the processor.
    pieces = features.split(ROWS)
    mean = torch.stack([x.double().sum(0) for x in pieces]).sum(0) / len(features)
    variance = torch.stack([(x.double() - mean).square().sum(0) for x in pieces]).sum(0) / len(features)
    spread = variance.sqrt() + 1e-6  # a feature that is always the same becomes 0 and not 0 / 0

    weight = mean.new_zeros(num_classes, len(mean))
    bias = mean.new_zeros(num_classes)
    penalty = 1 / (strength * len(features))
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        lr=1,
        max_iter=max_iterations,
        max_eval=2 * max_iterations,
        tolerance_grad=tolerance,
        tolerance_change=0,  # a small step is not yet an optimum
        history_size=HISTORY,
        line_search_fn="strong_wolfe",
    )

    def loss_and_gradient() -> Tensor:
        # Without autograd, which would keep the logits of all images at once.
        weight.grad, bias.grad = penalty * weight, torch.zeros_like(bias)
        loss = 0.5 * penalty * weight.square().sum()
        for piece, truth in zip(pieces, labels.split(ROWS)):
            x = (piece.double() - mean) / spread
            log_p = F.linear(x, weight, bias).log_softmax(1)
            loss -= log_p.gather(1, truth[:, None]).sum() / len(features)
            error = (log_p.exp() - F.one_hot(truth, num_classes)) / len(features)
            weight.grad += error.T @ x
            bias.grad += error.sum(0)
        return loss

    # Of few numbers a fit is thousands of operators of microseconds, and threads wait for each other between any two:
    # on two busy cores 100 labels took nine minutes with two threads and seconds with one.
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if features.numel() < FEW_NUMBERS else threads)
    try:
        optimizer.step(loss_and_gradient)
        loss_and_gradient()  # at the point that the optimizer chose, not at the last one it tried
    finally:
        torch.set_num_threads(threads)
    assert weight.grad is not None and bias.grad is not None
    largest = max(weight.grad.abs().max().item(), bias.grad.abs().max().item())
    iterations = optimizer.state[weight]["n_iter"]
    return LinearFit(weight / spread, bias - weight @ (mean / spread), iterations, largest)


def linear_logits(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    strength: float,
    learned: Tensor,
    left_out: Tensor,
    **options: Any,  # of `fit_linear`
) -> Tensor:
    """Return the logits, float64 (left out, C), of a `Classify` by `fit_linear`."""
    fit = fit_linear(features[learned], labels[learned], num_classes, strength=strength, **options)
    return fit.scores(features[left_out])


def choose_strength(
    features: Tensor, labels: Tensor, num_classes: int, given: float | Literal["auto"] = "auto"
) -> tuple[float, str]:
    """Return a strength and why it is taken, in words: `given`, or for auto the one that cross-validation chooses.

    That is the element of STRENGTHS that fits the left-out images best, after one temperature. Strengths that are right
    equally often differ in that, so few labels choose by more than a count. 1 where none is right more often than a
    guess of the largest class: with a label or two a class, as many folds.

    `features` (N, E), `labels` (N,). With more than MANY images only one fold is left out, so the choice takes one fit
    for each strength and not FOLDS. Collective: ranks have the same features and share the strengths.
    """
    if given != "auto":
        return given, "as given"
    most = FOLDS if len(labels) <= MANY else 1
    _, truth = out_of_fold(labels, lambda learned, left_out: labels[left_out], most=most)
    if not len(truth):
        return 1.0, "because no class has two labels to cross-validate by"
    losses, right = torch.zeros(2, len(STRENGTHS), dtype=torch.float64, device=labels.device)
    # A gradient of 1e-4 is far from the optimum's digits and no longer moves the accuracy.
    options = {"max_iterations": 200, "tolerance": 1e-4}
    for i in range(rank(), len(STRENGTHS), world_size()):
        classify = partial(linear_logits, features, labels, num_classes, STRENGTHS[i], **options)
        _, logits = out_of_fold(labels, classify, most=most)
        losses[i] = fit_temperature(logits, truth)[1]
        right[i] = (logits.argmax(1) == truth).sum()
        if rank() == 0:  # the others are as far
            show_progress("choosing linear.strength", min(i + world_size(), len(STRENGTHS)), len(STRENGTHS))
    losses, right = sum_over_ranks(torch.stack([losses, right]))
    tried = f"from {STRENGTHS[0]:g} to {STRENGTHS[-1]:g}"
    if right.max() <= truth.bincount().max():
        # The smallest would predict one class for all images.
        return 1.0, f"because none {tried} is better in cross-validation than a guess of the largest class"
    return STRENGTHS[int(losses.argmin())], f"by cross-validation {tried}"
