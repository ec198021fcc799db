"""What frozen features give before a fine-tuning: the classifier that it starts from, and accuracies to beat.

Shapes: N labeled images, Q validation images, E the width of the encoder's output, C classes.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.collectives import broadcast
from fastsuncet.distributed.launch import Place
from fastsuncet.evaluation.features import embed_views, outputs
from fastsuncet.evaluation.knn import knn_predict
from fastsuncet.evaluation.linear import choose_strength, fit_linear
from fastsuncet.evaluation.scoring import correct_in_top, labeled


@dataclass(frozen=True)
class Frozen:
    """A linear classifier of frozen features, and what it and the nearest neighbors recognize without training."""

    weight: Tensor  # (C, E) float32, of raw features: the standardization is folded in
    bias: Tensor  # (C,) float32
    square: float  # mean of |h|^2 over the labeled images
    linear: float  # top-1 accuracies of the validation images, 0 to 1
    knn: float  # neighbors are center crops
    knn_random_crops: float  # neighbors are random crops, as in the paper


def measure_frozen(network: nn.Module, images: Images, truth: Tensor, config: Config, place: Place) -> Frozen:
    """Fit the linear classifier of the config's section linear, and measure it and k-NN on the validation images.

    `network` (B, 3, S, S) -> (B, E), `truth` int64 (Q,). Rank 0 fits, and all ranks return the same.
    """
    chosen, count = labeled(images), len(images.train.classes)
    features = outputs(network, images.train, chosen, config, place)
    queries = outputs(network, images.validation, np.arange(len(truth)), config, place)
    crops = embed_views(network, images.train, chosen, 1, config, place)[:, 0]
    labels = torch.from_numpy(images.train.labels[chosen]).to(place.device)
    strength = config.linear.strength
    if strength == "auto":
        strength = choose_strength(features, labels, count) if place.first else 1.0
    # The other ranks stop at once, with a classifier of the right shapes for the broadcast to overwrite.
    most = config.linear.max_iterations if place.first else 0
    fit = fit_linear(features, labels, count, strength=strength, max_iterations=most)
    weight = broadcast((fit.weight / fit.spread).float())
    bias = broadcast((fit.bias - fit.weight @ (fit.mean / fit.spread)).float())
    votes = [
        knn_predict(queries, supports, labels, count, k=config.evaluation.knn_k)
        for supports in (features, crops)
    ]
    scores = F.linear(queries, weight, bias)
    right = [(predicted == truth).double().mean().item() for predicted in votes]
    square = features.double().square().sum(1).mean().item()
    top1 = correct_in_top(scores, truth)[0].item() / len(truth)
    return Frozen(weight, bias, square, top1, *right)
