"""A run that was stopped and continued is the run that was not, to the bit: weights, momentum, metrics, pixels."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fastsuncet.commands import train as train_command
from fastsuncet.distributed.launch import join
from fastsuncet.errors import CheckpointError, Preempted
from fastsuncet.evaluation import features
from fastsuncet.metrics.writer import MetricsWriter
from tests.support.ranks import run_ranks
from tests.support.runs import (
    Killed,
    assert_equal_to_the_bit,
    final_state,
    kill,
    metrics,
    small_config,
    terminate,
    train,
)

pytestmark = pytest.mark.slow


# Of ten steps, four an epoch: inside an epoch; after the first step, at an epoch's end and begin, before the last.
@pytest.mark.parametrize("stops", [(1,), (0, 3, 4, 8)])
def test_run_stopped_by_a_signal_continues_to_the_same_bits(stops, undisturbed, tmp_path):
    """The loader's threads and prefetch can change meanwhile."""
    seen, begin = {}, 0
    for stop in stops:
        part = train(small_config(tmp_path), stop_at=stop)
        assert sorted(part) == list(range(begin, stop + 1)), (
            "the signal did not stop the run at the end of its step"
        )
        seen, begin = seen | part, stop + 1
    config = small_config(tmp_path, "data.decode_threads=1", "data.prefetch=1")
    part = train(config)
    assert min(part) == begin, "the run did not continue where it was stopped"
    _, batches, state = undisturbed
    assert seen | part == batches
    assert_equal_to_the_bit(final_state(config), state)


def test_run_that_died_before_its_first_checkpoint_starts_over(undisturbed, tmp_path, monkeypatch):
    config = small_config(tmp_path)

    def die(*_: object, **__: object) -> None:
        raise RuntimeError("the machine went away")

    with monkeypatch.context() as patch:
        patch.setattr("fastsuncet.training.state.save", die)
        with pytest.raises(RuntimeError, match="went away"):
            train(config)
    assert min(train(config)) == 0
    assert_equal_to_the_bit(final_state(config), undisturbed[2])


def test_finished_run_reads_no_image_and_changes_nothing(undisturbed):
    config, _, state = undisturbed
    assert train(config) == {}
    assert_equal_to_the_bit(final_state(config), state)


def test_another_seed_sees_other_images(undisturbed, tmp_path):
    seen = train(small_config(tmp_path, "meta.seed=1", "optimization.steps=2", "optimization.warmup=0"))
    assert not set(seen.values()) & set(undisturbed[1].values())


def test_signal_during_the_start_stops_before_the_first_step(tmp_path, monkeypatch):
    config, opened = small_config(tmp_path), train_command.open_images

    def opening(*arguments, **keywords):
        terminate()
        return opened(*arguments, **keywords)

    monkeypatch.setattr(train_command, "open_images", opening)
    with pytest.raises(Preempted, match="before the first step"), join("cpu") as place:
        train_command.train(config, place)
    assert json.loads((config.run_folder / "status.json").read_text())["state"] == "preempted"
    assert not (config.run_folder / "checkpoints").exists()


def test_stop_skips_an_evaluation_and_the_continued_run_does_it_first(tmp_path):
    evaluated = "evaluation.knn_every_epochs=1"  # after steps 4, 8 and 10
    straight, stopped = small_config(tmp_path / "a", evaluated), small_config(tmp_path / "b", evaluated)
    train(straight)
    train(stopped, stop_at=3)
    assert [line["kind"] for line in metrics(stopped.run_folder)] == ["train"]
    train(stopped)
    assert_equal_to_the_bit(final_state(stopped), final_state(straight))


def in_next_evaluation(patch: pytest.MonkeyPatch, what: Callable[[], None]) -> None:
    """Call `what` when the next evaluation opens its images."""
    opened = features.open_evaluation_loader

    def opening(*arguments, **keywords):
        patch.setattr(features, "open_evaluation_loader", opened)
        what()
        return opened(*arguments, **keywords)

    patch.setattr(features, "open_evaluation_loader", opening)


def evaluations(config) -> list[int]:
    return [line["step"] for line in metrics(config.run_folder, "knn")]


# The evaluations are after steps 4, 8 and 10.
@pytest.mark.parametrize("every", [3, 4])  # no checkpoint is due with the first evaluation; one is
@pytest.mark.parametrize("world_size", [1, 2])
def test_signal_ends_an_evaluation_and_the_continued_run_does_it_first(every, world_size, tmp_path):
    rows = run_ranks(stopped_in_an_evaluation, world_size, str(tmp_path), every)
    assert rows == [[[4], [], [4, 8, 10]]] * world_size


def stopped_in_an_evaluation(rank: int, world_size: int, folder: str, every: int) -> list:
    overrides = ("evaluation.knn_every_epochs=1", f"checkpoint.every={every}")
    straight, stopped = (small_config(Path(folder, part), *overrides) for part in ("straight", "stopped"))
    train(straight)
    with pytest.MonkeyPatch.context() as patch:
        if rank == world_size - 1:  # only one rank gets the signal
            in_next_evaluation(patch, terminate)
        with pytest.raises(Preempted, match="saved after step 4"), join("cpu") as place:
            train_command.train(stopped, place)
    steps, before = saved_steps(stopped)[-1:], evaluations(stopped)
    train(stopped)
    if rank == 0:
        assert_equal_to_the_bit(final_state(stopped), final_state(straight))
    return [steps, before, evaluations(stopped)]


def saved_steps(config) -> list[int]:
    return sorted(int(path.name[-8:]) for path in (config.run_folder / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("when", ["during", "after"])
def test_run_killed_around_an_evaluation_keeps_the_step_before_it(when, tmp_path, monkeypatch):
    overrides = ("evaluation.knn_every_epochs=1", "checkpoint.every=4")
    straight, killed = (small_config(tmp_path / part, *overrides) for part in ("straight", "killed"))
    train(straight)
    write = MetricsWriter.write

    def written(writer, record, kind="train"):
        shown = write(writer, record, kind)
        if kind == "knn":
            kill()
        return shown

    with monkeypatch.context() as patch:
        if when == "during":
            in_next_evaluation(patch, kill)
        else:  # its line is there, and the checkpoint does not know it
            patch.setattr(MetricsWriter, "write", written)
        with pytest.raises(Killed):
            train(killed)
    assert saved_steps(killed) == [4]
    assert min(train(killed)) == 4
    assert_equal_to_the_bit(final_state(killed), final_state(straight))


PER_RANK = (
    "criterion.unsupervised_batch_size={per_rank: 180}",
    "criterion.supervised_imgs_per_class={per_rank: 2}",
)


def stop_on_a_rank(rank: int, world_size: int, folder: str, overrides: tuple[str, ...]) -> None:
    train(small_config(Path(folder), *overrides), stop_at=2)


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        (
            PER_RANK,
            ["unlabeled images an update: 360 in the checkpoint, 180 now", "updates an epoch: 4 .*, 8 now"],
        ),
        (
            ("criterion.labeled_share=0.25", "criterion.supervised_epochs=1"),
            ["labeled images of each class an update: 20 .*, 19 now"],
        ),
    ],
)
def test_other_world_size_that_changes_a_size_is_refused(overrides, changed, tmp_path):
    run_ranks(stop_on_a_rank, 2, str(tmp_path), overrides)
    with pytest.raises(CheckpointError, match=r"processes \(1 instead of 2\) this is another run") as error:
        train(small_config(tmp_path, *overrides))
    for line in changed:
        assert re.search(line, str(error.value))


def test_other_world_size_with_global_batch_sizes_continues(tmp_path):
    run_ranks(stop_on_a_rank, 2, str(tmp_path), ())
    assert sorted(train(small_config(tmp_path))) == list(range(4, 10))  # two ranks stop a step later than one


SEVEN = "optimization.steps=7"
STATISTICS = ("model.sync_batchnorm=true", "model.sync_batchnorm=false")
THREE = "criterion.supervised_imgs_per_class=6"  # shared by three


def stopped_on_one_of_two(rank: int, world_size: int, folder: str) -> list:
    """Only one rank gets each signal; both must stop and save."""
    right = []
    for name in STATISTICS:
        straight, stopped = (
            small_config(Path(folder, name, part), name, SEVEN) for part in ("straight", "stopped")
        )
        batches = train(straight)
        seen = train(stopped, stop_at=1, rank=1)
        seen |= train(stopped, stop_at=5, rank=0)
        seen |= train(stopped)
        right.append(batches == seen and sorted(seen) == list(range(7)))
    return right


def stopped_on_one_of_three(rank: int, world_size: int, folder: str) -> list:
    """From three ranks on a sum depends on its order, and DDP changes the order of its buckets in its first passes."""
    straight, stopped = (
        small_config(Path(folder, THREE, part), THREE, SEVEN) for part in ("straight", "stopped")
    )
    batches = train(straight)
    seen = train(stopped, stop_at=4, rank=2)
    return [seen | train(stopped) == batches]


@pytest.mark.parametrize(
    ("on_rank", "world_size", "names"),
    [(stopped_on_one_of_two, 2, STATISTICS), (stopped_on_one_of_three, 3, [THREE])],
    ids=["two", "three"],
)
def test_ranks_stopped_by_a_signal_to_one_of_them_end_bit_identical(tmp_path, on_rank, world_size, names):
    assert run_ranks(on_rank, world_size, str(tmp_path)) == [[True] * len(names)] * world_size
    for name in names:
        straight, stopped = (
            final_state(small_config(tmp_path / name / part, name, SEVEN)) for part in ("straight", "stopped")
        )
        assert_equal_to_the_bit(stopped, straight)
