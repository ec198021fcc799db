"""LARS, the groups of parameters it treats apart, and the learning-rate schedule."""

from fastsuncet.optim.lars import LARS
from fastsuncet.optim.lr_schedule import warmup_cosine
from fastsuncet.optim.param_groups import parameter_groups

__all__ = ["LARS", "parameter_groups", "warmup_cosine"]
