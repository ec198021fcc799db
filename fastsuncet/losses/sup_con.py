"""L_sup_out, the supervised contrastive loss that the paper compares SuNCEt with: every positive is pulled.

N  labeled rows of this rank        W  ranks        D  width of a row
"""

from torch import Tensor

from fastsuncet.distributed.collectives import Group
from fastsuncet.losses.suncet import labeled_contrast


def sup_con(
    z: Tensor,
    labels: Tensor,
    temperature: float,
    *,
    group: Group = None,
    keys: str = "attached",
    average: str = "sample",
    chunk_size: int | None = None,
) -> Tensor:
    """Compute L_sup_out (arXiv 2004.11362 version 1; appendix H of the SuNCEt paper), without the anchor.

        L_i = -1 / |P(i)| sum_{j in P(i)} log( exp(cos(z_i, z_j) / temperature)
                                               / sum_{k != i} exp(cos(z_i, z_k) / temperature) )

    where P(i) are the rows j != i with the label of i, and all j, k run over the NW rows of all ranks.
    SuNCEt takes the logarithm of the sum, this loss the sum of logarithms: for SuNCEt one close positive is
    enough. The public code (HobbitLong/SupContrast) also multiplies by temperature / base_temperature,
    1 in the paper and here.

    Arguments, the returned share, gradient and errors are those of `suncet`.
    """
    return labeled_contrast(
        "sup_con", z, labels, temperature, group, keys, average, chunk_size, every_positive=True
    )
