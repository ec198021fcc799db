"""Nearest-neighbour accuracy while training: does the representation get better, not only the loss lower?"""

from collections.abc import Collection

import numpy as np
import torch

from fastsuncet.config import Config
from fastsuncet.distributed import gather_json, sum_over_ranks
from fastsuncet.evaluate.embed import embed
from fastsuncet.evaluate.neighbours import knn_predict
from fastsuncet.images import Images
from fastsuncet.launch import Place
from fastsuncet.model import Model


def online_knn(
    model: Model, images: Images, config: Config, place: Place, bad: Collection[int] = ()
) -> float:
    """Share of the validation images whose k nearest labeled training images vote for their class, 0 to 1.

    The supports are the labeled images of the run's split, or every training image of known class where a run uses
    no labels (SimCLR): then it says what a classifier with all labels could find. Training images in `bad` are left
    out; ranks may know of different ones. Each validation image counts once on any number of ranks. Every rank returns
    the same number. Raises BadImage for an image that cannot be decoded: another accuracy would be another number.
    """
    supports = images.split.indices
    if not len(supports):
        supports = np.flatnonzero(images.train.labels >= 0)
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
