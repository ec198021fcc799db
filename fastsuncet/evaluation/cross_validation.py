"""Accuracy from the labeled images alone: each is classified by a classifier that has not learned from it.

Shapes: N labeled images, n of them that can be judged, E the width of the features, C classes.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation.features import outputs
from fastsuncet.evaluation.knn import knn_predict
from fastsuncet.evaluation.linear import FOLDS, fit_linear, folds, strength_of
from fastsuncet.evaluation.scoring import (
    LEARNED,
    Measured,
    few_labels_note,
    require_finite,
    share_right,
    supports,
    wilson_interval,
)
from pipelines.data_errors import DataError

REPEATS = 5  # draws of the folds
# Masks (N,) bool of the images to learn from and of those left out -> a row for each of the latter.
Classify = Callable[[Tensor, Tensor], Tensor]


def out_of_fold(
    labels: Tensor, classify: Classify, seed: int = 0, learned: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (numbers of the images that can be judged, int64 (n,), their rows, (n, ...)).

    Each fold of FOLDS is left out once, and classified by what `classify` learns from the others. An image that is the
    only one of its class cannot be judged, and one that the encoder has `learned` from, bool (N,), tells nothing:
    neither is ever left out. Without one that can be judged, both are empty.
    """
    fold_of, judged = folds(labels, seed), torch.bincount(labels)[labels] > 1
    if learned is not None:
        judged &= ~learned
    numbers, rows = [labels.new_zeros(0)], []
    for fold in fold_of[judged].unique():
        left_out = (fold_of == fold) & judged
        numbers.append(left_out.nonzero()[:, 0])
        rows.append(classify(~left_out, left_out))
    found = torch.cat(numbers)
    order = found.argsort()
    return found[order], torch.cat(rows)[order] if rows else found


def linear_logits(
    features: Tensor, labels: Tensor, num_classes: int, strength: float, learned: Tensor, left_out: Tensor
) -> Tensor:
    """Classify by `fit_linear`: logits, float64 (left out, C)."""
    fit = fit_linear(features[learned], labels[learned], num_classes, strength=strength)
    return fit.scores(features[left_out])


def labels_per_class(images: Images, chosen: np.ndarray) -> np.ndarray:
    """Return how many of the images `chosen` each class has, int64 (C,). DataError where no class has two."""
    counts = np.bincount(images.train.labels[chosen], minlength=len(images.train.classes))
    if counts.max(initial=0) < 2:
        raise DataError(
            f"no class has two labels, so no label can be left out to judge by. Labels: {images.split}"
        )
    return counts


def cross_validated(
    kind: str, network: nn.Module, images: Images, config: Config, place: Place, learned: np.ndarray
) -> Measured:  # kind: linear or knn
    """Return the mean top-1 accuracy of REPEATS stratified cross-validations on the labeled images alone.

    `network` (B, 3, S, S) -> (B, E). Images and, for k-NN, their neighbors are single center crops. The 95 % interval
    is that of as many independent images: repeats see the same images, so they make it no narrower. The strength of the
    linear classifier is chosen on all labels. Images that the network has `learned` from, bool of the training images,
    are not judged, unless there are no others: a note says so. Every rank returns the same. Raises DataError where no
    class has two labels.
    """
    chosen, count = supports(images, config), len(images.train.classes)
    counts = labels_per_class(images, chosen)
    features = outputs(network, images.train, chosen, config, place, what="labeled images")
    require_finite(features)
    labels = torch.from_numpy(images.train.labels[chosen]).to(place.device)
    setting: dict[str, float] = {"folds": FOLDS, "repeats": REPEATS}
    if kind == "linear":
        setting["chosen_strength"] = strength = strength_of(config.linear, features, labels, count)

        def classify(learned: Tensor, left_out: Tensor) -> Tensor:
            return linear_logits(features, labels, count, strength, learned, left_out).argmax(1)

    else:
        setting["k"] = k = config.evaluation.knn_k

        def classify(learned: Tensor, left_out: Tensor) -> Tensor:
            return knn_predict(features[left_out], features[learned], labels[learned], k=k)

    known = torch.from_numpy(learned[chosen]).to(place.device)
    notes = few_labels_note(counts, images.train.classes)
    new = int((torch.bincount(labels)[labels[~known]] > 1).sum())
    if known.any():
        notes.append(f"the network has learned from the other {int(known.sum())} labels" if new else LEARNED)
    only_learned = 0 if new else int(known.sum())
    known &= new > 0
    repeats = [out_of_fold(labels, classify, seed, known) for seed in range(REPEATS)]
    judged = len(repeats[0][0])
    top1 = sum(share_right(predicted, labels[numbers]) for numbers, predicted in repeats) / REPEATS
    low, high = (100 * x for x in wilson_interval(top1 * judged, judged))
    notes = (f"95 % interval {low:.1f} to {high:.1f}", *notes)
    numbers, predicted = (torch.cat(parts) for parts in zip(*repeats))
    return Measured({"top1": top1}, judged, setting, notes, predicted, labels[numbers], only_learned)
