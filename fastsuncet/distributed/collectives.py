"""Communication between ranks: rows gathered with and without gradient, sums, agreement on plain values and on a stop.

Without a process group, and in `alone`, every function works as for a single rank; `group=None` is the default one.
All but `rank` and `world_size` are collectives: every rank must call them in the same order, or all of them wait until
the time-out.

    W  ranks in the group        N  rows on each rank, the same number on every rank
"""

import contextlib
import json
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Group = dist.ProcessGroup | None


_alone: ContextVar[bool] = ContextVar("alone", default=False)  # of a thread


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Be a single rank: a program with a process group of its own calls `embed` on one of its ranks, or on each."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def rank(group: Group = None) -> int:
    """Return this process's rank in `group`, 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() and not _alone.get() else 0


def world_size(group: Group = None) -> int:
    """Return W, 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() and not _alone.get() else 1


def all_gather_rows(x: Tensor, group: Group = None) -> Tensor:
    """Return the rows of all ranks in rank order: (N, ...) -> (W N, ...). No gradient; with W = 1 it is `x`, detached.

    All ranks must pass the same shape and dtype. NCCL does not check that and gloo's error names neither, so a caller
    whose sizes can differ calls `require_equal` first.
    """
    x = x.detach()
    ranks = world_size(group)
    if ranks == 1:
        return x
    joined = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    if x.numel() > 0:
        dist.all_gather_into_tensor(joined, x.contiguous(), group=group)
    return joined


def reduce_scatter_rows(x: Tensor, group: Group = None) -> Tensor:
    """Return this rank's rows, summed over ranks: (W N, ...) on each rank -> (N, ...). No gradient. W is above 1.

    The order of the sum depends only on the world size, so equal inputs give equal bits.
    """
    own = x.new_empty(x.shape[0] // world_size(group), *x.shape[1:])
    if x.numel() > 0:
        dist.reduce_scatter_tensor(own, x.contiguous(), group=group)
    return own


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather_rows(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return reduce_scatter_rows(gradient, ctx.group), None


def gather_rows(x: Tensor, group: Group = None) -> Tensor:
    """Do what `all_gather_rows` does, with a gradient: (N, ...) -> (W N, ...).

    Backward, a collective too, sums the gradients that all ranks have for this rank's rows. So `x.grad` is the gradient
    of the SUM of the ranks' losses, and DDP's mean over ranks makes it that of their mean.
    """
    return x if world_size(group) == 1 else _GatherRows.apply(x, group)


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the elementwise sum over ranks as a new tensor. No gradient; the host does not wait."""
    return sum_over_ranks_(x.detach().clone(memory_format=torch.contiguous_format))


def sum_over_ranks_(x: Tensor) -> Tensor:
    """Overwrite `x`, which must be contiguous, with its sum over ranks, and return it."""
    if world_size() > 1:
        dist.all_reduce(x)
    return x


def broadcast(x: Tensor) -> Tensor:
    """Overwrite `x` with rank 0's, of the same shape and dtype, and return it."""
    if world_size() > 1:
        dist.broadcast(x, 0)
    return x


def gather_json(value: Any) -> list[Any]:
    """Return each rank's `value`, which JSON must be able to hold, in rank order. Waits for the device.

    torch's object collectives are not used, because they unpickle what another process sent.
    """
    if world_size() == 1:
        return [json.loads(json.dumps(value))]  # a copy, and the same error for what JSON cannot hold
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = all_gather_rows(torch.tensor([len(text)], device=_device())).tolist()
    padded = torch.zeros(1, max(sizes), dtype=torch.uint8)
    padded[0, : len(text)] = text
    rows = all_gather_rows(padded.to(_device())).cpu()
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes)]


def broadcast_json(value: Any) -> Any:
    """Return rank 0's `value`, which JSON must be able to hold. What other ranks pass is ignored."""
    return gather_json(value if rank() == 0 else None)[0]


def any_rank(flag: bool) -> bool:
    """Return whether `flag` is set on any rank, so that all ranks act on it together. Waits for the device."""
    return any(gather_json(flag))


class StopConsensus:
    """Call `stop = consensus.agree(requested)` once a step on every rank: True on all ranks from the same step on.

    A signal reaches the ranks at different moments, or only one of them. So each rank says at every step whether it got
    one. The answers travel while the next step computes, over gloo, so that no rank and no device waits: the answer to
    step k comes at step k + 1, in a single process at once.
    """

    def __init__(self) -> None:
        self._flag = torch.zeros(1, dtype=torch.int32)  # whether a rank requested a stop, as of the last step
        self._work: dist.Work | None = None

    def agree(self, requested: bool) -> bool:
        """Return whether a rank requested a stop before this step, and send this rank's own request."""
        if world_size() == 1:
            return requested
        stop = self.close()
        self._flag.fill_(int(requested or stop))
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)
        return stop

    def close(self) -> bool:
        """Wait for the answers under way, so that none is left on the connection, and return what they say."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        return bool(self._flag.item())


def require_equal(numbers: tuple[int, ...], what: str, group: Group = None) -> None:
    """Raise ValueError, on every rank and with each rank's numbers, unless they are equal. Waits for the device."""
    if world_size(group) == 1:
        return
    rows = all_gather_rows(torch.tensor([numbers], dtype=torch.int64, device=_device(group)), group).tolist()
    if any(row != rows[0] for row in rows):
        listed = ", ".join(f"rank {number}: {tuple(row)}" for number, row in enumerate(rows))
        raise ValueError(f"{what} must be the same on every rank, but is {listed}")


def _device(group: Group = None) -> torch.device:
    """Return where small messages travel: NCCL alone cannot send from the CPU."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
