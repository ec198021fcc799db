"""The accuracy of an encoder that has a classifier: one that was fine-tuned, or one that came with its own."""

import numpy as np
from torch import nn

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.launch import Place
from fastsuncet.evaluation.features import outputs
from fastsuncet.evaluation.scoring import Measured, accuracies, own_rows, true_labels
from pipelines.data_errors import DataError


def accuracy(network: nn.Module, images: Images, config: Config, place: Place) -> Measured:
    """Top-1 and top-5 accuracy of the logits of `network`, (B, 3, S, S) -> (B, C), on every validation image once.

    Single centre crops, with the config's mean and std: a network of another program wants its own. Raises DataError
    where C is not the number of classes.
    """
    truth = true_labels(images, place)
    scores = outputs(network, images.validation, np.arange(len(truth)), config, place)
    classes = len(images.train.classes)
    if scores.shape[1] != classes:
        raise DataError(
            f"the classifier tells {scores.shape[1]:,} classes apart and the images are of {classes:,}: it was trained "
            "on other data"
        )
    mine = own_rows(place)
    return Measured(accuracies(scores[mine], truth[mine], len(truth)), len(truth), {})
