"""Accuracy from the labeled images alone: each is classified by a classifier that has not learned from it.

Shapes: N labeled images, E the width of the features, C classes.
"""

import math

import torch
from torch import Tensor, nn

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.launch import Place
from fastsuncet.evaluation.features import outputs
from fastsuncet.evaluation.knn import knn_predict
from fastsuncet.evaluation.linear import FOLDS, choose_strength, fit_linear, folds
from fastsuncet.evaluation.scoring import Measured, class_names, supports
from pipelines.data_errors import DataError

REPEATS = 5  # draws of the folds
FEW = 5  # with fewer labels of a class, some folds have none of it


def cross_validated(
    kind: str, network: nn.Module, images: Images, config: Config, place: Place
) -> Measured:  # kind: linear or knn
    """Return the mean top-1 accuracy of REPEATS stratified cross-validations on the labeled images alone.

    `network` (B, 3, S, S) -> (B, E). Images and, for k-NN, their neighbors are single center crops. The 95 % interval
    is that of as many independent images: repeats see the same images, so they make it no narrower. The strength of the
    linear classifier is chosen on all labels. Every rank computes the same. Raises DataError where no class has two
    labels.
    """
    chosen, count = supports(images, config), len(images.train.classes)
    features = outputs(network, images.train, chosen, config, place)
    labels = torch.from_numpy(images.train.labels[chosen]).to(place.device)
    each = torch.bincount(labels, minlength=count)
    if not (each > 1).any():
        raise DataError(
            f"no class has two labels, so no label can be left out to judge by. Labels: {images.split}"
        )
    setting: dict[str, float] = {"folds": FOLDS, "repeats": REPEATS}
    strength = config.linear.strength
    if kind == "linear":
        if strength == "auto":
            strength = choose_strength(features, labels, count)
        setting["chosen_strength"] = strength
    else:
        setting["k"] = config.evaluation.knn_k
    shares = []
    for seed in range(REPEATS):
        if kind == "linear":
            numbers, logits = out_of_fold_logits(features, labels, count, strength=float(strength), seed=seed)
            right = logits.argmax(1) == labels[numbers]
        else:
            right = _out_of_fold_votes(features, labels, count, config.evaluation.knn_k, seed)
        shares.append(right.double().mean().item())
    judged, top1 = int(each[each > 1].sum()), sum(shares) / REPEATS
    low, high = (100 * x for x in wilson_interval(top1 * judged, judged))
    notes = [f"95 % interval {low:.1f} to {high:.1f}"]
    few = ((each > 0) & (each < FEW)).nonzero()[:, 0].cpu().numpy()
    if len(few):
        notes.append(
            f"{len(few)} classes have fewer than {FEW} labels ({class_names(images, few)}): this tells nearly "
            "nothing of each of them, and a single label is not judged"
        )
    return Measured({"top1": top1}, judged, setting, tuple(notes))


def _out_of_fold_votes(features: Tensor, labels: Tensor, num_classes: int, k: int, seed: int) -> Tensor:
    """Return for each image that can be judged whether its k nearest of the other folds name its class, bool (n,)."""
    fold_of = folds(labels, seed)
    judged = torch.bincount(labels, minlength=num_classes)[labels] > 1
    right = torch.zeros_like(judged)
    for fold in fold_of[judged].unique():
        rest, left_out = fold_of != fold, fold_of == fold
        votes = knn_predict(features[left_out], features[rest], labels[rest], num_classes, k=k)
        right[left_out] = votes == labels[left_out]
    return right[judged]


def out_of_fold_logits(
    features: Tensor, labels: Tensor, num_classes: int, *, strength: float, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return (numbers of the images that can be judged, int64 (n,), their logits, float64 (n, C)).

    Each fold of FOLDS is left out once, and classified by `fit_linear` on the others. An image that is the only one of
    its class cannot be judged.
    """
    fold_of = folds(labels, seed)
    judged = torch.bincount(labels, minlength=num_classes)[labels] > 1
    logits = features.new_zeros(len(labels), num_classes, dtype=torch.float64)
    for fold in fold_of[judged].unique():
        rest, left_out = fold_of != fold, (fold_of == fold) & judged
        fit = fit_linear(features[rest], labels[rest], num_classes, strength=strength)
        logits[left_out] = fit.scores(features[left_out])
    numbers = judged.nonzero()[:, 0]
    return numbers, logits[numbers]


def wilson_interval(right: float, images: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of independent images (Wilson 1927): useful from few images on."""
    z, share = 1.96, right / images
    center, scale = share + z * z / (2 * images), 1 + z * z / images
    half = z * math.sqrt(share * (1 - share) / images + z * z / (4 * images * images))
    return max(0.0, (center - half) / scale), min(1.0, (center + half) / scale)
