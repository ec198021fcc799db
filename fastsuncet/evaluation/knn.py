"""K nearest labeled neighbours on the validation images: the question of appendix G that trains nothing."""

import numpy as np
import torch
from torch import nn

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.collectives import sum_over_ranks
from fastsuncet.distributed.launch import Place
from fastsuncet.evaluation.features import embed_views, outputs
from fastsuncet.evaluation.neighbours import knn_predict
from fastsuncet.evaluation.scoring import Measured, own_rows, supports, true_labels


def knn(network: nn.Module, images: Images, config: Config, place: Place) -> Measured:
    """Top-1 accuracy of `knn_predict` with whole and with weighted votes, h of `network` (B, 3, S, S) -> (B, E).

    The paper leaves the vote open, so both are told. Supports are one random crop of each labeled image, the very views
    of `npi` with one view, since appendix G compares the two; queries are single centre crops.
    """
    chosen, truth = supports(images, config), true_labels(images, place)
    columns = embed_views(network, images.train, chosen, 1, config, place)[:, 0]
    labels = torch.from_numpy(images.train.labels[chosen]).to(place.device)
    rows = outputs(network, images.validation, np.arange(len(truth)), config, place)
    mine, classes, k = own_rows(place), len(images.train.classes), config.evaluation.knn_k
    right = [
        (knn_predict(rows[mine], columns, labels, classes, k=k, weighted=weighted) == truth[mine]).sum()
        for weighted in (False, True)
    ]
    plain, weighted = (sum_over_ranks(torch.stack(right)).double() / len(truth)).tolist()
    setting = {"k": k, "seed": config.meta.seed}  # of the crops
    notes = (f"all {len(chosen)} labeled images vote: there are no {k}",) if k > len(chosen) else ()
    return Measured({"top1": plain, "top1_weighted": weighted}, len(truth), setting, notes)
