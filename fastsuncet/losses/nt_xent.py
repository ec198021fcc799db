"""NT-Xent, the loss of SimCLR: the two views of an image find each other among all views of all images.

B  images of this rank        W  ranks        D  width of a row
"""

import torch
from torch import Tensor

from fastsuncet.distributed.collectives import Group, world_size
from fastsuncet.losses import checks
from fastsuncet.losses.contrast import contrast


def nt_xent(
    z: Tensor,
    temperature: float,
    *,
    group: Group = None,
    keys: str = "attached",
    chunk_size: int | None = None,
) -> Tensor:
    """Compute equation 1 of the paper (arXiv 2006.10803), its mean over the 2B anchors of this rank.

        L_i = -log( exp(cos(z_i, z_pos(i)) / temperature)
                    / sum_{j != i} exp(cos(z_i, z_j) / temperature) )

    where pos(i) is the other view of the image of i, and j runs over the 2BW views of all ranks.

    Args:
        z: (2B, D) floating: the first views of B images, then their second views in the same order. Rows are
            normalized here, as those of `suncet`. All ranks pass the same shape. B = 0 gives 0.

    The other arguments, the returned share and the gradient are those of `suncet`. With keys the authors' first
    code (facebookresearch/suncet 5245e4a) does as for SuNCEt; their second (731547d) is detached at every W.

    Raises:
        ValueError: `z` is not (2B, D) floating, a setting is out of range, or the ranks' shapes differ.
    """
    checks.rows("nt_xent", z, temperature, keys, chunk_size, group)
    wanted = "z must hold the first views of B images, then their second views"
    checks.require("nt_xent", len(z) % 2 == 0, wanted, z)
    images = len(z) // 2
    # An image is a class of two: its number is the id of both its views, on the rank that has it.
    number = torch.arange(world_size(group) * images, device=z.device).view(-1, 1, max(images, 1))
    ids = number.expand(-1, 2, -1).reshape(-1)
    weights = torch.full((len(z),), 1 / max(len(z), 1), dtype=torch.float64, device=z.device)
    return contrast(z, ids, weights, temperature, group=group, keys=keys, chunk_size=chunk_size)
