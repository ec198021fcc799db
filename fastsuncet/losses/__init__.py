"""The losses, one file each; the contrastive ones share the chunked sweep of contrast.py. Works without DALI."""

from fastsuncet.losses.cross_entropy import cross_entropy
from fastsuncet.losses.nt_xent import nt_xent
from fastsuncet.losses.paws import paws
from fastsuncet.losses.suncet import suncet
from fastsuncet.losses.supcon import sup_con
from fastsuncet.losses.swav import normalize_prototypes_, prototype_scores, swav

__all__ = [
    "cross_entropy",
    "normalize_prototypes_",
    "nt_xent",
    "paws",
    "prototype_scores",
    "suncet",
    "sup_con",
    "swav",
]
