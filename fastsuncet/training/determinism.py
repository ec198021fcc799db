"""Switches of torch that make a step a function of its inputs, down to the bit."""

import os

import torch
from torch.utils import deterministic

from fastsuncet.config import Config
from fastsuncet.distributed import launch


def set_determinism(config: Config, place: launch.Place) -> None:
    """Make a step a function of its inputs, down to the bit, on one kind of machine.

    On a GPU that rules out cuDNN's search for the fastest algorithm, which can choose another one after a restart,
    unless `meta.deterministic` is off. It also rules out TF32, which would compute "fp32" in 10 bits. Torch warns where
    it has no deterministic kernel.
    """
    if config.meta.threads is not None:
        torch.set_num_threads(config.meta.threads)
    exact = config.meta.deterministic
    torch.backends.cudnn.benchmark = not exact
    torch.backends.cudnn.deterministic = exact
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False  # NVIDIA's images turn it on by an environment variable
    if place.device.type == "cuda":
        # cuBLAS reads it when it starts, so it must be set before the first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(exact, warn_only=True)
        # By default that also fills every new tensor with NaN before it is written: a pass over each activation.
        setattr(deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - the stubs do not know it
