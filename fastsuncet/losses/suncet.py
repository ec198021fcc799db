"""SuNCEt, supervised noise contrastive estimation: a labeled image finds its class among all labeled images.

N  labeled rows of this rank        W  ranks        D  width of a row
"""

from torch import Tensor

from fastsuncet.distributed.collectives import Group, all_gather_rows, rank, world_size
from fastsuncet.losses.checks_and_weights import (
    check_average,
    check_labels,
    check_rows,
    label_weights,
)
from fastsuncet.losses.contrast import Level, any_positive, contrast


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
    """Equation 2 of the paper (arXiv 2006.10803), the anchor left out above and below as in its Listing 2.

        L_i = -log( sum_{j in P(i)} exp(cos(z_i, z_j) / temperature)
                    / sum_{j != i}  exp(cos(z_i, z_j) / temperature) )

    where P(i) are the rows j != i with the label of i, and all j run over the NW rows of all ranks. (As
    printed, equation 2 counts the anchor among its own class and can turn negative; no code of the authors
    does that.) An anchor without a positive counts zero and is left out of the mean, and stays a key of the
    others. No anchor with a positive, or no row at all, gives 0 with a zero gradient.

    Args:
        z: (N, D) floating. Rows of any length, they are divided by it here. All ranks bring the same shape.
        labels: (N,) integers of any value; no value is special.
        temperature: above 0.
        group: the ranks whose rows are contrasted; None for the default one, or this process alone.
        keys: "attached" or "detached", whether gradient reaches rows also as keys; see below.
        average: "sample", the mean over anchors (equation 2), or "class", the mean in each class and then
            over classes (Listing 2). They differ only where classes bring different numbers of rows.
        chunk_size: anchors at a time, the price in memory; None for 128, on CUDA 1,024. Changes no result
            beyond rounding.

    Returns:
        A scalar, float32 (float64 for float64 `z`), also under autocast: this rank's share, W times its
        part of the global mean; where all ranks have equally many anchors, its own mean. The mean over
        ranks is the loss of one process on the joined batch.

    Gradient: with keys="attached" a row receives gradient as an anchor and as a key of every rank's
    anchors, so z.grad is that of the SUM of all ranks' losses, and DDP's mean over ranks makes it exactly
    that of one process on the joined batch. With keys="detached" a row receives gradient as an anchor only,
    also at W = 1. The authors' first code (facebookresearch/suncet 5245e4a) is attached at W = 1 and
    detached at W > 1; their second (731547d) is attached at every W. Labels carry none.

    Raises:
        ValueError: `z` is not (N, D) floating, `labels` not (N,) integers on its device, a setting is out
            of range, or the ranks bring different shapes.
    """
    return contrast_labeled("suncet", any_positive, z, labels, temperature, group, keys, average, chunk_size)


def contrast_labeled(
    loss: str,
    level: Level,
    z: Tensor,
    labels: Tensor,
    temperature: float,
    group: Group,
    keys: str,
    average: str,
    chunk_size: int | None,
) -> Tensor:
    """A loss whose positives are the rows of the same label: checked, weighed over all ranks, and swept."""
    check_rows(loss, z, temperature, keys, chunk_size, group)
    check_labels(loss, z, labels)
    check_average(loss, average)
    all_labels = all_gather_rows(labels.long(), group)
    first = rank(group) * len(z)
    # This rank's share is W times its part, because DDP divides the sum over ranks by W.
    weights = world_size(group) * label_weights(all_labels, average)[first : first + len(z)]
    return contrast(
        z, all_labels, weights, temperature, level=level, group=group, keys=keys, chunk_size=chunk_size
    )
