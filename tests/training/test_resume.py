"""A run that was stopped and continued is the run that was not, to the last bit: weights, momentum, metrics, pixels."""

import json
import os
import signal
from pathlib import Path

import pytest

from fastsuncet.commands import train as run
from fastsuncet.distributed.launch import join
from fastsuncet.errors import Preempted
from tests.support.ranks import run_ranks
from tests.support.runs import assert_equal_to_the_bit, final_state, small_config, train

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
        patch.setattr("fastsuncet.training.state.save", die)
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


def test_a_run_asked_to_stop_during_its_start_leaves_before_the_first_step(undisturbed, tmp_path):
    config = small_config(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        opened = run.open_images

        def opening(*arguments, **keywords):
            os.kill(os.getpid(), signal.SIGTERM)
            return opened(*arguments, **keywords)

        patch.setattr(run, "open_images", opening)
        with pytest.raises(Preempted, match="before the first step"), join("cpu") as place:
            run.train(config, place)
    assert json.loads((config.run_folder / "status.json").read_text())["state"] == "preempted"
    train(config)
    assert_equal_to_the_bit(final_state(config), undisturbed[1])


def test_a_stop_does_not_wait_for_an_evaluation_and_the_next_life_makes_up_for_it(tmp_path):
    evaluated = "evaluation.knn_every_epochs=1"  # after steps 4, 8 and 10
    straight, stopped = small_config(tmp_path / "a", evaluated), small_config(tmp_path / "b", evaluated)
    train(straight)
    train(stopped, stop_at=3)
    kinds = [
        json.loads(line)["kind"] for line in (stopped.run_folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert kinds == ["train"]
    train(stopped)
    assert_equal_to_the_bit(final_state(stopped), final_state(straight))


THREE = ("criterion.supervised_imgs_per_class=6",)  # shared by three


def _stopped_on_three(rank: int, world_size: int, folder: str) -> None:
    # From three ranks on a sum depends on its order, and DDP changes the order of its buckets in its first passes.
    train(small_config(Path(folder, "straight"), *THREE))
    stopped = small_config(Path(folder, "stopped"), *THREE)
    train(stopped, stop_at=4, rank=2)
    train(stopped)


def test_three_ranks_stopped_and_continued_end_bit_identical(tmp_path):
    run_ranks(_stopped_on_three, 3, str(tmp_path))
    straight, stopped = (
        final_state(small_config(tmp_path / name, *THREE)) for name in ("straight", "stopped")
    )
    assert_equal_to_the_bit(stopped, straight)


def _stopped_on_one_rank(rank: int, world_size: int, folder: str, shared: str) -> list:
    straight, stopped = (small_config(Path(folder, name), shared) for name in ("straight", "stopped"))
    batches = train(straight)
    seen = train(stopped, stop_at=1, rank=1)  # only rank 1 gets the signal; rank 0 must save with it
    seen |= train(stopped, stop_at=5, rank=0)
    seen |= train(stopped)
    return [batches == seen, sorted(seen) == list(range(10))]


STATISTICS = {
    "shared": "model.sync_batchnorm=true",
    "own": "model.sync_batchnorm=false",
}


@pytest.mark.parametrize("statistics", STATISTICS)
def test_two_ranks_stopped_by_a_signal_to_one_of_them_end_bit_identical(tmp_path, statistics):
    shared = STATISTICS[statistics]
    for same_batches, every_step in run_ranks(_stopped_on_one_rank, 2, str(tmp_path), shared):
        assert same_batches
        assert every_step
    straight, stopped = (
        final_state(small_config(tmp_path / name, shared)) for name in ("straight", "stopped")
    )
    assert_equal_to_the_bit(stopped, straight)
