"""What frozen features give before a fine-tuning: the classifier that it starts from, and accuracies to beat.

Shapes: N labeled images, E the width of the encoder's output, C classes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation.features import embed_views, outputs
from fastsuncet.evaluation.knn import knn_predict
from fastsuncet.evaluation.linear import fit_on_rank_0
from fastsuncet.evaluation.scoring import examples, labeled, measured, own_rows


@dataclass(frozen=True)
class Frozen:
    """A linear classifier of frozen features, and what it and the nearest neighbors recognize without training."""

    weight: Tensor  # (C, E) float32, of raw features: the standardization is folded in
    bias: Tensor  # (C,) float32
    square: float  # mean of |h|^2 over the labeled images
    # Top-1 of the validation images, 0 to 1: linear; knn, whose neighbors are center crops; and knn_random_crops, as
    # in the paper. Empty where there are none.
    accuracies: dict[str, float]


def measure_frozen(network: nn.Module, images: Images, config: Config, place: Place) -> Frozen:
    """Fit the linear classifier of the config's section linear, and measure it and k-NN on the validation images.

    `network` (B, 3, S, S) -> (B, E). Rank 0 fits, and all ranks return the same.
    """
    chosen, count = labeled(images), len(images.train.classes)
    shown = None
    if images.held_out is None:
        features = outputs(network, images.train, chosen, config, place)
        labels = torch.from_numpy(images.train.labels[chosen]).to(place.device)
    else:
        shown = examples(network, images, config, place, chosen=chosen)
        features, labels = shown.features, shown.labels
    fit, _ = fit_on_rank_0(features, labels, count, config.linear, place)
    weight, bias = (x.float() for x in fit.of_raw_features())
    square = features.double().square().sum(1).mean().item()
    if shown is None:
        return Frozen(weight, bias, square, {})
    scores = F.linear(shown.queries, weight, bias)[own_rows(place)]
    accuracies = {"linear": measured(scores, shown.truth, place, {}).metrics["top1"]}
    crops = embed_views(network, images.train, chosen, 1, config, place)[:, 0]
    for name, supports in (("knn", features), ("knn_random_crops", crops)):
        votes = knn_predict(shown.queries, supports, labels, count, k=config.evaluation.knn_k)
        accuracies[name] = (votes == shown.truth).double().mean().item()
    return Frozen(weight, bias, square, accuracies)
