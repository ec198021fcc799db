"""The linear protocol: multinomial logistic regression on frozen representations of the labeled images.

Fitted to its optimum, full batch, by torch's L-BFGS: no learning rate, no epochs, no seed to tune or to report. On a
GPU it does ImageNet's 128,116 x 2,048; scikit-learn's is the oracle of its tests.

Shapes: N labeled images, Q query images, E the width of the encoder's output, C classes.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.collectives import broadcast, broadcast_json
from fastsuncet.distributed.launch import Place
from fastsuncet.evaluation.features import outputs
from fastsuncet.evaluation.scoring import Measured, accuracies, own_rows, supports, true_labels

# Of the largest element of the mean loss's gradient: as near to the optimum as the arithmetic gets.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
HISTORY = 20  # gradients that L-BFGS remembers: 2 x 20 x C x E numbers, 0.3 GB for ImageNet
ROWS = 16_384  # of the logits held at a time
DOUBLE_BYTES = 1 << 30  # features that fit in this as float64 are fitted in it


@dataclass(frozen=True)
class Fitted:
    """A linear classifier of standardised features."""

    weight: Tensor  # (C, E)
    bias: Tensor  # (C,)
    mean: Tensor  # (E,) of the features it was fitted to
    spread: Tensor  # (E,)
    iterations: int
    gradient: float  # the largest element of it, where the fit ended

    @property
    def converged(self) -> bool:
        """Whether the fit ended at its optimum and not at its last iteration."""
        return self.gradient <= self.tolerance

    @property
    def tolerance(self) -> float:
        """How small the gradient had to become."""
        return TOLERANCE[self.weight.dtype]

    def scores(self, features: Tensor) -> Tensor:
        """Logits (Q, C) of features (Q, E)."""
        return F.linear((features.to(self.mean.dtype) - self.mean) / self.spread, self.weight, self.bias)


@torch.no_grad()
def fit_linear(
    features: Tensor,  # (N, E) float
    labels: Tensor,  # (N,) int64 in [0, C)
    num_classes: int,
    *,
    strength: float = 1.0,  # inverse of the L2 penalty, scikit-learn's C
    max_iterations: int = 1000,
) -> Fitted:
    """Minimises mean cross-entropy + |W|^2 / (2 strength N), the bias free, from zero: scikit-learn's objective.

    Features are standardised by their own mean and spread. Float64 where they fit in 1 GB as such, else float32, on
    their device. Deterministic. `Fitted.converged` says whether the optimum was reached within `max_iterations`.
    """
    dtype = torch.float64 if 8 * features.numel() <= DOUBLE_BYTES else torch.float32
    x = features.to(dtype, copy=True)
    mean = x.mean(0)
    x -= mean
    spread = x.square().mean(0).sqrt() + 1e-6  # a dead feature stays 0 instead of 0 / 0
    x /= spread
    weight = x.new_zeros(num_classes, x.shape[1])
    bias = x.new_zeros(num_classes)
    penalty = 1 / (strength * len(x))
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        lr=1,
        max_iter=max_iterations,
        max_eval=2 * max_iterations,
        tolerance_grad=TOLERANCE[dtype],
        tolerance_change=0,  # a small step is no optimum; only a step of nothing at all ends the fit
        history_size=HISTORY,
        line_search_fn="strong_wolfe",
    )

    def loss_and_gradient() -> Tensor:
        """By hand: autograd would keep the logits of all rows at once."""
        weight.grad, bias.grad = penalty * weight, torch.zeros_like(bias)
        loss = 0.5 * penalty * weight.square().sum()
        for rows, truth in zip(x.split(ROWS), labels.split(ROWS)):
            log_p = F.linear(rows, weight, bias).log_softmax(1)
            loss -= log_p.gather(1, truth[:, None]).sum() / len(x)
            error = (log_p.exp() - F.one_hot(truth, num_classes)) / len(x)
            weight.grad += error.T @ rows
            bias.grad += error.sum(0)
        return loss

    optimizer.step(loss_and_gradient)
    loss_and_gradient()  # at the point it chose, not at the last it tried
    largest = max(weight.grad.abs().max().item(), bias.grad.abs().max().item())
    iterations = optimizer.state[weight]["n_iter"]
    return Fitted(weight.detach(), bias.detach(), mean, spread, iterations, largest)


def linear(network: nn.Module, images: Images, config: Config, place: Place) -> Measured:
    """Top-1 and top-5 accuracy of `fit_linear` on the validation images, h of `network` (B, 3, S, S) -> (B, E).

    Single centre crops of labeled and validation images alike. One rank fits, all of them count.
    """
    chosen, truth = supports(images, config), true_labels(images, place)
    features = outputs(network, images.train, chosen, config, place)
    labels = torch.from_numpy(images.train.labels[chosen]).to(place.device)
    queries = outputs(network, images.validation, np.arange(len(truth)), config, place)
    classes, setting = len(images.train.classes), config.linear
    # The ranks that do not fit stop at once, for a classifier of the right shapes to be overwritten.
    iterations = setting.max_iterations if place.first else 0
    fitted = fit_linear(features, labels, classes, strength=setting.strength, max_iterations=iterations)
    for tensor in (fitted.weight, fitted.bias):
        broadcast(tensor)
    told = broadcast_json([fitted.iterations, fitted.gradient, fitted.tolerance])
    mine = own_rows(place)
    metrics = accuracies(fitted.scores(queries[mine]), truth[mine], len(truth))
    return Measured(metrics, len(truth), *_said(config, told))


def _said(config: Config, told: list) -> tuple[dict, tuple[str, ...]]:
    iterations, gradient, tolerance = told
    setting = {"strength": config.linear.strength, "max_iterations": config.linear.max_iterations}
    if gradient <= tolerance:
        return setting, (f"fitted in {iterations:,} iterations",)
    return setting | {"converged": False}, (
        f"NOT fitted: after {iterations:,} iterations the largest gradient is {gradient:.1e}, not {tolerance:.0e}. "
        "Raise linear.max_iterations, or lower linear.strength",
    )
