"""SuNCEt's non-parametric inference (NPI): the loss's class probabilities, for images it was not trained on.

From appendix G of the paper, with p of section 3.

Shapes: N labeled support views, Q query images, E the width of the encoder's output, C classes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation.scoring import Measured, examples, measured

# Similarities held at a time: 256 MB of float32. All of ImageNet's 50,000 x 128,116 would be 26 GB.
SIMILARITIES_AT_A_TIME = 1 << 26
SUPPORTS_SUMMED = 4096  # supports in a block of the sum over classes


@torch.no_grad()
def npi_probabilities(
    queries: Tensor,  # (Q, E) float
    supports: Tensor,  # (N, E) float
    labels: Tensor,  # (N,) int64 in [0, C)
    num_classes: int,
    temperature: float,
) -> Tensor:
    """Return p(c | query), (Q, C) float32: softmax over the supports of cosine / temperature, summed over each class.

    Float32 for any input, in chunks, deterministic on one device. A class without supports has probability 0.
    """
    order = labels.argsort(stable=True)
    labels, supports = labels[order], F.normalize(supports.float()[order], dim=1)
    sums = queries.new_zeros(len(queries), num_classes, dtype=torch.float32)
    rows_at_a_time = max(1, SIMILARITIES_AT_A_TIME // max(1, len(supports)))
    for rows, out in zip(queries.float().split(rows_at_a_time), sums.split(rows_at_a_time)):
        probability = (F.normalize(rows, dim=1) @ supports.T / temperature).softmax(1)  # (q, N)
        # The supports are sorted by class, so a block has few classes and its sum is a small matrix product.
        # index_add has no fixed order of addition on a GPU. One product with all N x C labels would hold 0.5 GB of
        # zeros for ImageNet.
        for block, of_class in zip(probability.split(SUPPORTS_SUMMED, 1), labels.split(SUPPORTS_SUMMED)):
            first, last = int(of_class[0]), int(of_class[-1])
            out[:, first : last + 1] += block @ F.one_hot(of_class - first, last - first + 1).float()
    return sums


def npi(network: nn.Module, images: Images, config: Config, place: Place) -> Measured:
    """Compute the top-1 and top-5 accuracy of `npi_probabilities` on the validation images, from the rows of `network`.

    `network` (B, 3, S, S) -> (B, E), an encoder with or without its projection head (npi.features). Supports are
    npi.views random crops of each labeled image, or its center crop; queries are single center crops. The temperature
    is npi.temperature, or training's where that is not given.
    """
    setting: dict[str, Any] = {
        "temperature": config.npi.temperature or config.criterion.temperature,
        "views": config.npi.views,
    }
    if config.npi.features != "encoder":
        setting["features"] = config.npi.features
    shown = examples(network, images, config, place, crops=config.npi.views)
    learned = (shown.features, shown.labels, len(images.train.classes))
    scores = npi_probabilities(shown.queries, *learned, setting["temperature"])
    setting["seed"] = config.meta.seed  # the seed of the crops
    return measured(scores, shown.truth, setting)
