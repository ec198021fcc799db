"""What ranks say to each other: rows gathered, with and without gradient, sums, agreement on plain values.

Every function works without a process group, as the only rank. `group=None` means the default process group
when one is initialised, else this process alone. All but the first three are collectives: every rank of the
group calls them, in the same order, or all of them wait until the time-out.

    W  ranks in the group        N  rows on each rank, the same on every one
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Group = dist.ProcessGroup | None


def is_initialized() -> bool:
    """Whether this process is one of a group started by a launcher."""
    return dist.is_available() and dist.is_initialized()


def rank(group: Group = None) -> int:
    """This process's place in `group`, 0 without one."""
    return dist.get_rank(group) if is_initialized() else 0


def world_size(group: Group = None) -> int:
    """W, 1 without a process group."""
    return dist.get_world_size(group) if is_initialized() else 1


def all_gather_rows(x: Tensor, group: Group = None) -> Tensor:
    """(N, ...) on each rank -> (W N, ...) on every rank, in rank order. No gradient; at W = 1 `x` itself.

    All ranks must bring the same shape and dtype: NCCL does not check and gloo's complaint names neither, so
    callers with a size of their own ask `require_equal` first.
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
    """(W N, ...) on each rank -> (N, ...): this rank's rows, summed over ranks. No gradient.

    Addends meet in an order fixed by the world size, so the same inputs give the same bits again.
    """
    x = x.detach()
    ranks = world_size(group)
    if x.shape[0] % ranks:
        raise ValueError(f"reduce_scatter_rows: {x.shape[0]} rows cannot be shared equally by {ranks} ranks")
    if ranks == 1:
        return x
    rows = x.shape[0] // ranks
    if x.numel() == 0:
        return x.new_empty(rows, *x.shape[1:])
    if x.is_cuda and "cuda:nccl" in str(dist.get_backend_config(group)):
        own = x.new_empty(rows, *x.shape[1:])
        dist.reduce_scatter_tensor(own, x.contiguous(), group=group)
        return own
    # gloo learnt reduce-scatter late. The price is W times the bytes, on a path for CPUs.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    start = rank(group) * rows
    return total[start : start + rows].clone()


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
    """`all_gather_rows` that gradient flows through: (N, ...) -> (W N, ...).

    Backward sums over ranks what each rank's loss asks of this rank's rows. So after backward `x.grad` is the
    gradient of the SUM over ranks of their losses, and DDP's mean over ranks makes it that of their mean. The
    sum is a collective: every rank must run backward through its gather.
    """
    return x if world_size(group) == 1 else _GatherRows.apply(x, group)


def sum_over_ranks(x: Tensor, group: Group = None) -> Tensor:
    """The elementwise sum over ranks, a new tensor on every rank. No gradient, nothing read on the host."""
    return sum_over_ranks_(x.detach().clone(memory_format=torch.contiguous_format), group)


def sum_over_ranks_(x: Tensor, group: Group = None) -> Tensor:
    """`sum_over_ranks` written into `x`, which must be contiguous and is returned."""
    if world_size(group) > 1:
        dist.all_reduce(x, group=group)
    return x


def mean_over_ranks(x: Tensor, group: Group = None) -> Tensor:
    """The elementwise mean over ranks of a floating tensor, as a new tensor on every rank. No gradient."""
    return sum_over_ranks(x, group) / world_size(group)


def broadcast(x: Tensor, source: int = 0, group: Group = None) -> Tensor:
    """Overwrites `x` with that of rank `source` of `group` and returns it. Shapes and dtypes agree."""
    if world_size(group) > 1:
        dist.broadcast(x, group=group, group_src=source)
    return x


def gather_json(value: Any, group: Group = None) -> list[Any]:
    """Each rank's `value` (anything JSON can say) in rank order, on every rank. Waits for the device.

    JSON bytes, not torch's object collectives: those unpickle what another process sent.
    """
    if world_size(group) == 1:
        return [json.loads(json.dumps(value))]  # a copy, and the same complaint about what JSON cannot say
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = all_gather_rows(torch.tensor([len(text)], device=_device(group)), group).tolist()
    padded = torch.zeros(1, max(sizes), dtype=torch.uint8)
    padded[0, : len(text)] = text
    rows = all_gather_rows(padded.to(_device(group)), group).cpu()
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes)]


def broadcast_json(value: Any, source: int = 0, group: Group = None) -> Any:
    """Rank `source`'s `value` (anything JSON can say) on every rank; what the others pass is ignored."""
    return gather_json(value if rank(group) == source else None, group)[source]


def any_rank(flag: bool, group: Group = None) -> bool:
    """Whether `flag` is set on any rank: the same answer everywhere, so all act on it together. Waits."""
    if world_size(group) == 1:
        return bool(flag)
    vote = torch.tensor([int(flag)], dtype=torch.int32, device=_device(group))
    dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group)
    return bool(vote.item())


def require_equal(numbers: tuple[int, ...], what: str, group: Group = None) -> None:
    """Raises ValueError, on every rank and with each rank's numbers, unless all ranks bring the same. Waits.

    All ranks must bring equally many numbers, each of 64 bits.
    """
    if world_size(group) == 1:
        return
    rows = all_gather_rows(torch.tensor([numbers], dtype=torch.int64, device=_device(group)), group).tolist()
    if any(row != rows[0] for row in rows):
        told = ", ".join(f"rank {place}: {tuple(row)}" for place, row in enumerate(rows))
        raise ValueError(f"{what} must be the same on every rank, but is {told}")


def barrier(group: Group = None) -> None:
    """Returns once every rank has come here."""
    any_rank(False, group)  # dist.barrier on NCCL guesses a device and warns of it; this uses the ranks' own


def _device(group: Group) -> torch.device:
    """Where the group's small messages travel: NCCL alone carries none from the CPU."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
