"""A communicator for BatchNorm alone: its small sums beside DDP's buckets instead of behind them.

One communicator runs one collective after another. In the backward pass a sum of BatchNorm's (kilobytes, and all the
rest waits for it) so comes after the bucket of gradients (25 MB) that was started just before. On one of its own it
passes by. docs/scaling.md says what that is worth by the model: at most the time of all buckets.

Why it is a setting (`model.batchnorm_communicator: own`) and not how things are:

- Two NCCL communicators at once can wait for each other for ever, if one rank's card starts their kernels in another
  order than another's and has no room for both. Since 2.26 NCCL can be told to start them in the order of the host's
  calls (NCCL_LAUNCH_ORDER_IMPLICIT=1, off by default), and promises that this ends it where that order is the same on
  all ranks. Here it is: forward sums come from the main thread, backward sums and buckets from autograd's one thread
  of the device, in the order of one and the same graph, and the main thread waits meanwhile; votes and file-system news
  travel by gloo. A captured step keeps the order it was captured in. So `order_launches` before the ranks join, and a
  refusal without it.
- It holds buffers of its own in the card's memory, and NCCL's ordering costs events around every collective.
- None of this has run on a card.
"""

import os

import torch
import torch.distributed as dist

from fastsuncet.distributed.collectives import Group
from fastsuncet.distributed.launch import TIMEOUT, Place
from fastsuncet.errors import ConfigError

ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
ORDERS_SINCE = (2, 26)  # NCCL
INSTEAD = "model.batchnorm_communicator=shared needs neither."


def order_launches() -> None:
    """Tells NCCL to start kernels of several communicators in the host's order. Before ranks join: it is read once."""
    os.environ.setdefault(ORDER, "1")


def batchnorm_group(place: Place) -> Group:
    """A group of all ranks beside the default one, with its time-out; None for a single rank. A collective.

    Once a run, where the network is built: `destroy_process_group()` takes it down with the default one. Raises
    ConfigError on CUDA where NCCL would not order the launches.
    """
    if place.world_size == 1:
        return None
    if place.device.type != "cuda":
        return dist.new_group(backend="gloo", timeout=TIMEOUT, group_desc="batchnorm")
    _require_order()
    return dist.new_group(backend="nccl", timeout=TIMEOUT, group_desc="batchnorm")


def _require_order() -> None:
    version = torch.cuda.nccl.version()
    if version < ORDERS_SINCE:
        raise ConfigError(
            f"model.batchnorm_communicator is own, but this is NCCL {'.'.join(map(str, version))}: two communicators "
            f"could wait for each other for ever before {'.'.join(map(str, ORDERS_SINCE))}, which can order their "
            f"launches ({ORDER}). {INSTEAD}"
        )
    found = os.environ.get(ORDER)
    if found != "1":
        raise ConfigError(
            f"model.batchnorm_communicator is own, but {ORDER} is {found!r} in the environment, not '1': two NCCL "
            f"communicators could wait for each other for ever. Set it before the ranks start. {INSTEAD}"
        )
