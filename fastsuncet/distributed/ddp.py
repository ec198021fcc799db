"""A network as it trains: compiled where that is asked for, in DDP where there are several ranks, and settled."""

import inspect
import os
import shutil
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastsuncet.distributed.launch import Place
from fastsuncet.errors import ConfigError

# torch 2.15 renamed the switch and warns of the old name, 2.11 does not know the new one.
_ddp = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
BUFFER_SYNC = "forward_sync_buffers" if "forward_sync_buffers" in _ddp else "broadcast_buffers"


def parallel(
    network: nn.Module,
    place: Place,
    *,
    compiled: bool,
    static_graph: bool,  # every pass uses the same parameters and exchanges gradients
    blank: Callable[[nn.Module], Tensor],  # (network) -> a scalar of a pass over blank images
) -> nn.Module:
    """`network`, or what runs it on this rank. Parameters and buffers stay the same objects and keep their values.

    Raises ConfigError where it is to be compiled and there is no compiler.
    """
    inner = network
    if compiled:
        require_compiler()
        # Static shapes: at the switch-off a run would otherwise recompile to other kernels than one resumed after it.
        network = torch.compile(network, dynamic=False)
    if place.world_size > 1:
        network = nn.parallel.DistributedDataParallel(
            network,
            device_ids=[place.device] if place.device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # saves a copy of every gradient
            static_graph=static_graph,
            # Synchronised statistics are equal on all ranks; of those that are each rank's own, rank 0's are saved.
            **{BUFFER_SYNC: False},
        )
        settle(network, inner, blank)
    return network


def require_compiler() -> None:
    """Raises ConfigError where there is none: torch would say so in the first step, in a page of its own code."""
    there = [shutil.which(name) for name in ("gcc", "g++", "clang", "clang++")]
    if not any([*there, os.environ.get("CC"), os.environ.get("CXX")]):
        raise ConfigError(
            "meta.compile is true, and torch.compile needs a C++ compiler: none of gcc, g++, clang is found. Install "
            "one (of container images, python:3.12 has it and python:3.12-slim has not), or set meta.compile=false"
        )


def settle(network: nn.Module, inner: nn.Module, blank: Callable[[nn.Module], Tensor]) -> None:
    """Runs DDP's first passes on blank images, so that every life of a run reduces gradients in the same order.

    DDP regroups its buckets once it has seen in which order gradients arrive, during its first passes. A ring reduces
    each element in an order that depends on its place in a bucket, so with three ranks or more the first steps after a
    restart would round otherwise than the same steps of a run nobody stopped. Changes no weight and no statistic.
    """
    before = {name: buffer.clone() for name, buffer in inner.named_buffers()}
    for _ in range(3):  # a static graph regroups in its third pass
        blank(network).backward()
        network.zero_grad(set_to_none=True)
    for name, buffer in inner.named_buffers():
        buffer.copy_(before[name])
