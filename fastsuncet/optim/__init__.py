"""LARS, its parameter groups, and the learning-rate schedule."""

from fastsuncet.optim.lars import LARS
from fastsuncet.optim.lars_reference import LARSSettings
from fastsuncet.optim.lr_schedule import warmup_cosine
from fastsuncet.optim.param_groups import parameter_groups

__all__ = ["LARS", "LARSSettings", "parameter_groups", "warmup_cosine"]
