"""What `fastsuncet evaluate` measures: k nearest neighbors, NPI, a linear classifier, a network's own.

Every rank has all features and scores all images: that costs little beside the features, which ranks share. All
networks are (B, 3, S, S) -> (B, E), where nothing else is said.

Shapes: N labeled images, Q images to classify, E the width of the encoder's output, C classes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation.calibration import FOLDS, out_of_fold
from fastsuncet.evaluation.features import outputs
from fastsuncet.evaluation.knn import MOST_SUPPORTS, knn_predict, spread_over_classes
from fastsuncet.evaluation.linear import TOLERANCE, choose_strength, fit_linear, linear_logits
from fastsuncet.evaluation.npi import npi_probabilities
from fastsuncet.evaluation.scoring import (
    LEARNED,
    Measured,
    label_notes,
    measured,
    require_finite,
    require_two_labels,
    share_right,
    supports,
    true_labels,
    wilson_interval,
)
from pipelines.data_errors import DataError

REPEATS = 5  # draws of the folds of a cross-validation


@dataclass(frozen=True)
class Examples:
    """What a classifier learns from, and what it is judged on."""

    features: Tensor  # (N, E)
    labels: Tensor  # (N,) int64
    queries: Tensor  # (Q, E): center crops of the validation images
    truth: Tensor  # (Q,) int64


def examples(
    network: nn.Module,  # (B, 3, S, S) -> (B, E)
    images: Images,
    config: Config,
    place: Place,
    *,
    chosen: np.ndarray | None = None,  # of the training images; None: `supports`
    crops: int = 0,  # random crops of each labeled image, which count as images; 0: its center crop
) -> Examples:
    """Return the features of the labeled and of the validation images, all of them on every rank.

    Raises NumericalError for features that are not finite.
    """
    chosen = supports(images, config) if chosen is None else chosen
    truth = true_labels(images, place)
    labels = torch.from_numpy(images.train.labels[chosen]).to(place.device)
    features = outputs(network, images.train, chosen, config, place, crops=crops, what="labeled images")
    if crops:
        features, labels = features.flatten(0, 1), labels.repeat_interleave(crops)
    everything = np.arange(len(truth))
    queries = outputs(network, images.validation, everything, config, place, what="validation images")
    require_finite(features, queries)
    return Examples(features, labels, queries, truth)


def knn(network: nn.Module, images: Images, config: Config, place: Place) -> Measured:
    """Compute the top-1 accuracy of `knn_predict`, with whole and with weighted votes, from h of `network`.

    Both votes are reported because the paper does not say which it takes. Supports are one random crop of each labeled
    image, the same views as those of `npi` with one view, since appendix G compares the two. Queries are single center
    crops. With split.kind all, MOST_SUPPORTS images are supports.
    """
    chosen = supports(images, config)
    if config.data.split.kind == "all":
        chosen = chosen[spread_over_classes(images.train.labels[chosen], MOST_SUPPORTS)]
    shown = examples(network, images, config, place, chosen=chosen, crops=1)
    rows, k, truth = (shown.queries, shown.features, shown.labels), config.evaluation.knn_k, shown.truth
    plain, weighted = (knn_predict(*rows, k=k, weighted=each) for each in (False, True))
    setting = {"k": k, **_crops_of(config)}
    if config.data.split.kind == "all":
        # Of a draw, the number differs from seed to seed, and seeds must stay comparable.
        setting["supports"] = len(chosen)
    notes = _k_note(k, int(shown.labels.bincount().max()))
    metrics = {"top1": share_right(plain, truth), "top1_weighted": share_right(weighted, truth)}
    return Measured(metrics, len(truth), setting, notes, plain, truth)


def _crops_of(config: Config) -> dict[str, Any]:
    """Return what decides the random crops of supports."""
    a = config.data.augmentation
    ranges = {"support_scale": list(a.crop_scale), "support_ratio": list(a.crop_ratio)}
    return {"seed": config.meta.seed, "flip": a.flip, **ranges}


def _k_note(k: int, most: int) -> tuple[str, ...]:
    note = (
        f"k is {k} and no class has more than {most} votes, so others always vote too: lower evaluation.knn_k"
    )
    return (note,) if k > most else ()


def npi(network: nn.Module, images: Images, config: Config, place: Place) -> Measured:
    """Compute the top-1 and top-5 accuracy of `npi_probabilities` on the validation images, from the rows of `network`.

    `network` is an encoder with or without its projection head (npi.features). Supports are npi.views random crops of
    each labeled image, or its center crop; queries are single center crops. The temperature is npi.temperature, or
    training's where that is not given.
    """
    temperature = config.npi.temperature or config.criterion.temperature
    setting: dict[str, Any] = {"temperature": temperature, "views": config.npi.views}
    if config.npi.features != "encoder":
        setting["features"] = config.npi.features
    setting |= _crops_of(config) if config.npi.views else {}
    shown = examples(network, images, config, place, crops=config.npi.views)
    classes = len(images.train.classes)
    scores = npi_probabilities(shown.queries, shown.features, shown.labels, classes, temperature)
    return measured(scores, shown.truth, setting)


def linear(network: nn.Module, images: Images, config: Config, place: Place) -> Measured:
    """Compute the top-1 and top-5 accuracy of `fit_linear` on the validation images, from h of `network`.

    Labeled and validation images are single center crops.
    """
    shown = examples(network, images, config, place)
    rows = shown.features, shown.labels, len(images.train.classes)
    strength, why = choose_strength(*rows, config.linear.strength)
    fit = fit_linear(*rows, strength=strength, max_iterations=config.linear.max_iterations)
    setting: dict[str, Any] = config.linear.model_dump()
    notes = [f"fitted in {fit.iterations:,} iterations"]
    if not fit.converged:
        setting["converged"] = False
        notes = [
            f"NOT fitted: after {fit.iterations:,} iterations the largest gradient is {fit.gradient:.1e}, not "
            f"{TOLERANCE:.0e}. Raise linear.max_iterations, or lower linear.strength"
        ]
    if config.linear.strength == "auto":
        setting["chosen_strength"] = strength
        notes = [f"strength {strength:g}, {why}", *notes]
    return measured(fit.scores(shown.queries), shown.truth, setting, tuple(notes))


def accuracy(network: nn.Module, images: Images, config: Config, place: Place) -> Measured:
    """Measure a `network` (B, 3, S, S) -> (B, C), which has a classifier of its own, on the validation images.

    Single center crops, normalized by the config's mean and std: weights of another program need theirs. Raises
    DataError where C is not the number of classes.
    """
    truth, classes = true_labels(images, place), len(images.train.classes)
    everything = np.arange(len(truth))
    scores = outputs(network, images.validation, everything, config, place, what="validation images")
    if scores.shape[1] != classes:
        raise DataError(
            f"the classifier has {scores.shape[1]:,} classes and the images have {classes:,}: it was trained on other "
            "data"
        )
    return measured(scores, truth, {})


def cross_validated(
    kind: str, network: nn.Module, images: Images, config: Config, place: Place, learned: np.ndarray
) -> Measured:  # kind: linear or knn
    """Return the mean top-1 accuracy of REPEATS stratified cross-validations on the labeled images alone.

    Images and, for k-NN, their neighbors are single center crops. The 95 % interval is that of as many independent
    images: repeats see the same images, so they make it no narrower. The strength of the linear classifier is chosen on
    all labels. Images that the network has `learned` from, bool of the training images, are not judged, unless there
    are no others: a note says so. Raises DataError where no class has two labels.
    """
    chosen, count = supports(images, config), len(images.train.classes)
    require_two_labels(images)
    features = outputs(network, images.train, chosen, config, place, what="labeled images")
    require_finite(features)
    labels = torch.from_numpy(images.train.labels[chosen]).to(place.device)
    setting: dict[str, Any] = {"folds": FOLDS, "repeats": REPEATS}
    notes = label_notes(images)
    if kind == "linear":
        setting["strength"] = given = config.linear.strength
        strength, why = choose_strength(features, labels, count, given)
        if given == "auto":
            setting["chosen_strength"] = strength
            notes.append(f"strength {strength:g}, {why}")

        def classify(learned: Tensor, left_out: Tensor) -> Tensor:
            return linear_logits(features, labels, count, strength, learned, left_out).argmax(1)

    else:
        setting["k"] = k = config.evaluation.knn_k

        def classify(learned: Tensor, left_out: Tensor) -> Tensor:
            return knn_predict(features[left_out], features[learned], labels[learned], k=k)

    known = torch.from_numpy(learned[chosen]).to(place.device)
    if kind == "knn":
        most = int(labels.bincount().max())
        notes += _k_note(config.evaluation.knn_k, most - most // FOLDS)
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
