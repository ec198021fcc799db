"""SuNCEt's own classifier, which has no parameters: the loss's probabilities, asked of images it never saw.

The paper's non-parametric inference (appendix G, equation for p in section 3).

Shapes: N labeled support views, Q query images, E the width of the encoder's output, C classes.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.launch import Place
from fastsuncet.evaluation.features import embed_views, outputs
from fastsuncet.evaluation.scoring import Measured, accuracies, own_rows, supports, true_labels

# Similarities held at a time: 256 MB of float32. The whole of ImageNet's 50,000 x 128,116 would be 26 GB.
AT_A_TIME = 1 << 26
CLASSES_SUMMED = 4096  # supports of a block in the sum over classes


@torch.no_grad()
def npi_probabilities(
    queries: Tensor,  # (Q, E) float
    supports: Tensor,  # (N, E) float
    labels: Tensor,  # (N,) int64 in [0, C)
    num_classes: int,
    temperature: float,
) -> Tensor:
    """p(c | query), (Q, C) float32: softmax over the supports of cosine / temperature, summed over each class.

    Float32 whatever the input, chunk by chunk, the same bits each time on one device. A class without supports has 0.
    """
    order = labels.argsort(stable=True)
    labels, supports = labels[order], F.normalize(supports.float()[order], dim=1)
    sums = queries.new_zeros(len(queries), num_classes, dtype=torch.float32)
    rows_at_a_time = max(1, AT_A_TIME // max(1, len(supports)))
    for rows, out in zip(queries.float().split(rows_at_a_time), sums.split(rows_at_a_time)):
        probability = (F.normalize(rows, dim=1) @ supports.T / temperature).softmax(1)  # (q, N)
        # In order of classes a block of supports has few of them, so the sum is a small product. An index_add would
        # add in no fixed order on a GPU; one product with all N x C labels would hold 0.5 GB of zeros for ImageNet.
        for block, of_class in zip(probability.split(CLASSES_SUMMED, 1), labels.split(CLASSES_SUMMED)):
            first, last = int(of_class[0]), int(of_class[-1])
            out[:, first : last + 1] += block @ F.one_hot(of_class - first, last - first + 1).float()
    return sums


def npi(network: nn.Module, images: Images, config: Config, place: Place) -> Measured:
    """Top-1 and top-5 accuracy of `npi_probabilities` on the validation images, h of `network` (B, 3, S, S) -> (B, E).

    Supports are npi.views random crops of each labeled image, queries single centre crops; temperature is training's
    unless npi.temperature says otherwise.
    """
    chosen, truth = supports(images, config), true_labels(images, place)
    setting = {
        "temperature": config.npi.temperature or config.criterion.temperature,
        "views": config.npi.views,
    }
    views = embed_views(network, images.train, chosen, config.npi.views, config, place)
    labels = torch.from_numpy(images.train.labels[chosen]).to(place.device)
    queries = outputs(network, images.validation, np.arange(len(truth)), config, place)
    mine = own_rows(place)
    scores = npi_probabilities(
        queries[mine],
        views.flatten(0, 1),
        labels.repeat_interleave(config.npi.views),
        len(images.train.classes),
        setting["temperature"],
    )
    setting["seed"] = config.meta.seed  # of the crops
    return Measured(accuracies(scores, truth[mine], len(truth)), len(truth), setting)
