"""Nearest-neighbour accuracy while training: does the representation get better, not only the loss lower?"""

from collections.abc import Collection

import numpy as np
import torch

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.collectives import gather_json, sum_over_ranks
from fastsuncet.distributed.launch import Place
from fastsuncet.evaluation.features import embed
from fastsuncet.evaluation.neighbours import knn_predict
from fastsuncet.models.resnet import Model

# Without labels to train on, every image of known class could be a support: for ImageNet 1.28 million rows of 2,048
# floats, 10.5 GB on each GPU in the middle of a run. This many are 0.4 GB, and all of CIFAR-10.
MOST_SUPPORTS = 50_000


def online_knn(
    model: Model, images: Images, config: Config, place: Place, bad: Collection[int] = ()
) -> float:
    """Share of the validation images whose k nearest labeled training images vote for their class, 0 to 1.

    The supports are the labeled images of the run's split, or training images of known class where a run uses no labels
    (SimCLR), MOST_SUPPORTS of them at most: then it says what a classifier with labels could find. Training images in
    `bad` are left out; ranks may know of different ones. Each validation image counts once on any number of ranks.
    Every rank returns the same number. Raises BadImage for an image that cannot be decoded: another accuracy would be
    another number.
    """
    supports = images.split.indices
    if not len(supports):
        supports = spread_over_classes(images.train.labels, MOST_SUPPORTS)
    known_bad = {i for rank in gather_json([int(i) for i in bad]) for i in rank}.union(images.train.bad)
    supports = supports[~np.isin(supports, list(known_bad))]
    queries = np.arange(len(images.validation))
    rows, columns = (
        embed(model, index, chosen, config, place)
        for index, chosen in ((images.validation, queries), (images.train, supports))
    )
    labels = torch.from_numpy(images.train.labels[supports]).to(place.device)
    truth = torch.from_numpy(images.validation.labels[queries]).to(place.device)
    mine = slice(place.rank, None, place.world_size)
    predicted = knn_predict(rows[mine], columns, labels, len(images.train.classes), k=config.evaluation.knn_k)
    correct = sum_over_ranks((predicted == truth[mine]).sum())
    return correct.item() / len(queries)


def spread_over_classes(labels: np.ndarray, most: int) -> np.ndarray:
    """Indices, ascending, of at most `most` images of known class, evenly spaced through each class in index order.

    Every class keeps its share of the images to within one. No draw: the same images at every evaluation of every run
    on these data, so that numbers compare. `labels` (N,) int64, below 0 where the class is not known.
    """
    known = np.flatnonzero(labels >= 0)
    if len(known) <= most:
        return known
    by_class = known[np.argsort(labels[known], kind="stable")]
    return np.sort(by_class[np.arange(most) * len(by_class) // most])
