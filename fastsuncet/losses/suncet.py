"""SuNCEt, supervised noise contrastive estimation: a labeled image finds its class among all labeled images.

contrast.py computes it in chunks. In a run training/methods.py gives it the settings of the config.

N  labeled rows of this rank        W  ranks        M = W N        D  width of a row
"""

import torch
from torch import Tensor

from fastsuncet.distributed.collectives import Group, all_gather_rows, rank, world_size
from fastsuncet.losses import checks
from fastsuncet.losses.contrast import contrast


def suncet(
    z: Tensor,
    labels: Tensor,
    temperature: float,
    *,
    group: Group = None,
    keys: str = "attached",
    average: str = "sample",
    chunk_size: int | None = None,
) -> Tensor:
    """Compute equation 2 of the paper (arXiv 2006.10803), without the anchor above and below as in its Listing 2.

        L_i = -log( sum_{j in P(i)} exp(cos(z_i, z_j) / temperature)
                    / sum_{j != i}  exp(cos(z_i, z_j) / temperature) )

    where P(i) are the rows j != i with the label of i, and all j run over the NW rows of all ranks. (As
    printed, equation 2 counts the anchor among its own class and can turn negative; no code of the authors
    does that.) An anchor without a positive counts zero and is left out of the mean, and stays a key of the
    others. No anchor with a positive, or no row at all, gives 0 with a zero gradient.

    Args:
        z: (N, D) floating. Rows are normalized here; one whose length is below 1e-12 or overflows, 2e19 in
            float32, counts as a zero row. All ranks pass the same shape.
        labels: (N,) integers of any value; no value is special.
        temperature: above 0.
        group: the ranks whose rows are contrasted; None for the default one, or this process alone.
        keys: "attached" or "detached", whether gradient reaches rows also as keys; see below.
        average: "sample", the mean over anchors (equation 2), or "class", the mean in each class and then
            over classes (Listing 2). They differ only where classes have different numbers of rows.
        chunk_size: anchors at a time, the price in memory; None for 128, on CUDA 4,096. Changes no result
            beyond rounding.

    Returns:
        A scalar, float32 (float64 for float64 `z`), also under autocast; this rank's share, W times its
        part of the global mean; where all ranks have equally many anchors, its own mean. The mean over
        ranks is the loss of one process on the joined batch.

    Gradient: with keys="attached" a row receives gradient as an anchor and as a key of every rank's
    anchors, so z.grad is that of the SUM of all ranks' losses, and DDP's mean over ranks makes it exactly
    that of one process on the joined batch. With keys="detached" a row receives gradient as an anchor only,
    also at W = 1. The authors' first code (facebookresearch/suncet 5245e4a) is attached at W = 1 and
    detached at W > 1; their second (731547d) is attached at every W. Labels carry none.

    Raises:
        ValueError: `z` is not (N, D) floating, `labels` not (N,) integers on its device, a setting is out
            of range, or the ranks' shapes differ.
    """
    return labeled_contrast("suncet", z, labels, temperature, group, keys, average, chunk_size)


def labeled_contrast(
    loss: str,
    z: Tensor,
    labels: Tensor,
    temperature: float,
    group: Group,
    keys: str,
    average: str,
    chunk_size: int | None,
    every_positive: bool = False,
) -> Tensor:
    """Compute the loss named `loss`, whose positives are the rows of the same label; arguments as of `suncet`."""
    checks.rows(loss, z, temperature, keys, chunk_size, group)
    checks.labels(loss, z, labels, average)
    all_labels = all_gather_rows(labels.long().contiguous(), group)
    first = rank(group) * len(z)
    # This rank's share is W times its part, because DDP divides the sum over ranks by W.
    weights = world_size(group) * _label_weights(all_labels, average)[first : first + len(z)]
    options = {"every_positive": every_positive, "group": group, "keys": keys, "chunk_size": chunk_size}
    return contrast(z, all_labels, weights, temperature, **options)


def _label_weights(labels: Tensor, average: str) -> Tensor:
    """Return the weight (M,) float64 of each row in the mean over anchors, from all ranks' labels (M,) int64.

    Only a row with a positive, another row of its label, has a weight. "sample": the same for all such rows.
    "class": the same for all classes that have such rows, each divided among its rows (Listing 2 of the paper).
    The weights sum to 1, or are all 0 where no row has a positive. No gradient.
    """
    # Sorting puts the rows of a class next to each other. Listing the classes instead would wait for the
    # device, which alone knows how many there are, and comparing every label with every other takes M x M.
    in_order = labels.sort().values
    count = torch.searchsorted(in_order, labels, right=True) - torch.searchsorted(in_order, labels)
    weight = (count > 1).double()
    if average == "class":
        weight = weight / count
    return weight / weight.sum().clamp(min=0.5)  # the sum is 0 without an anchor, and at least 1 with one
