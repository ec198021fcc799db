"""What a checkpoint stores: tensors on the CPU, and nests of plain types that `weights_only=True` can read back."""

from typing import Any

from torch import Tensor

PLAIN = (int, float, str, bool, type(None))


def cpu_copy(tensor: Tensor) -> Tensor:
    """Return `tensor` on the CPU, without gradient, with the same values and strides.

    A tensor on the CPU is copied only if it is a view into more memory than its own: torch.save writes whole storages,
    so one row of a large buffer would take the buffer along.
    """
    tensor = tensor.detach().cpu()
    own = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if own else tensor.clone()


def plain_state(value: Any, where: str = "state") -> Any:
    """Return a copy of nested dicts, lists and tuples of plain types, with every tensor on the CPU.

    Raises TypeError, with the path of the item, for a value that `weights_only=True` would refuse when the run resumes.
    Tensors keep their strides, so a channels-last momentum comes back channels-last.
    """
    if isinstance(value, Tensor):
        return cpu_copy(value)
    if isinstance(value, dict):
        items = {key: plain_state(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {plain_state(key, f"the key {key!r} of {where}"): item for key, item in items.items()}
    if isinstance(value, (list, tuple)):
        items = [plain_state(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    # Exact types: np.float64 is a float and an IntEnum is an int to isinstance, but weights_only refuses both.
    if type(value) not in PLAIN:
        raise TypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds tensors, int, "
            "float, str, bool, None, and dicts, lists and tuples of them (NumPy values have .item(), enums .value)"
        )
    return value
