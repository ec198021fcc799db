"""Checks of the losses' arguments. Each raises ValueError with a message that begins with the loss's name."""

import math
import reprlib
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from fastsuncet.distributed.collectives import Group, require_equal, world_size

KEYS = ("attached", "detached")
AVERAGES = ("sample", "class")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# Shapes that all ranks are known to share. Comparing them waits for the device, so on a GPU each is compared once.
_agreed: set[tuple] = set()


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in the dtype that the losses compute in: float64 for float64, else float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def require(loss: str, holds: bool, wanted: str, found: Any) -> None:
    """Raise ValueError unless `holds`; `wanted` is for example "sharpen must be at most 1"."""
    if holds:
        return
    if isinstance(found, Tensor):
        raise ValueError(f"{loss}: {wanted}, not {tuple(found.shape)} of {found.dtype} on {found.device}")
    raise ValueError(f"{loss}: {wanted}, not {reprlib.repr(found)}")


def matrix(loss: str, wanted: str, x: Tensor) -> None:
    """Require a floating matrix; `wanted` is for example "z must be (rows, width)"."""
    fits = isinstance(x, Tensor) and x.ndim == 2 and x.is_floating_point()
    require(loss, fits, f"{wanted}, a tensor of a floating dtype", x)


def rows(loss: str, z: Tensor, temperature: float, keys: str, chunk_size: int | None, group: Group) -> None:
    """Require rows `z` (N, D) and settings that can be contrasted, and equal shapes on all ranks."""
    matrix(loss, "z must be (rows, width)", z)
    positive(loss, temperature=temperature)
    require(loss, keys in KEYS, f"keys must be one of {KEYS}", keys)
    if chunk_size is not None:
        count(loss, "chunk_size", chunk_size, 1)
    equal_shapes(loss, z, group)


def positive(loss: str, **settings: float) -> None:
    """Require plain finite numbers above 0."""
    for name, value in settings.items():
        usual = " (the paper's is 0.1 for ImageNet and 0.5 for CIFAR-10)" if name == "temperature" else ""
        fits = isinstance(value, Real) and 0 < value < math.inf
        require(loss, fits, f"{name}{usual} must be a plain number above 0", value)


def count(loss: str, name: str, value: int, least: int) -> None:
    """Require an integer of at least `least`."""
    fits = isinstance(value, Integral) and value >= least
    require(loss, fits, f"{name} must be an integer of at least {least}", value)


def labels(loss: str, z: Tensor, found: Tensor, average: str = "sample") -> None:
    """Require an integer label for each row of `z`, on its device."""
    fits = isinstance(found, Tensor) and found.ndim == 1 and len(found) == len(z)
    require(loss, fits, f"labels must be one integer per row, a tensor ({len(z)},)", found)
    require(loss, found.dtype in _INTEGERS, "labels must be integers, as .long() makes them", found)
    require(loss, found.device == z.device, f"labels must be on {z.device}, as the rows", found)
    require(loss, average in AVERAGES, f"average must be one of {AVERAGES}", average)


def equal_shapes(loss: str, x: Tensor, group: Group) -> None:
    """Require the same shape on all ranks, and raise on every rank: a gather would hang or mix up rows."""
    question = (loss, group, tuple(x.shape))
    if world_size(group) == 1 or (x.is_cuda and question in _agreed):
        return
    what = f"{loss}: the shape of its input (every rank needs equally many images)"
    require_equal(tuple(x.shape), what, group)
    _agreed.add(question)
