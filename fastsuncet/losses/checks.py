"""Checks of the losses' arguments. Each raises ValueError with a message that begins with the loss's name."""

import math
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


def check_matrix(loss: str, description: str, x: Tensor) -> None:
    """Require a floating matrix; `description` is for example "z must be (rows, width)"."""
    if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"{loss}: {description}, a tensor of a floating dtype, not {described(x)}")


def described(x: Any) -> str:
    """Return what a message says of an argument that must be a tensor."""
    return f"{tuple(x.shape)} of {x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__


def check_rows(
    loss: str, z: Tensor, temperature: float, keys: str, chunk_size: int | None, group: Group
) -> None:
    """Require rows `z` (N, D) and settings that can be contrasted, and equal shapes on all ranks."""
    check_matrix(loss, "z must be (rows, width)", z)
    check_temperature(loss, temperature)
    if keys not in KEYS:
        raise ValueError(f"{loss}: keys must be one of {KEYS}, not {keys!r}")
    if chunk_size is not None:
        check_count(loss, "chunk_size", chunk_size, 1, "None is the default")
    require_equal_shapes(loss, z, group)


def check_positive(loss: str, name: str, value: float, hint: str) -> None:
    """Require a plain finite number above 0."""
    if not isinstance(value, Real) or not 0 < value < math.inf:
        raise ValueError(f"{loss}: {name} must be a plain number above 0, not {value!r}; {hint}")


def check_count(loss: str, name: str, value: int, least: int, hint: str) -> None:
    """Require an integer of at least `least`."""
    if not isinstance(value, Integral) or value < least:
        raise ValueError(f"{loss}: {name} must be an integer of at least {least}, not {value!r}; {hint}")


def check_temperature(loss: str, temperature: float) -> None:
    """Require a plain finite number above 0."""
    check_positive(loss, "temperature", temperature, "the paper uses 0.1 for ImageNet and 0.5 for CIFAR-10")


def check_labels(loss: str, z: Tensor, labels: Tensor, average: str = "sample") -> None:
    """Require an integer label for each row of `z`, on its device."""
    if not isinstance(labels, Tensor) or labels.ndim != 1 or len(labels) != len(z):
        wanted = f"one integer per row, a tensor ({len(z)},)"
        raise ValueError(f"{loss}: labels must be {wanted}, not {described(labels)}")
    if labels.dtype not in _INTEGERS:
        raise ValueError(f"{loss}: labels must be integers, not {labels.dtype}; use .long() on class numbers")
    if labels.device != z.device:
        raise ValueError(f"{loss}: labels are on {labels.device}, the rows on {z.device}; use labels.to(...)")
    if average not in AVERAGES:
        raise ValueError(f"{loss}: average must be one of {AVERAGES}, not {average!r}")


def require_equal_shapes(loss: str, x: Tensor, group: Group) -> None:
    """Require the same shape on all ranks, and raise on every rank: a gather would hang or mix up rows."""
    question = (loss, group, tuple(x.shape))
    if world_size(group) == 1 or (x.is_cuda and question in _agreed):
        return
    what = f"{loss}: the shape of its input (every rank needs equally many images)"
    require_equal(tuple(x.shape), what, group)
    _agreed.add(question)
