"""LARS, torch's AdamW and SGD, their parameter groups, and the learning-rate schedule."""

from fastsuncet.optim.device_lr import SGD, AdamW, DeviceLR
from fastsuncet.optim.lars import LARS, parameter_groups
from fastsuncet.optim.lars_foreach import LARSSettings
from fastsuncet.optim.lr_schedule import warmup_cosine

__all__ = ["LARS", "SGD", "AdamW", "DeviceLR", "LARSSettings", "parameter_groups", "warmup_cosine"]
