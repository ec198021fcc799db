"""Switches of torch that make a step a function of its inputs, down to the bit."""

import os

import torch

from fastsuncet.config import Config
from fastsuncet.distributed import launch


def set_determinism(config: Config, place: launch.Place) -> None:
    """Makes a step a function of its inputs, down to the bit, on one kind of machine.

    On a GPU that rules out cuDNN's search for the fastest algorithm, which may choose another one in another life of
    the run, unless `meta.deterministic` is off; and TF32, which would make "fp32" 10-bit. Where torch has no
    deterministic kernel it warns.
    """
    if config.meta.threads is not None:
        torch.set_num_threads(config.meta.threads)
    exact = config.meta.deterministic
    torch.backends.cudnn.benchmark = not exact
    torch.backends.cudnn.deterministic = exact
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False  # NVIDIA's images turn it on by an environment variable
    if place.device.type == "cuda":
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # read when cuBLAS starts, so before a first product
        torch.use_deterministic_algorithms(exact, warn_only=True)
        # By default that also fills every new tensor with NaN before it is written: a pass over each activation.
        torch.utils.deterministic.fill_uninitialized_memory = False
