"""A run that was stopped and continued is the run that was not, to the last bit: weights, momentum, metrics, pixels."""

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.runs import assert_equal_to_the_bit, final_state, small_config, train

# Updates done when the run is stopped, in a run of ten at four an epoch; a stop is noticed in the step under way.
STOPS = {"after the first": 1, "mid-epoch": 2, "epoch end": 4, "epoch start": 5, "before the last": 9}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    config = small_config(tmp_path_factory.mktemp("undisturbed"))
    return train(config), final_state(config)


@pytest.mark.parametrize("updates", STOPS.values(), ids=STOPS.keys())
def test_a_run_stopped_by_a_signal_and_continued_ends_bit_identical(updates, undisturbed, tmp_path):
    config = small_config(tmp_path)
    seen = train(config, stop_at=updates - 1)
    assert sorted(seen) == list(range(updates)), "the signal did not stop the run at the end of its step"
    continued = train(config)
    assert min(continued) == updates, "the run did not continue where it stopped"
    batches, state = undisturbed
    assert seen | continued == batches
    assert_equal_to_the_bit(final_state(config), state)


def test_a_run_stopped_four_times_ends_bit_identical(undisturbed, tmp_path):
    config = small_config(tmp_path)
    for stop_at in (0, 3, 4, 8):
        train(config, stop_at=stop_at)
    train(config)
    assert_equal_to_the_bit(final_state(config), undisturbed[1])


def test_a_run_that_died_before_its_first_checkpoint_starts_over_and_ends_bit_identical(
    undisturbed, tmp_path
):
    config = small_config(tmp_path)

    def die(*_: object, **__: object) -> None:
        raise RuntimeError("the machine went away")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastsuncet.state.save", die)
        with pytest.raises(RuntimeError, match="went away"):
            train(config)
    assert min(train(config)) == 0
    assert_equal_to_the_bit(final_state(config), undisturbed[1])


def test_continuing_a_finished_run_reads_no_image_and_changes_nothing(undisturbed, tmp_path):
    config = small_config(tmp_path)
    train(config)
    before = final_state(config)
    assert train(config) == {}
    assert_equal_to_the_bit(final_state(config), before)


def test_other_threads_and_prefetch_of_the_loader_change_no_bit(undisturbed, tmp_path):
    config = small_config(tmp_path, "data.decode_threads=1", "data.prefetch=1")
    assert train(config) == undisturbed[0]
    assert_equal_to_the_bit(final_state(config), undisturbed[1])


def test_another_seed_sees_other_images_and_learns_other_weights(undisturbed, tmp_path):
    config = small_config(tmp_path, "meta.seed=1", "optimization.steps=5")
    assert not set(train(config).values()) & set(undisturbed[0].values())


def _stopped_on_one_rank(rank: int, world_size: int, folder: str) -> list:
    straight, stopped = small_config(Path(folder, "straight")), small_config(Path(folder, "stopped"))
    batches = train(straight)
    seen = train(stopped, stop_at=1, rank=1)  # only rank 1 gets the signal; rank 0 must save with it
    seen |= train(stopped, stop_at=5, rank=0)
    seen |= train(stopped)
    return [batches == seen, sorted(seen) == list(range(10))]


def test_two_ranks_stopped_by_a_signal_to_one_of_them_end_bit_identical(tmp_path):
    for same_batches, every_step in run_ranks(_stopped_on_one_rank, 2, str(tmp_path)):
        assert same_batches
        assert every_step
    straight, stopped = (final_state(small_config(tmp_path / name)) for name in ("straight", "stopped"))
    assert_equal_to_the_bit(stopped, straight)
