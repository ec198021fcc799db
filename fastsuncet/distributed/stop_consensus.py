"""Make all ranks stop after the same step, without any rank waiting for another.

A signal reaches the ranks at different moments, or only one of them. So each rank states at every step whether it got
one. The answers travel while the next step computes and are read after it. So all ranks learn of a signal at the end
of the same step, one step late, and a step costs no more than a few bytes on a CPU connection.
"""

import torch
import torch.distributed as dist

from fastsuncet.distributed.collectives import world_size


class StopConsensus:
    """Call `stop = consensus.agree(requested)` once a step on every rank: True on all ranks from the same step on.

    The answer to step k comes at step k + 1; in a single process it comes at once. The CPU tensors go over gloo, so on
    a GPU nothing here touches the device or its stream.
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
