"""LARS, the groups of parameters it treats apart, and the learning-rate schedule."""

from fastsuncet.optim.groups import parameter_groups
from fastsuncet.optim.lars import LARS
from fastsuncet.optim.schedule import warmup_cosine

__all__ = ["LARS", "parameter_groups", "warmup_cosine"]
