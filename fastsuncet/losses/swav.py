"""SwAV, clusters instead of instances: each crop of an image predicts the prototypes of the other crops.

U  images of this rank        V  crops of each        K  prototypes        W  ranks        D  width
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsuncet.distributed.collectives import Group, all_gather_rows
from fastsuncet.losses import checks
from fastsuncet.losses.contrast import outside_autocast, unit_rows

CODE_CROPS = 2  # the large ones: a small crop shows too little of its image to assign it


def swav(
    scores: Tensor,
    temperature: float,
    *,
    crops: int,
    epsilon: float = 0.05,
    iterations: int = 3,
    group: Group = None,
) -> Tensor:
    """Compute equation 2 of SwAV with multi-crop (arXiv 2006.09882, sections 3.1 and 3.2; no queue).

        mean over a in {0, 1}, v != a, images b of   - sum_k q_abk log softmax_k(s_vbk / temperature)

    where q_a are the Sinkhorn codes of the scores s_a of crop a, balanced over the images of all ranks.

    Args:
        scores: (V U, K) floating, of `prototype_scores`: crop 0 of U images, then crop 1 of the same images
            in the same order, and so on; the first two crops are the large ones. All ranks pass the same
            shape. U = 0 gives 0.
        temperature: above 0; SwAV's is 0.1.
        crops: V, at least 2; SwAV's is 8, two large and six small.
        epsilon: of `sinkhorn`, above 0; SwAV's is 0.05.
        iterations: of `sinkhorn`, at least 1; SwAV's is 3.
        group: the ranks whose images are balanced together; None for the default one, or this process alone.

    Returns:
        A scalar, float32 (float64 for float64 `scores`), also under autocast; the mean over this rank's
        images. The mean over ranks is the loss of one process on the joined batch.

    Gradient: to this rank's scores as predictions only, never through codes, which are constants; crop 0 is
    a prediction too, of crop 1's code. DDP's mean over ranks makes it that of one process on the joined
    batch.

    Raises:
        ValueError: `scores` is not (V U, K) floating, a setting is out of range, or the ranks' shapes differ.
    """
    checks.matrix("swav", "scores must be (crops x images, prototypes)", scores)
    checks.positive("swav", temperature=temperature, epsilon=epsilon)
    checks.require("swav", scores.shape[1] > 0, "scores must have at least one prototype", scores)
    checks.count("swav", "iterations", iterations, 1)
    checks.count("swav", "crops", crops, CODE_CROPS)
    wanted = f"scores must hold {crops} crops of the same images, crop after crop"
    checks.require("swav", len(scores) % crops == 0, wanted, scores)
    checks.equal_shapes("swav", scores, group)
    by_crop = checks.at_least_float32(scores).unflatten(0, (crops, len(scores) // crops))  # (V, U, K)
    codes = sinkhorn(by_crop[:CODE_CROPS], epsilon, iterations, group=group)
    log_p = F.log_softmax(by_crop / temperature, dim=-1)
    # The cross-entropy is linear in the code: a crop that predicts both codes meets their sum, in one pass.
    agreed = (codes.flip(0) * log_p[:CODE_CROPS]).sum() + (codes.sum(0) * log_p[CODE_CROPS:]).sum()
    pairs = CODE_CROPS * (crops - 1) * by_crop.shape[1]
    return -agreed / max(pairs, 1)


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
    logs = checks.at_least_float32(scores.detach()) / epsilon
    for _ in range(iterations):
        # (..., 1, K), what each prototype gets of this rank's samples. Gathered and not reduced, because the
        # sums of the ranks have different maxima, and in rank order, so that every rank gets the same bits.
        of_this_rank = logs.logsumexp(dim=-2, keepdim=True)
        logs = logs - all_gather_rows(of_this_rank[None], group).logsumexp(dim=0)
        logs = logs.log_softmax(dim=-1)
    return logs.exp()


def prototype_scores(z: Tensor, prototypes: Tensor) -> Tensor:
    """Return the cosines (N, K) of rows `z` (N, D) of any length and unit rows `prototypes` (K, D).

    Both get gradient. float32 (float64 for float64 `z`), also under autocast; in bfloat16 a cosine near 1 is
    off by up to 1/512, and epsilon turns that into 4 % of its part in a code.
    """
    with outside_autocast(z.device.type):
        unit = unit_rows(z)
        return unit @ prototypes.to(unit.dtype).T


@torch.no_grad()
def normalize_prototypes_(prototypes: Tensor) -> Tensor:
    """Normalize the rows of `prototypes` (K, D) in place, without gradient; before every update, as SwAV's code does.

    A zero row stays zero.
    """
    return prototypes.copy_(F.normalize(prototypes, dim=1))
