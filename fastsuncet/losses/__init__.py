"""The losses, one file each; the contrastive ones share the sweep of `contrast.py`. Works without DALI."""

from fastsuncet.losses.cross_entropy import cross_entropy
from fastsuncet.losses.nt_xent import nt_xent
from fastsuncet.losses.suncet import suncet
from fastsuncet.losses.sup_con import sup_con

__all__ = ["cross_entropy", "nt_xent", "suncet", "sup_con"]
