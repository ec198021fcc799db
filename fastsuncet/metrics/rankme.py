"""RankMe: how many directions the representations use. It needs no labels (Garrido et al., 2023, arXiv 2210.02885)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fastsuncet.distributed.collectives import sum_over_ranks

EPSILON = 1e-7  # the paper's, for float32
CHUNK = 4096  # rows that are held in float64 at a time
# The keys of a "knn" line, and what they are the rank of.
RANKS = {"rankme": "embeddings z", "rankme_features": "features h"}
COLLAPSED = 2.0


def rankme(rows: Tensor, images: int) -> float:
    """Return the effective rank of N embeddings, from 1 (one direction) to min(N, D). Collective; no gradient.

        RankMe = exp(-sum_k p_k log p_k),    p_k = s_k / sum_l s_l + 1e-7

    with the min(N, D) singular values s_k of the N x D matrix, neither centered nor normalized (section 3 of the
    paper). `rows` (n, D) floating are this rank's of the `images` = N, each image on one rank; every rank returns the
    same number, NaN for rows that are not finite. Rows that are all zero have rank 1.

    The s_k are roots of the eigenvalues of rows^T rows, summed over ranks in float64: no rank needs all rows. That is
    exact to about 1e-8 of the largest s_k, a tenth of the paper's epsilon. It costs 2 N D^2 FLOPs: for D = 2,048, 0.1 %
    of a ResNet-50's forward pass at 224 pixels.
    """
    width = rows.shape[1]
    gram = rows.new_zeros(width, width, dtype=torch.float64)
    for part in rows.detach().split(CHUNK):
        gram.addmm_(part.double().T, part.double())
    gram = sum_over_ranks(gram)
    if not torch.isfinite(gram).all():
        return float("nan")
    # In ascending order. With fewer rows than columns the first ones are zero, and only rounding is in them.
    values = torch.linalg.eigvalsh(gram)[-min(images, width) :].clamp(min=0).sqrt()
    p = values / values.sum().clamp(min=torch.finfo(torch.float64).tiny) + EPSILON
    return torch.exp(-(p * p.log()).sum()).item()


def collapse_warning(record: Mapping[str, float]) -> str | None:
    """Return a warning if a "knn" line says that the representation has collapsed, else None.

    A complete collapse maps all images to one point (Jing et al., 2022, arXiv 2110.09348), a matrix of rank one. The
    rule is ours: RankMe below 2, the least that two directions in equal use have. A rank that is low, but above 2, is
    for the user to judge: the paper compares runs by it and has no threshold.
    """
    low = [
        f"{key} {record[key]:.3g} ({what})"
        for key, what in RANKS.items()
        if record.get(key, COLLAPSED) < COLLAPSED
    ]
    if not low:
        return None
    return (
        f"warning: the representation has collapsed: {', '.join(low)}, below {COLLAPSED:g}: almost all images have the "
        "same direction. Try a lower optimization.lr, a longer optimization.warmup or a higher criterion.temperature, "
        "and look at the views (`fastsuncet preview`)"
    )
