"""Ranks exchange rows, gradients and plain values, and agree on a stop."""

import pytest
import torch

from fastsuncet.distributed import collectives
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

WORLD = 3


def _rows(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.arange(6).reshape(2, 3) + 100 * rank).to(dtype)


def _call_everything(rank: int, world_size: int) -> dict:
    """Return the results of all collectives: starting ranks costs seconds, calling them costs nothing."""
    half = torch.distributed.new_group([1, 2])
    x = _rows(rank).requires_grad_()
    gathered = collectives.gather_rows(x, None)
    # A different weight for each rank's loss and for each gathered row, so that no mix-up can cancel.
    weights = (rank + 1) * torch.arange(1.0, 1 + gathered.numel(), dtype=torch.float64).view_as(gathered)
    (gathered * weights).sum().backward()
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
    result = {
        "place": (collectives.rank(), collectives.world_size()),
        "gathered": gathered.detach(),
        "gradient": x.grad,
        "dtypes": [collectives.all_gather_rows(_rows(rank, dtype)) for dtype in dtypes],
        "strided": collectives.all_gather_rows(_rows(rank).T.contiguous().T),
        "empty": collectives.all_gather_rows(torch.empty(0, 4)),
        "empty_sum": collectives.reduce_scatter_rows(torch.empty(0, 4)),
        "own_sum": collectives.reduce_scatter_rows(torch.arange(6.0).reshape(6, 1) * (rank + 1)),
        "sum": (own := torch.tensor([rank]), collectives.sum_over_ranks(own)),
        "of_rank_0": collectives.broadcast(torch.full((2,), rank + 5.0)),
        "any": [collectives.any_rank(False), collectives.any_rank(rank == world_size - 1)],
        "gathered_json": collectives.gather_json({"rank": rank, "text": "é" * rank, "none": None}),
        "broadcast_json": collectives.broadcast_json(f"by {rank}"),
    }
    collectives.require_equal((7, 8), "the shape")
    with pytest.raises(ValueError, match="the shape") as refused:
        collectives.require_equal((7, 8 + rank // 2), "the shape")
    result["disagreement"] = str(refused.value)
    if rank > 0:
        result["half_place"] = (collectives.rank(half), collectives.world_size(half))
        result["half"] = collectives.all_gather_rows(_rows(rank), half)
        result["half_sum"] = collectives.reduce_scatter_rows(torch.tensor([10.0, 20.0]) * rank, half)
    consensus = collectives.StopConsensus()
    result["stops"] = [consensus.agree(rank == 2 and step == 1) for step in range(5)]
    consensus.close()
    return result


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run_ranks(_call_everything, WORLD)


def test_rows_of_all_ranks_arrive_in_rank_order(results):
    joined = torch.cat([_rows(r) for r in range(WORLD)])
    for r, result in enumerate(results):
        assert result["place"] == (r, WORLD)
        assert torch.equal(result["gathered"], joined)
        assert torch.equal(result["strided"], joined)
        for rows in result["dtypes"]:
            assert torch.equal(rows, torch.cat([_rows(r, rows.dtype) for r in range(WORLD)]))
        assert result["empty"].shape == result["empty_sum"].shape == (0, 4)
    # The gradient of the gathered rows is the sum over ranks.
    numbers = torch.arange(1.0, 1 + 6 * WORLD, dtype=torch.float64)
    wanted = numbers.view(WORLD, 2, 3) * sum(range(1, WORLD + 1))
    for r, result in enumerate(results):
        assert torch.equal(result["gradient"], wanted[r])


def test_sums_broadcasts_and_disagreements_reach_every_rank(results):
    for r, result in enumerate(results):
        assert result["own_sum"].flatten().tolist() == [2 * r * 6, (2 * r + 1) * 6]
        assert [x.item() for x in result["sum"]] == [r, 3]  # a sum is a new tensor
        assert result["of_rank_0"].tolist() == [5.0, 5.0]
        assert result["any"] == [False, True]
    numbers = "rank 0: (7, 8), rank 1: (7, 8), rank 2: (7, 9)"
    for result in results:
        assert result["gathered_json"] == [{"rank": r, "text": "é" * r, "none": None} for r in range(WORLD)]
        assert result["broadcast_json"] == "by 0"
        assert result["disagreement"] == f"the shape must be the same on every rank, but is {numbers}"


def test_a_smaller_group_counts_its_own_ranks(results):
    for r, result in enumerate(results[1:]):
        assert result["half_place"] == (r, 2)
        assert torch.equal(result["half"], torch.cat([_rows(1), _rows(2)]))
        assert result["half_sum"].tolist() == [[30.0], [60.0]][r]


def test_stop_consensus_of_a_signal_to_one_rank_is_the_same_step_on_all(results):
    assert [result["stops"] for result in results] == [[False, False, True, True, True]] * WORLD
