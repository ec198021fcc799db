"""Ranks exchange rows, gradients and plain values, and agree on a stop: each rank compares what it gets."""

import numpy as np
import pytest
import torch

import fastsuncet
from fastsuncet.distributed import collectives
from fastsuncet.distributed.place import join
from fastsuncet.errors import ConfigError
from pipelines.sampling.augmentation import Center
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow


def rows_of(rank: int) -> torch.Tensor:
    return (torch.arange(6).reshape(2, 3) + 100 * rank).double()


def rows_arrive_in_rank_order(rank: int, world_size: int) -> None:
    assert (collectives.rank(), collectives.world_size()) == (rank, world_size)
    own, joined = rows_of(rank), torch.cat([rows_of(r) for r in range(world_size)])
    gathered = collectives.gather_rows(own.requires_grad_(), None)
    assert torch.equal(gathered, joined)
    # A different weight for each rank's loss and for each gathered row, so that no mix-up can cancel.
    weights = torch.arange(1.0, 1 + joined.numel(), dtype=torch.float64).view_as(joined)
    (gathered * (rank + 1) * weights).sum().backward()
    # The gradient of the gathered rows is the sum over ranks.
    assert torch.equal(own.grad, weights.split(2)[rank] * sum(range(1, world_size + 1)))

    own = own.detach()
    assert torch.equal(collectives.all_gather_rows(own.T.contiguous().T), joined)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        assert torch.equal(collectives.all_gather_rows(own.to(dtype)), joined.to(dtype))
    for collective in (collectives.all_gather_rows, collectives.reduce_scatter_rows):
        assert collective(torch.empty(0, 4)).shape == (0, 4)


def values_reach_every_rank(rank: int, world_size: int) -> None:
    own_sum = collectives.reduce_scatter_rows(torch.arange(6.0).reshape(6, 1) * (rank + 1))
    assert own_sum.flatten().tolist() == [2 * rank * 6, (2 * rank + 1) * 6]
    own = torch.tensor([rank])
    assert (collectives.sum_over_ranks(own).item(), own.item()) == (3, rank)  # a sum is a new tensor
    assert collectives.broadcast(torch.full((2,), rank + 5.0)).tolist() == [5.0, 5.0]
    assert not collectives.any_rank(False) and collectives.any_rank(rank == world_size - 1)
    values = [{"rank": r, "text": "é" * r, "none": None} for r in range(world_size)]
    assert collectives.gather_json(values[rank]) == values
    assert collectives.broadcast_json(f"by {rank}") == "by 0"
    collectives.require_equal((7, 8), "the shape")
    with pytest.raises(ValueError, match="the shape") as refused:
        collectives.require_equal((7, 8 + rank // 2), "the shape")
    numbers = "rank 0: (7, 8), rank 1: (7, 8), rank 2: (7, 9)"
    assert str(refused.value) == f"the shape must be the same on every rank, but is {numbers}"


def smaller_group_counts_its_own_ranks(rank: int, world_size: int) -> None:
    half = torch.distributed.new_group([1, 2])
    if rank > 0:
        assert (collectives.rank(half), collectives.world_size(half)) == (rank - 1, 2)
        joined = torch.cat([rows_of(1), rows_of(2)])
        assert torch.equal(collectives.all_gather_rows(rows_of(rank), half), joined)
        own_sum = collectives.reduce_scatter_rows(torch.tensor([10.0, 20.0]) * rank, half)
        assert own_sum.tolist() == [30.0 * rank]


def signal_to_one_rank_stops_all_at_the_same_step(rank: int, world_size: int) -> None:
    consensus = collectives.StopConsensus()
    stops = [consensus.agree(rank == 2 and step == 1) for step in range(5)]
    consensus.close()
    assert stops == [False, False, True, True, True]


def program_with_a_group_of_its_own_embeds_on_each_rank(rank: int, world_size: int) -> None:
    """Also on one alone, where any communication would wait for the others."""
    pixels = np.full((rank + 1, 4, 4, 3), 50 * rank, np.uint8)
    for _ in range(1 + (rank == 0)):
        _, rows = fastsuncet.embed(torch.nn.Flatten(), pixels, view=Center(4, 4))
        assert rows.shape == (rank + 1, 48) and np.allclose(rows, 50 * rank / 255, atol=1e-6)
    with collectives.alone():
        assert (collectives.rank(), collectives.world_size()) == (0, 1)
        assert collectives.gather_json(rank) == [collectives.broadcast_json(rank)] == [rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "1")
        patch.setenv("RANK", "0")
        with (
            pytest.raises(ConfigError, match="a process group of 3 ranks, and WORLD_SIZE says 1"),
            join("cpu"),
        ):
            pass


CHECKS = (rows_arrive_in_rank_order, values_reach_every_rank, smaller_group_counts_its_own_ranks)
CHECKS += (signal_to_one_rank_stops_all_at_the_same_step, program_with_a_group_of_its_own_embeds_on_each_rank)


@pytest.mark.parametrize("check", CHECKS)
def test_collectives_on_three_ranks(check):
    run_ranks(check, 3)
