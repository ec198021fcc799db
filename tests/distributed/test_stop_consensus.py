"""All ranks stop after the same step."""

import pytest

from fastsuncet.distributed.collectives import gather_json
from fastsuncet.distributed.stop_consensus import StopConsensus
from tests.support.ranks import run_ranks


def _answers(rank: int, world_size: int) -> list:
    consensus = StopConsensus()
    answers = [consensus.agree(rank == 2 and step == 1) for step in range(5)]
    consensus.close()
    return gather_json(answers)


@pytest.mark.slow
def test_stop_consensus_of_a_signal_to_one_rank_is_the_same_step_on_all():
    for answers in run_ranks(_answers, 3):
        assert answers == [[False, False, True, True, True]] * 3


def test_stop_consensus_of_a_single_process_answers_at_once():
    consensus = StopConsensus()
    assert [consensus.agree(False), consensus.agree(True)] == [False, True]
