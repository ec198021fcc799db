"""Ranks exchange rows, gradients and plain values; one process without a group is the world of one."""

import pytest
import torch

from fastsuncet.distributed import collectives as distributed
from tests.support.ranks import run_ranks

WORLD = 3


def _rows(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.arange(6).reshape(2, 3) + 100 * rank).to(dtype)


def _say_everything(rank: int, world_size: int) -> dict:
    """One process group for all questions: starting ranks costs seconds, asking them costs nothing."""
    half_group = torch.distributed.new_group([1, 2])
    x = _rows(rank).requires_grad_()
    gathered = distributed.gather_rows(x, None)
    # A different weight for each rank's loss and for each gathered row, so that no mix-up can cancel.
    weights = (rank + 1) * torch.arange(1.0, 1 + gathered.numel(), dtype=torch.float64).view_as(gathered)
    (gathered * weights).sum().backward()
    transposed = _rows(rank).T.contiguous().T
    told = {
        "rank": distributed.rank(),
        "world_size": distributed.world_size(),
        "gathered": gathered.detach(),
        "gradient": x.grad,
        "dtypes": [
            distributed.all_gather_rows(_rows(rank, dtype))
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
        ],
        "strided": distributed.all_gather_rows(transposed),
        "empty": distributed.all_gather_rows(torch.empty(0, 4)),
        "empty_sum": distributed.reduce_scatter_rows(torch.empty(0, 4)),
        "own_sum": distributed.reduce_scatter_rows(torch.arange(6.0).reshape(6, 1) * (rank + 1)),
        "mean": distributed.mean_over_ranks(torch.tensor([float(rank), 1.0])),
        "sum": distributed.sum_over_ranks(torch.tensor([rank])),
        "from_2": distributed.broadcast(torch.full((2,), float(rank)), source=2),
        "any_none": distributed.any_rank(False),
        "any_last": distributed.any_rank(rank == world_size - 1),
        "all_said": distributed.gather_json({"rank": rank, "text": "é" * rank, "none": None}),
        "first_said": distributed.broadcast_json(f"by {rank}"),
        "second_said": distributed.broadcast_json([rank], source=1),
    }
    distributed.require_equal((7, 8), "the shape")
    try:
        distributed.require_equal((7, 8 + rank // 2), "the shape")
    except ValueError as error:
        told["disagreement"] = str(error)
    distributed.barrier()
    if rank > 0:
        told["in_half"] = [distributed.rank(half_group), distributed.world_size(half_group)]
        told["half"] = distributed.all_gather_rows(_rows(rank), half_group)
        told["half_first"] = distributed.broadcast_json(rank, group=half_group)
        told["half_own"] = distributed.reduce_scatter_rows(torch.tensor([10.0, 20.0]) * rank, half_group)
        told["half_from_1"] = distributed.broadcast(torch.tensor(rank), source=1, group=half_group)
    return told


@pytest.fixture(scope="module")
def told() -> list[dict]:
    return run_ranks(_say_everything, WORLD)


def test_ranks_know_their_place(told):
    assert [(each["rank"], each["world_size"]) for each in told] == [(r, WORLD) for r in range(WORLD)]


def test_rows_arrive_on_every_rank_in_rank_order(told):
    joined = torch.cat([_rows(r) for r in range(WORLD)])
    for each in told:
        assert torch.equal(each["gathered"], joined)
        assert torch.equal(each["strided"], joined)
        for rows in each["dtypes"]:
            assert torch.equal(rows, torch.cat([_rows(r, rows.dtype) for r in range(WORLD)]))


def test_gradient_of_gathered_rows_is_the_sum_of_what_every_rank_asks(told):
    asked = torch.arange(1.0, 1 + 6 * WORLD, dtype=torch.float64).view(WORLD, 2, 3) * sum(range(1, WORLD + 1))
    for r, each in enumerate(told):
        assert torch.equal(each["gradient"], asked[r])


def test_each_rank_gets_the_sum_of_its_own_rows(told):
    for r, each in enumerate(told):
        assert each["own_sum"].flatten().tolist() == [2 * r * 6, (2 * r + 1) * 6]


def test_nothing_to_send_is_not_an_error(told):
    for each in told:
        assert each["empty"].shape == (0, 4)
        assert each["empty_sum"].shape == (0, 4)


def test_sums_means_and_broadcasts_agree_on_every_rank(told):
    for each in told:
        assert each["mean"].tolist() == [1.0, 1.0]
        assert each["sum"].tolist() == [3]
        assert each["from_2"].tolist() == [2.0, 2.0]


def test_one_rank_that_asks_is_heard_by_all(told):
    assert [each["any_none"] for each in told] == [False] * WORLD
    assert [each["any_last"] for each in told] == [True] * WORLD


def test_plain_values_of_different_lengths_travel_as_text(told):
    for each in told:
        assert each["all_said"] == [{"rank": r, "text": "é" * r, "none": None} for r in range(WORLD)]
        assert each["first_said"] == "by 0"
        assert each["second_said"] == [1]


def test_disagreement_is_told_to_every_rank_with_every_ranks_numbers(told):
    for each in told:
        assert each["disagreement"] == (
            "the shape must be the same on every rank, but is rank 0: (7, 8), rank 1: (7, 8), rank 2: (7, 9)"
        )


def test_a_smaller_group_counts_its_own_ranks(told):
    for r, each in enumerate(told[1:]):
        assert each["in_half"] == [r, 2]
        assert torch.equal(each["half"], torch.cat([_rows(1), _rows(2)]))
        assert each["half_first"] == 1
        assert each["half_own"].tolist() == [[30.0], [60.0]][r]
        assert each["half_from_1"].item() == 2


def test_one_process_without_a_group_is_the_world_of_one():
    x = torch.ones(2, 3, requires_grad=True)
    assert (distributed.rank(), distributed.world_size(), distributed.is_initialized()) == (0, 1, False)
    assert torch.equal(distributed.all_gather_rows(x), x) and not distributed.all_gather_rows(x).requires_grad
    assert torch.equal(distributed.reduce_scatter_rows(x), x)
    assert torch.equal(distributed.mean_over_ranks(x), x)
    assert distributed.broadcast(torch.tensor(4)).item() == 4
    assert distributed.any_rank(True) and not distributed.any_rank(False)
    assert distributed.broadcast_json({"a": (1, 2)}) == {"a": [1, 2]}
    distributed.require_equal((1,), "one")
    distributed.barrier()
    (distributed.gather_rows(x) * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 3.0))


def test_sums_never_change_what_they_were_given():
    x = torch.ones(2)
    distributed.sum_over_ranks(x).add_(1)
    distributed.mean_over_ranks(x).add_(1)
    assert torch.equal(x, torch.ones(2))


def test_rows_that_cannot_be_shared_equally_are_refused(monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda group=None: 2)
    with pytest.raises(ValueError, match="3 rows cannot be shared equally by 2 ranks"):
        distributed.reduce_scatter_rows(torch.ones(3, 1))
