"""Prepare a network for training: compile it on request, and wrap it in DDP if there are several ranks."""

import inspect
import os
import shutil
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastsuncet.distributed.place import Place
from fastsuncet.errors import ConfigError
from pipelines import code_cache

# torch 2.15 renamed the option and warns of the old name; older ones do not know the new one.
_ddp_options = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
BUFFER_SYNC = "forward_sync_buffers" if "forward_sync_buffers" in _ddp_options else "broadcast_buffers"


def parallel(
    network: nn.Module,
    place: Place,
    *,
    compiled: bool,
    static_graph: bool,  # every pass uses the same parameters and exchanges gradients
    blank_pass: Callable[[nn.Module], Tensor],  # (network) -> a scalar computed from blank images
) -> nn.Module:
    """Return `network` or a wrapper around it, of the same parameters. Raises ConfigError if there is no compiler."""
    inner = network
    if compiled:
        require_compiler()
        # By default /tmp/torchinductor_NAME, which another user can make first and fill with code.
        if not os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(code_cache.private_folder("inductor"))
        # Static shapes: when the labeled stream ends, a run would otherwise recompile to other kernels than a run that
        # is resumed after that.
        network = cast(nn.Module, torch.compile(network, dynamic=False))
    if place.world_size > 1:
        # Synchronized statistics are equal on all ranks. Of each rank's own statistics, rank 0's are saved.
        options: dict[str, Any] = {BUFFER_SYNC: False}
        network = nn.parallel.DistributedDataParallel(
            network,
            device_ids=[place.device] if place.device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # saves a copy of every gradient
            static_graph=static_graph,
            **options,
        )
        # Its log of times waits for the device: in the first ten passes, and then in every 100th by default.
        network._set_ddp_runtime_logging_sample_rate(2**31 - 1)
        order_buckets(network, inner, blank_pass)
    return network


def require_compiler() -> None:
    """Raise ConfigError if there is no C++ compiler: torch would report that in the first step, in a long traceback."""
    found = [shutil.which(name) for name in ("gcc", "g++", "clang", "clang++")]
    if not any([*found, os.environ.get("CC"), os.environ.get("CXX")]):
        raise ConfigError(
            "meta.compile is true, and torch.compile needs a C++ compiler: none of gcc, g++, clang is found. Install "
            "one (of container images, python:3.12 has it and python:3.12-slim has not), or set meta.compile=false"
        )


def order_buckets(network: nn.Module, inner: nn.Module, blank_pass: Callable[[nn.Module], Tensor]) -> None:
    """Run DDP's first passes on blank images, so that gradients are summed in one order before and after a restart.

    During its first passes DDP regroups its buckets by the order in which gradients arrive, and a ring of three or more
    ranks sums each element in an order that depends on its place in a bucket. Changes no weight and no statistic.
    """
    before = {name: buffer.clone() for name, buffer in inner.named_buffers()}
    for _ in range(3):  # a static graph regroups in its third pass
        blank_pass(network).backward()
        network.zero_grad(set_to_none=True)
    for name, buffer in inner.named_buffers():
        buffer.copy_(before[name])
