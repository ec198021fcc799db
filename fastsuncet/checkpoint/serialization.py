"""What may go into a checkpoint: tensors and plain types, checked before a byte is written.

Everything is checked on the way in, because on the way out it is too late: `weights_only=True` refuses a
NumPy float or an enum only on the day the run has to be resumed.
"""

import math
from collections import OrderedDict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

PLAIN = (int, float, str, bool, type(None))


def model_tensors(model: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state_dict on the CPU, contiguous, each with a storage of its own; values bit for bit.

    safetensors knows no strides: channels-last weights are stored as plain (O, I, H, W), and loading them
    into a channels-last parameter copies the values into that layout. Raises TypeError for what is no dense
    tensor and ValueError, with the names, for tensors that overlap in memory: stored twice they would come
    back as two.
    """
    for name, tensor in model.items():
        dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type != "meta"
        if type(name) is not str or not dense:
            raise TypeError(f"model[{name!r}] is {_kind(tensor)}: a str name and a dense tensor are wanted")
    _refuse_shared(model)
    return {name: _own_copy(tensor).contiguous() for name, tensor in model.items()}


def _refuse_shared(model: dict[str, Tensor]) -> None:
    """ValueError if two tensors overlap. Slices side by side in one flat buffer do not."""
    spans = []
    for name, tensor in model.items():
        if tensor.numel() == 0:
            continue
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        start = tensor.data_ptr()
        spans.append((str(tensor.device), start, start + (reach + 1) * tensor.element_size(), name))
    spans.sort()
    for (device, _, end, name), (next_device, start, _, next_name) in pairwise(spans):
        if device == next_device and start < end:
            raise ValueError(
                f"model tensors {name!r} and {next_name!r} share memory: store one of them and tie them again "
                "after loading, or clone one"
            )


def _own_copy(tensor: Tensor) -> Tensor:
    """On the CPU, without gradient, strides kept; copied only where it is a window into a larger storage."""
    tensor = tensor.detach().cpu()
    # torch.save writes whole storages: one row of a big buffer would take the buffer along.
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone()
    return tensor


def plain_state(value: Any, where: str = "state") -> Any:
    """A copy of nested dicts, lists and tuples of tensors (on the CPU), int, float, str, bool and None.

    Tensors keep their strides, so a channels-last momentum comes back channels-last. Dict keys are str or
    int. Types are compared exactly: np.float64 *is* a float and IntEnum *is* an int to isinstance, and
    neither can be read with weights_only. Raises TypeError with the path of the first thing that is something
    else.
    """
    if isinstance(value, Tensor):
        return _own_copy(value)
    if type(value) in (dict, OrderedDict):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{where} has the key {key!r}, {_kind(key)}: str and int keys can be stored")
        return {key: plain_state(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain_state(item, f"{where}[{index}]") for index, item in enumerate(value))
    if type(value) in PLAIN:
        return value
    raise TypeError(
        f"{where} is {_kind(value)}: a checkpoint holds tensors, int, float, str, bool, None, and dicts, "
        "lists and tuples of them (NumPy values have .item(), enums .value)"
    )


def plain_json(value: Any, where: str = "meta") -> Any:
    """A copy of `value` that JSON gives back unchanged; tuples become lists.

    Raises TypeError or ValueError with the path of what would not come back.
    """
    if type(value) is dict:
        for key in value:
            if type(key) is not str:  # JSON would turn 1 into "1" and say nothing
                raise TypeError(f"{where} has the key {key!r}, {_kind(key)}: JSON has str keys")
        return {key: plain_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return [plain_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{where} is {value}: JSON has no such number, leave it out or write None")
    if type(value) in PLAIN:
        return value
    raise TypeError(
        f"{where} is {_kind(value)}: meta.json holds dicts, lists, str, int, float, bool and None"
    )


def num_bytes(value: Any) -> int:
    """Bytes of all tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(num_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(num_bytes(item) for item in value)
    return 0


def _kind(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")
