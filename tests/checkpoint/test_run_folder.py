"""What rank 0 does for all ranks."""

import pytest
import torch

from fastsuncet.checkpoint.run_folder import ERRORS, on_rank_0
from fastsuncet.distributed.launch import Place
from tests.support.ranks import run_ranks


def raised_on_rank(rank: int, world_size: int) -> list[list]:
    """Return the exit code and the text of each error of rank 0, as this rank raises it."""
    found, place = [], Place(rank, world_size, rank, torch.device("cpu"))
    for error in [kind("why") for kind in ERRORS.values()]:

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            on_rank_0(place, fail)
        found.append([caught.value.exit_code, str(caught.value)])
    return [*found, on_rank_0(place, lambda: ["rank", rank])]


@pytest.mark.slow
def test_on_rank_0_raises_its_errors_with_their_exit_code_on_every_rank():
    assert run_ranks(raised_on_rank, 2) == [[*([code, "why"] for code in (2, 3, 4, 5)), ["rank", 0]]] * 2
