"""Count operators, host waits and memory at torch's dispatcher."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Each of these hands a value of the device to Python or sizes its result by one: on a GPU the host waits.
WAITS = {
    *("_local_scalar_dense", "is_nonzero", "item", "equal"),
    *("nonzero", "masked_select", "_unique2", "unique_dim"),
}


class Counter(TorchDispatchMode):
    """Counts what happens inside it, backward passes included.

    operators: calls that reach a kernel, views left out. A GPU launches at least as many kernels.
    waits: calls after which the host must wait for the device: those in WAITS, and boolean indexing.
    now, peak: bytes of the storages that were created inside and are alive, and their largest sum at any time.
    largest: elements of the largest storage that an operator returned.

    Kernels that are launched without the dispatcher, such as this project's own, are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.waits = self.now = self.peak = self.largest = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs, outputs = tensors((args, kwargs)), tensors(result)
        name, returns = func._schema.name.split("::")[1], func._schema.returns
        is_view = bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)
        if not is_view and name not in ("detach", "lift_fresh"):
            self.operators += 1
            masked = name.startswith("index") and any(x.dtype == torch.bool for x in inputs)
            self.waits += name in WAITS or masked
        known = {x.untyped_storage()._cdata for x in inputs}
        for x in outputs:
            self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
            self._track(x.untyped_storage(), known)
        return result

    def _track(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        identity, size = storage._cdata, storage.nbytes()
        if identity in known or identity in self._alive:
            return
        self._alive.add(identity)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, identity, size)

    def _release(self, identity: int, size: int) -> None:
        self._alive.discard(identity)
        self.now -= size


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return all tensors of nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
