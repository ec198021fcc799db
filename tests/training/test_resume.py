"""A run that was stopped and continued is the run that was not, to the bit: weights, momentum, metrics, pixels."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fastsuncet.checkpoint import manager
from fastsuncet.commands import train as train_command
from fastsuncet.commands.ranks import as_rank
from fastsuncet.errors import CheckpointError, Preempted
from fastsuncet.evaluation import features
from fastsuncet.metrics.writer import MetricsWriter
from fastsuncet.training import trainer
from fastsuncet.versions import versions
from tests.support.checkpoints import steps
from tests.support.power_cut import watch
from tests.support.ranks import run_ranks
from tests.support.runs import (
    Killed,
    assert_continues,
    assert_equal_to_the_bit,
    final_state,
    kill,
    metrics,
    terminate,
    tiny_config,
    train,
)

pytestmark = pytest.mark.slow
PARTS = ("straight", "stopped")
FIVE, SEVEN = "optimization.steps=5", "optimization.steps=7"
EVALUATED = (SEVEN, "evaluation.knn_every_epochs=1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the digests of the batches by step, and the final state, of a run of ten steps."""
    config = tiny_config(tmp_path_factory.mktemp("undisturbed"))
    return train(config), final_state(config)


def test_run_stopped_by_a_signal_continues_to_the_same_bits(undisturbed, tmp_path):
    """The loader's threads and prefetch can change meanwhile, and a run that has ended reads no image."""
    seen, begin = {}, 0
    # Of ten steps, four an epoch: the first, an epoch's last and first, one inside an epoch, the one before the last.
    for stop in (0, 3, 4, 6, 8):
        part = train(tiny_config(tmp_path, "checkpoint.keep=9"), stop_at=stop)
        assert sorted(part) == list(range(begin, stop + 1))  # a signal stops a run at the end of its step
        seen, begin = seen | part, stop + 1
    config = tiny_config(tmp_path, "checkpoint.keep=9", "data.decode_threads=1", "data.prefetch=1")
    part = train(config)
    assert min(part) == begin, "the run did not continue where it was stopped"
    batches, state = undisturbed
    assert seen | part == batches
    assert steps(config.run_folder / "checkpoints") == [3, 6, 9, 10]  # none of a stop
    assert train(config) == {}
    assert_equal_to_the_bit(final_state(config), state)


def test_run_of_torchs_optimizer_continues_to_the_same_bits(tmp_path):
    """In pieces of the batch. test_optimizers.py continues the state of each optimizer."""
    # Few and small, because a CPU is slow in fp16.
    options = ["optimization.optimizer=sgd", "meta.precision=fp16", "data.augmentation.size=8"]
    options += ["criterion.micro_batch=30", "optimization.lr=0.01", SEVEN]
    straight, stopped = (tiny_config(tmp_path / name, *options) for name in PARTS)
    assert_continues(straight, stopped, 0, 4)
    with pytest.raises(CheckpointError, match=r"optimization.optimizer: .* in the checkpoint, lars now"):
        train(tiny_config(tmp_path / "straight", *options[1:]))


def test_power_cut_leaves_every_line_up_to_the_newest_checkpoint(tmp_path):
    """A checkpoint promises the metrics lines up to its step: a continued run does not write them again."""
    config, disks, seen = tiny_config(tmp_path / "runs"), tmp_path / "disks", set()
    disks.mkdir()
    config.run_folder.mkdir(parents=True)

    def look(watched):
        for disk in watched.disks(disks) if watched.calls[-1] in ("rename", "replace") else ():
            loaded = manager.load_newest(disk / "checkpoints", say=pytest.fail)
            step = 0 if loaded is None else loaded.step
            seen.add(step)
            if promised := [line for line in (4, 8, 10) if line <= step]:
                rows = [row.split(",")[0] for row in (disk / "metrics.csv").read_text().splitlines()]
                assert [line["step"] for line in metrics(disk)][: len(promised)] == promised
                assert rows[1 : len(promised) + 1] == list(map(str, promised))
            shutil.rmtree(disk)

    with watch(config.run_folder, look):
        train(config)
    assert seen == {0, 3, 6, 9, 10}


def test_another_seed_sees_other_images(undisturbed, tmp_path):
    seen = train(tiny_config(tmp_path, "meta.seed=1", "optimization.steps=2", "optimization.warmup=0"))
    assert not set(seen.values()) & set(undisturbed[0].values())


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Return the final state of a run with an evaluation each epoch, after steps 4 and 7."""
    config = tiny_config(tmp_path_factory.mktemp("evaluated"), *EVALUATED)
    train(config)
    return final_state(config)


def test_stop_skips_an_evaluation_and_the_continued_run_does_it_first(evaluated, tmp_path):
    """Or none, where there are no evaluations now."""
    stopped = tiny_config(tmp_path / "stopped", *EVALUATED)
    train(stopped, stop_at=3)
    assert [line["kind"] for line in metrics(stopped.run_folder)] == ["train"]
    without = tiny_config(tmp_path / "without", SEVEN)
    shutil.copytree(stopped.run_folder, without.run_folder)
    train(stopped)
    assert_equal_to_the_bit(final_state(stopped), evaluated)
    train(without)
    assert steps(without.run_folder / "checkpoints")[-1:] == [7] and evaluations(without) == []


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


def stopped_in_an_evaluation(config, rank: int = 0, last: int = 0) -> list:
    """Stop by a signal to the rank `last` in the first of two evaluations, and continue."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == last:
            in_next_evaluation(patch, terminate)
        with pytest.raises(Preempted, match="saved after step 4"), as_rank(config) as place:
            train_command.train(config, place)
    row = [steps(config.run_folder / "checkpoints")[-1:], evaluations(config)]
    train(config)
    return [*row, evaluations(config)]


ROW = [[4], [], [4, 7]]


# No checkpoint is due with that evaluation; one is.
@pytest.mark.parametrize("every", [3, 4])
def test_signal_ends_an_evaluation_and_the_continued_run_does_it_first(every, evaluated, tmp_path):
    config = tiny_config(tmp_path, *EVALUATED, f"checkpoint.every={every}")
    assert stopped_in_an_evaluation(config) == ROW
    assert_equal_to_the_bit(final_state(config), evaluated)


def test_run_killed_after_the_line_of_an_evaluation_makes_it_again(evaluated, tmp_path, monkeypatch):
    """The checkpoint does not know that line. test_killed.py kills runs in evaluations too."""
    killed, write = tiny_config(tmp_path, *EVALUATED, "checkpoint.every=4"), MetricsWriter.write

    def written(writer, record, kind="train"):
        write(writer, record, kind)
        if kind == "knn":
            kill()
        return record

    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "write", written)
        with pytest.raises(Killed):
            train(killed)
    assert steps(killed.run_folder / "checkpoints") == [4]
    assert min(train(killed)) == 4
    assert_equal_to_the_bit(final_state(killed), evaluated)


# ------------------------------------------------------------------------------------------------- on several ranks
# On two ranks, with BatchNorm in each; an evaluation's run has it over ranks. On three, over three pieces of all.
EACH = "model.sync_batchnorm=false"
THREE = ("criterion.supervised_imgs_per_class=6", "criterion.micro_batch=48")  # shared by three
# Of a run of one process, and what two ranks are refused with.
PER_RANK = (
    "criterion.unsupervised_batch_size={per_rank: 18}",
    "criterion.supervised_imgs_per_class={per_rank: 2}",
)
SIZES = {
    "per_rank": (PER_RANK, r"unlabeled images an update: 18 .*, 36 now(?s:.*)updates an epoch: 8 .*, 4 now"),
    "share": (
        ("criterion.labeled_share=0.25", "criterion.supervised_epochs=1"),
        "labeled images of each class an update: 3 in the checkpoint, 2 now",
    ),
    "global": ((FIVE,), None),
}


def stopped_and_straight(folder: Path, words: tuple[str, ...], step: int, rank: int) -> bool:
    """Train straight, and with a signal to `rank` at `step`; return whether both saw the same batches."""
    straight, stopped = (tiny_config(folder / part, *words, FIVE) for part in PARTS)
    return train(straight) == train(stopped, stop_at=step, rank=rank) | train(stopped)


def on_two_ranks(rank: int, world_size: int, folder: Path) -> dict:
    same = stopped_and_straight(folder / "each", (EACH,), 1, 1)
    for name, (words, changed) in SIZES.items():
        if changed:
            said = rf"processes \(2 instead of 1\) this is another run(?s:.*){changed}"
            with pytest.raises(CheckpointError, match=said):
                train(tiny_config(folder / name, *words))
    train(tiny_config(folder / "of two", FIVE), stop_at=2)
    os.chdir(folder / f"own{rank}")
    with pytest.raises(CheckpointError, match=r"not started alike\. .*step_00000003/model\.safetensors"):
        train(tiny_config(Path("runs")))
    straight, stopped = (tiny_config(folder / "knn" / part, *EVALUATED) for part in PARTS)
    train(straight)
    return {
        "same": same,
        "evaluation": stopped_in_an_evaluation(stopped, rank, last=1),
        "of one": sorted(train(tiny_config(folder / "global", FIVE))),
    }


def on_three_ranks(rank: int, world_size: int, folder: Path) -> bool:
    """From three ranks on a sum depends on its order, and DDP changes the order of its buckets in its first passes."""
    return stopped_and_straight(folder, THREE, 2, 2)


def test_ranks_stopped_by_a_signal_to_one_of_them_end_bit_identical(tmp_path, capsys, monkeypatch):
    """And their run continues on another number of ranks, with a line on it, unless that changes a size.

    It is refused where each machine has a logging.folder of its own, with checkpoints of other runs.
    """
    for name, (words, _) in SIZES.items():
        train(tiny_config(tmp_path / name, *words), stop_at=2)
    for rank in range(2):
        train(tiny_config(tmp_path / f"own{rank}" / "runs", f"optimization.lr={rank + 1}"), stop_at=2)
    for found in run_ranks(on_two_ranks, 2, tmp_path):
        assert found == {"same": True, "evaluation": ROW, "of one": [3, 4]}
    assert run_ranks(on_three_ranks, 3, tmp_path / "three") == [True] * 3
    for name, words in (("each", (EACH, FIVE)), ("three", (*THREE, FIVE)), ("knn", EVALUATED)):
        straight, stopped = (final_state(tiny_config(tmp_path / name / part, *words)) for part in PARTS)
        assert_equal_to_the_bit(stopped, straight)
    for name, words, ranks, key in (
        ("each", (EACH,), 2, "sync_batchnorm"),
        ("three", THREE, 3, "micro_batch"),
    ):
        assert train(tiny_config(tmp_path / name / "stopped", *words, FIVE)) == {}
        said = capsys.readouterr().out
        assert re.search(rf"on 1 process instead of {ranks}: .*BatchNorm.*{key}.* of neither number", said)
    # Two ranks stop a step later than one.
    monkeypatch.setattr(trainer, "versions", lambda: {**versions(), "torch": "3.0"})
    assert sorted(train(tiny_config(tmp_path / "of two", FIVE))) == [4]
    said = capsys.readouterr().out
    assert re.search("on 1 process instead of 2: .* equal up to rounding", said)
    assert f"with torch 3.0 instead of {versions()['torch']}: results are equal up to rounding only" in said
