"""What each row weighs as an anchor, and what a caller is told whose rows cannot be contrasted.

N  rows of this rank        W  ranks        M = W N  rows of all ranks, in rank order        D  width
"""

import math
from numbers import Real

import torch
from torch import Tensor

from fastsuncet.distributed.collectives import Group, require_equal, world_size

KEYS = ("attached", "detached")
AVERAGES = ("sample", "class")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# Shapes that all ranks are known to share. Asking waits for the device, so on a GPU each is asked once.
_agreed: set[tuple] = set()


def label_weights(labels: Tensor, average: str) -> Tensor:
    """`labels` (M,) int64 of all ranks -> what each row weighs (M,) float64 in the mean over anchors.

    Only a row with a positive, another row of its label, weighs anything. "sample": all such rows the same.
    "class": all classes that have such rows the same, each shared by its rows (Listing 2 of the paper). The
    weights sum to 1, or are all 0 where no row has a positive. No gradient.
    """
    # Sorting puts the rows of a class side by side. To list the classes instead would wait for the device,
    # which alone knows how many there are, and to compare every label with every other takes M x M.
    in_order = labels.sort().values
    count = torch.searchsorted(in_order, labels, right=True) - torch.searchsorted(in_order, labels)
    weight = (count > 1).double()
    if average == "class":
        weight = weight / count
    return weight / weight.sum().clamp(min=0.5)  # one class alone sums to 1; less is no anchor at all


def check_rows(
    loss: str, z: Tensor, temperature: float, keys: str, chunk_size: int | None, group: Group
) -> None:
    """Raises ValueError, in words that begin with `loss`, unless `z` (N, D) and the settings can be used."""
    if z.ndim != 2 or not z.is_floating_point():
        raise ValueError(f"{loss}: z must be (rows, width) of a floating dtype, not {_told(z)}")
    check_temperature(loss, temperature)
    if keys not in KEYS:
        raise ValueError(f"{loss}: keys must be one of {KEYS}, not {keys!r}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{loss}: chunk_size must be at least 1, or None for the default, not {chunk_size}")
    require_equal_shapes(loss, z, group)


def check_temperature(loss: str, temperature: float) -> None:
    """Raises ValueError, in words that begin with `loss`, unless `temperature` is a plain number above 0."""
    if not isinstance(temperature, Real) or not 0 < temperature < math.inf:
        raise ValueError(
            f"{loss}: temperature must be a plain number above 0, not {temperature!r}; "
            "the paper uses 0.1 for ImageNet and 0.5 for CIFAR-10"
        )


def check_labels(loss: str, z: Tensor, labels: Tensor) -> None:
    """Raises ValueError, in words that begin with `loss`, unless `labels` (N,) can label the rows of `z`."""
    if labels.ndim != 1 or len(labels) != len(z):
        raise ValueError(f"{loss}: labels must be one integer a row, ({len(z)},), not {_told(labels)}")
    if labels.dtype not in _INTEGERS:
        raise ValueError(f"{loss}: labels must be integers, not {labels.dtype}; use .long() on class numbers")
    if labels.device != z.device:
        raise ValueError(f"{loss}: labels are on {labels.device}, the rows on {z.device}; use labels.to(...)")


def check_average(loss: str, average: str) -> None:
    """Raises ValueError, in words that begin with `loss`, unless `average` names one."""
    if average not in AVERAGES:
        raise ValueError(f"{loss}: average must be one of {AVERAGES}, not {average!r}")


def require_equal_shapes(loss: str, z: Tensor, group: Group) -> None:
    """Raises ValueError on every rank unless all bring the same shape; a gather would hang or mix up rows."""
    question = (loss, group, tuple(z.shape))
    if world_size(group) == 1 or (z.is_cuda and question in _agreed):
        return
    require_equal(
        tuple(z.shape), f"{loss}: the shape of its input (every rank needs equally many images)", group
    )
    _agreed.add(question)


def _told(x: Tensor) -> str:
    return f"{tuple(x.shape)} of {x.dtype}"
