"""Sinkhorn-Knopp: samples are shared out among prototypes, each near what it resembles, all prototypes alike used.

B  samples of this rank        W  ranks        K  prototypes
"""

import torch
from torch import Tensor

from fastsuncet.distributed.collectives import Group, all_gather_rows


def sinkhorn(scores: Tensor, epsilon: float = 0.05, iterations: int = 3, *, group: Group = None) -> Tensor:
    """The codes of SwAV (arXiv 2006.09882, section 3.1 and Listing 1): Q ~ exp(scores / epsilon), scaled in turns.

    One iteration scales the prototypes, so that each gets equally much of the W B samples of all ranks, and
    then the samples, so that each gives 1. The last word is the samples': their codes sum to 1 exactly, the
    prototypes' shares only nearly.

    Args:
        scores: (..., B, K) floating, cosines of samples and prototypes. Leading dimensions are problems of
            their own, solved side by side (SwAV's two large crops). All ranks bring the same K.
        epsilon: above 0; the smaller, the harder the codes.
        iterations: at least 1.
        group: the ranks that share the prototypes; None for the default one, or this process alone. W ranks
            get the codes that one process gives the joined samples.

    Returns:
        (..., B, K) codes, each of the B rows summing to 1: float32 (float64 for float64 `scores`), also under
        autocast. No gradient.

    It all happens to logarithms: exp(1 / 0.05) is 5e8, float16 ends at 65,504, and a score of 5 would end
    float32. The authors exponentiate once and trust the scores. One gather of K numbers a rank and iteration,
    and nothing waits for the device.
    """
    scores = scores.detach()
    logs = (scores if scores.dtype == torch.float64 else scores.float()) / epsilon
    for _ in range(iterations):
        logs = (logs - _log_sum_over_samples(logs, group)).log_softmax(dim=-1)
    return logs.exp()


def _log_sum_over_samples(logs: Tensor, group: Group) -> Tensor:
    """(..., B, K) -> (..., 1, K): what each prototype gets of all samples of all ranks.

    Gathered and not reduced: sums of different ranks have different maxima taken out. And in rank order, so
    that every rank gets the same bits.
    """
    of_this_rank = logs.logsumexp(dim=-2, keepdim=True)
    return all_gather_rows(of_this_rank[None], group).logsumexp(dim=0)
