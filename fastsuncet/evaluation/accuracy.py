"""The accuracy of an encoder with a classifier: a fine-tuned one, or one from a file of torchvision or timm."""

import numpy as np
from torch import nn

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.launch import Place
from fastsuncet.evaluation.features import outputs
from fastsuncet.evaluation.scoring import Measured, accuracies, own_rows, true_labels
from pipelines.data_errors import DataError


def accuracy(network: nn.Module, images: Images, config: Config, place: Place) -> Measured:
    """Compute the top-1 and top-5 accuracy of `network` (B, 3, S, S) -> (B, C), logits, on the validation images.

    Single center crops, normalized by the config's mean and std: weights of another program need theirs. Raises
    DataError where C is not the number of classes.
    """
    truth = true_labels(images, place)
    scores = outputs(network, images.validation, np.arange(len(truth)), config, place)
    classes = len(images.train.classes)
    if scores.shape[1] != classes:
        raise DataError(
            f"the classifier has {scores.shape[1]:,} classes and the images have {classes:,}: it was trained on other "
            "data"
        )
    return Measured(accuracies(scores[own_rows(place)], truth, place), len(truth), {})
