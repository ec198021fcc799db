"""The loop on real data: what it refuses, what it says, and that ranks share one experiment."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastsuncet import losses
from fastsuncet.checkpoint.run_folder import exclusive_run_folder
from fastsuncet.commands import train as run
from fastsuncet.config import load_config
from fastsuncet.data.dataset import open_images
from fastsuncet.distributed.launch import join
from fastsuncet.errors import CheckpointError, NumericalError
from fastsuncet.training import step
from fastsuncet.training.trainer import Trainer
from pipelines.data_errors import BadImage
from tests.support.pictures import write_pictures
from tests.support.ranks import run_ranks
from tests.support.runs import CONFIGS, assert_equal_to_the_bit, final_state, small_config, train


def lines(config, kind: str) -> list[dict]:
    records = map(json.loads, (config.run_folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == kind]


def test_losses_fall_and_neighbours_agree_more_after_forty_updates_on_digits(tmp_path):
    config = small_config(
        tmp_path,
        "optimization.steps=40",
        "evaluation.knn_every_epochs=10",
        "criterion.unsupervised_batch_size=96",
    )
    train(config)
    first, *_, last = lines(config, "train")
    assert last["nt_xent"] < first["nt_xent"] - 0.3
    assert last["suncet"] < first["suncet"] - 0.3
    assert lines(config, "knn")[-1]["knn_accuracy"] > 0.6  # chance is 0.1


def test_the_ledger_counts_views_updates_and_petaflops_of_the_whole_run(tmp_path):
    config = small_config(tmp_path, "criterion.supervised_epochs=1")
    train(config, stop_at=5)
    train(config)
    last = lines(config, "train")[-1]
    views = 10 * 2 * 360 + 4 * 40  # SuNCEt is on for the four steps of the first epoch
    assert (last["updates"], last["images"]) == (10, views)
    with join("cpu") as place:
        model = step.build(config, place, 10)[0].eval()
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 16, 16))
    macs = counter.get_total_flops() / 2
    assert last["petaflops"] == pytest.approx(6 * macs * views / 1e15, rel=1e-9)


def test_suncet_is_zero_from_its_switch_off_on_and_the_update_gets_smaller(tmp_path):
    config = small_config(tmp_path, "criterion.supervised_epochs=1", "logging.log_every=1")
    train(config)
    records = lines(config, "train")
    assert all(record["suncet"] > 0 for record in records[:4])
    assert all(record["suncet"] == 0 for record in records[4:])
    assert records[4]["images"] - records[3]["images"] == 720


def test_fused_batchnorm_is_the_same_training_where_there_is_no_card(tmp_path):
    plain = small_config(tmp_path / "plain")
    fused = small_config(tmp_path / "fused", "model.fused_batchnorm=true")
    train(plain)
    train(fused)
    (ours, _, lines_1), (theirs, _, lines_2) = final_state(fused), final_state(plain)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5, msg=key)
    assert lines_1[-1]["loss"] == pytest.approx(lines_2[-1]["loss"], rel=1e-5)


PLATEAU = (
    "criterion.supervised_epochs=plateau",
    "criterion.plateau_epochs=1",
    "criterion.plateau_gain=0.5",  # a loss that does not halve from one epoch to the next has plateaued
    "optimization.steps=14",  # three epochs and a half
)


def test_supervision_ends_by_itself_once_its_loss_has_plateaued_and_the_ledger_knows(tmp_path):
    config = small_config(tmp_path, *PLATEAU, "logging.log_every=1")
    train(config)
    records = lines(config, "train")
    on = [record["suncet"] > 0 for record in records]
    assert (
        on == [True] * 8 + [False] * 6
    )  # two epochs of four updates are compared, and the second was too little
    cost = [b["images"] - a["images"] for a, b in pairwise([{"images": 0}, *records])]
    assert cost == [760] * 8 + [720] * 6


@pytest.mark.parametrize("stop_at", [2, 7, 8, 11])  # within an epoch, at its end, after the switch-off
def test_a_run_that_waits_for_a_plateau_ends_it_at_the_same_step_however_often_it_is_stopped(
    tmp_path, stop_at
):
    whole, parts = small_config(tmp_path / "a", *PLATEAU), small_config(tmp_path / "b", *PLATEAU)
    train(whole)
    train(parts, stop_at=stop_at)
    train(parts)
    assert_equal_to_the_bit(final_state(parts), final_state(whole))


def test_a_loss_that_is_not_a_number_stops_the_run_with_step_term_and_files_and_saves_nothing(tmp_path):
    config = small_config(tmp_path, "checkpoint.every=2", "logging.log_every=100")
    poison = losses.suncet

    def poisoned(z, labels, *arguments, **keywords):
        poisoned.calls += 1
        loss = poison(z, labels, *arguments, **keywords)
        return loss * float("nan") if poisoned.calls == 6 else loss  # the sixth update, step 5

    poisoned.calls = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "suncet", poisoned)
        with pytest.raises(
            NumericalError, match=r"suncet is not a finite number at step 5 on rank 0"
        ) as error:
            train(config)
    with join("cpu") as place:
        images = open_images(config, place, validation=False)
    named = [line.strip() for line in str(error.value).splitlines() if line.startswith("  digits/")]
    labeled = {images.train.name(int(i)) for i in images.split.indices}
    assert named and set(named) <= labeled
    weights, _, _ = final_state(config)
    assert all(torch.isfinite(w).all() for w in weights.values() if w.is_floating_point())
    assert sorted(p.name for p in (config.run_folder / "checkpoints").glob("step_*")) == [
        "step_00000002",
        "step_00000004",
    ]
    assert json.loads((config.run_folder / "status.json").read_text())["state"] == "failed"


def test_a_loss_that_is_no_number_on_several_ranks_is_blamed_on_none_and_names_images_of_each():
    class Stream:
        def files(self, step, rank, role):
            return [f"{role}/{rank}-{step}-{i}" for i in range(12)]

    class Run:
        terms, stream, roles = ("nt_xent", "suncet"), Stream(), ("unlabeled", "labeled")

    Run.task = Run
    first_bad = torch.tensor([[-1.0, 7.0], [-1.0, 9.0], [-1.0, 7.0]])
    with pytest.raises(NumericalError) as error:
        Trainer.require_finite(Run(), first_bad)
    told = str(error.value)
    assert "suncet is not a finite number at step 7 on ranks 0, 2, any of which can be its origin" in told
    assert "The 24 images of that loss:\n  labeled/0-7-0\n  labeled/2-7-0\n  labeled/0-7-1" in told
    assert told.endswith("\n  labeled/2-7-9\n  and 4 more")
    Trainer.require_finite(Run(), torch.full((3, 2), -1.0))  # all is well


def folder_config(root: Path, runs: Path, *overrides: str):
    """A run on image files: two classes of JPEGs, all labeled, through DALI's decoder."""
    return load_config(
        CONFIGS / "digits_demo.yaml",
        [
            *("data.kind=image_folder", f"data.root={root}", "data.validation=null", "data.split.kind=all"),
            *("data.split.fraction=null", "evaluation.knn_every_epochs=null", f"logging.folder={runs}"),
            *(
                "criterion.unsupervised_batch_size=8",
                "criterion.classes_per_batch=2",
                "data.augmentation.blur=0.5",
            ),
            *("criterion.supervised_imgs_per_class=2", "optimization.steps=4", "optimization.warmup=0"),
            *(
                "meta.threads=1",
                "checkpoint.every=2",
                "logging.log_every=1",
                "data.augmentation.strength=1.0",
            ),
            *overrides,
        ],
    )


def test_a_truncated_image_ends_the_run_with_its_name_and_nothing_of_that_step_saved(tmp_path):
    write_pictures(tmp_path / "data" / "train", count=16, classes=2)
    victim = next((tmp_path / "data" / "train").rglob("*.jpg"))
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    config = folder_config(tmp_path / "data", tmp_path / "runs")
    with pytest.raises(BadImage, match=victim.name):
        train(config)


def test_a_truncated_image_is_replaced_and_counted_where_the_config_allows_one(tmp_path):
    write_pictures(tmp_path / "data" / "train", count=16, classes=2)
    victim = next((tmp_path / "data" / "train").rglob("*.jpg"))
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    config = folder_config(tmp_path / "data", tmp_path / "runs", "data.bad_images=1")
    train(config)
    assert lines(config, "train")[-1]["replaced_images"] >= 1


def test_a_changed_config_is_refused_by_naming_the_keys(tmp_path):
    train(small_config(tmp_path, "optimization.steps=5"))
    with pytest.raises(CheckpointError) as error:
        train(
            small_config(tmp_path, "optimization.steps=5", "optimization.lr=0.5", "criterion.temperature=0.3")
        )
    assert "optimization.lr: 1.0 in the checkpoint, 0.5 now" in str(error.value)
    assert "criterion.temperature: 0.2 in the checkpoint, 0.3 now" in str(error.value)


def test_a_refused_run_leaves_the_record_of_the_one_it_was_refused_for(tmp_path):
    config = small_config(tmp_path, "optimization.steps=5")
    train(config)
    before = {path: path.read_bytes() for path in config.run_folder.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="differs from the one"):
        train(small_config(tmp_path, "optimization.steps=5", "optimization.lr=0.5"))
    assert {path: path.read_bytes() for path in config.run_folder.rglob("*") if path.is_file()} == before


def test_a_second_process_in_the_folder_of_a_running_one_is_refused(tmp_path):
    config = small_config(tmp_path)
    refused = pytest.raises(CheckpointError, match="another process is running")
    with join("cpu") as place, exclusive_run_folder(config.run_folder, place), refused:
        train(config)


def test_a_folder_that_cannot_be_written_is_said_in_one_line():
    with pytest.raises(CheckpointError, match="/proc/nope/run cannot be written"):
        train(small_config(Path("/proc/nope"), "logging.write_tag=run"))


def test_a_gradient_that_overflowed_under_a_finite_loss_is_never_saved(tmp_path):
    config = small_config(tmp_path, "checkpoint.every=2", "logging.log_every=100")
    update = step.LARS.step

    def overflowing(optimizer, closure=None):
        overflowing.calls += 1
        if overflowing.calls == 4:
            optimizer.param_groups[0]["params"][-1].grad.fill_(float("inf"))
        return update(optimizer, closure)

    overflowing.calls = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step.LARS, "step", overflowing)
        with pytest.raises(NumericalError, match="a weight is not a finite number after step 4"):
            train(config)
    assert [p.name for p in (config.run_folder / "checkpoints").glob("step_*")] == ["step_00000002"]


def test_other_labels_are_refused_by_a_run_that_is_to_be_continued(tmp_path):
    write_pictures(tmp_path / "data" / "train", count=16, classes=2)
    train(folder_config(tmp_path / "data", tmp_path / "runs"))
    write_pictures(tmp_path / "data" / "train", count=18, classes=2)
    for index in (tmp_path / "runs" / "indices").iterdir():
        index.unlink()
    with pytest.raises(CheckpointError, match="images or their labels differ from those"):
        train(folder_config(tmp_path / "data", tmp_path / "runs"))


class AsksTheHost(TorchDispatchMode):
    """Counts operators, and those that make the host wait for a value on the device."""

    SYNCS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.syncs = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators += 1
        if any(function.__name__.startswith(name) for name in self.SYNCS):
            self.syncs.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_training_step_asks_the_host_for_no_value(precision, tmp_path):
    config = small_config(tmp_path, f"meta.precision={precision}")
    with join("cpu") as place:
        images = open_images(config, place, validation=False)
        (tmp_path / "run").mkdir()
        trainer = run.start(config, place, images, tmp_path / "run")
        task = trainer.task
        batch = task.stream(0)
        with AsksTheHost() as counter:
            losses = step.train_step(task.network, task.optimizer, batch, 0.1, task.setting)
            trainer.interval.add(losses, 0, 760)
    assert counter.syncs == []
    assert (
        counter.operators < 1000
    )  # 13 layers forward and backward, two losses, one LARS; no loop over classes


# Few steps: rounding differences double every few updates, and what is asked here is whether it is the same experiment.
FEW = ("optimization.steps=3", "optimization.warmup=0", "logging.log_every=1")


def _train_on_rank(rank: int, world_size: int, folder: str) -> None:
    train(small_config(Path(folder), *FEW))


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_train_to_the_weights_of_one_process_on_the_same_global_batch(world_size, tmp_path):
    train(small_config(tmp_path / "one", *FEW))
    run_ranks(_train_on_rank, world_size, str(tmp_path / "many"))
    (one, _, one_lines), (many, _, many_lines) = (
        final_state(small_config(tmp_path / name, *FEW)) for name in ("one", "many")
    )
    for name, weight in one.items():
        torch.testing.assert_close(
            many[name], weight, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )
    for ours, theirs in zip(many_lines, one_lines):
        assert ours["nt_xent"] == pytest.approx(theirs["nt_xent"], rel=1e-4)
        assert ours["suncet"] == pytest.approx(theirs["suncet"], rel=1e-3)
