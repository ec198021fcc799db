"""Ranks agree to stop at one step, without any rank waiting for another.

A signal reaches the ranks at different moments, or only one of them. Each rank says at every step whether it was
asked to stop; the answers travel while the step computes and are read at the next one. So all ranks learn of it at
the same step boundary, one step late, and a step costs no more than a few bytes on a CPU connection.
"""

import torch
import torch.distributed as dist

from fastsuncet.distributed.collectives import world_size


class StopConsensus:
    """`stop = consensus.agree(requested)` once a step on every rank: True on all of them from the same step on.

    The vote of step k is returned at step k + 1 (at step k itself in a single process). CPU tensors go over gloo,
    so on a GPU nothing here touches the device or its stream.
    """

    def __init__(self) -> None:
        self._flag: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def agree(self, requested: bool) -> bool:
        if world_size() == 1:
            return requested
        decided = self.close()
        self._flag = torch.tensor([int(requested or decided)], dtype=torch.int32)
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)
        return decided

    def close(self) -> bool:
        """Waits for the vote under way, so that none is left behind on the connection; returns its answer."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        return bool(self._flag.item())
