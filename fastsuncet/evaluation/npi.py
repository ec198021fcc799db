"""SuNCEt's non-parametric inference (NPI): the loss's class probabilities, for images it was not trained on.

From appendix G of the paper, with p of section 3.

Shapes: N labeled support views, Q query images, E the width of the encoder's output, C classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

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
