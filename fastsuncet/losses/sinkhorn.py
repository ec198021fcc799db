"""Sinkhorn-Knopp: samples are assigned to prototypes, each to similar ones, all prototypes used equally.

B  samples of this rank        W  ranks        K  prototypes
"""

from torch import Tensor

from fastsuncet.distributed.collectives import Group, all_gather_rows
from fastsuncet.losses.checks import at_least_float32


def sinkhorn(scores: Tensor, epsilon: float = 0.05, iterations: int = 3, *, group: Group = None) -> Tensor:
    """Compute the codes of SwAV (arXiv 2006.09882, section 3.1 and Listing 1): Q ~ exp(scores / epsilon), scaled.

    One iteration scales the prototypes, so that each gets the same part of the W B samples of all ranks, and
    then the samples, so that each gives 1. Samples are scaled last: their codes sum to 1 exactly, the
    prototypes' parts are only nearly equal.

    `scores` (..., B, K) floating are cosines of samples and prototypes, K the same on all ranks; leading dimensions
    are separate problems (SwAV's two large crops). `epsilon` is above 0; the smaller, the harder the codes.
    `iterations` is at least 1. Returns codes of that shape, without gradient: float32 (float64 for float64 `scores`),
    also under autocast. W ranks get the codes that one process gives the joined samples.

    It works on logarithms: exp(1 / 0.05) is 5e8, float16 ends at 65,504, and a score of 5 would overflow
    float32. The authors exponentiate once and trust the scores. It gathers K numbers per rank and iteration,
    and the host does not wait for the device.
    """
    logs = at_least_float32(scores.detach()) / epsilon
    for _ in range(iterations):
        # (..., 1, K), what each prototype gets of this rank's samples. Gathered and not reduced, because the
        # sums of the ranks have different maxima, and in rank order, so that every rank gets the same bits.
        of_this_rank = logs.logsumexp(dim=-2, keepdim=True)
        logs = logs - all_gather_rows(of_this_rank[None], group).logsumexp(dim=0)
        logs = logs.log_softmax(dim=-1)
    return logs.exp()
