"""`fastsuncet finetune` from the command line: a number that can be had again, a folder that can be continued."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from fastsuncet.cli import main
from fastsuncet.evaluation.finetuning import job as job_module
from fastsuncet.evaluation.supervised.stream import FineTuningStream
from fastsuncet.metrics.results import read_results
from fastsuncet.models.resnet import build_model
from fastsuncet.training import state as fit_state
from tests.support.pictures import write_pictures
from tests.support.ranks import run_ranks
from tests.support.runs import CONFIGS, SMALL, small_config, train

QUICK = (
    "data.backend=torchvision",
    "data.decode_threads=1",
    "meta.device=cpu",
    "finetune.batch_size=64",
    "finetune.epochs=3",
    "finetune.crop_scale=[0.5,1.0]",
    "logging.log_every=1",
)
TAG = "bernoulli0.1-step_00000010"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder of runs with one of ten steps, saved at 9 and 10."""
    top = tmp_path_factory.mktemp("pretrained")
    train(small_config(top, "data.backend=torchvision", "data.decode_threads=1", "checkpoint.keep=2"))
    return top


@pytest.fixture
def runs(trained, tmp_path) -> Path:
    """The same, for one test to write in."""
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs"


def command(runs: Path, *more: str) -> int:
    return main(
        ["finetune", str(CONFIGS / "digits_demo.yaml"), *SMALL, f"logging.folder={runs}", *QUICK, *more]
    )


def folder(runs: Path, tag: str = TAG) -> Path:
    return runs / "digits_demo" / "finetune" / tag


def results(runs: Path) -> list[dict]:
    """The results without what another life need not repeat."""
    found = read_results(runs / "digits_demo")
    for record in found:
        record["finetuned"]["ledger"].pop("seconds")
        record["finetuned"].pop("folder")
        record["encoder"].pop("source")
    return found


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory) -> Path:
    """An undisturbed fine-tuning."""
    top = tmp_path_factory.mktemp("whole") / "runs"
    shutil.copytree(trained, top)
    assert command(top) == 0
    return top


def test_the_number_is_that_of_the_network_it_leaves_behind(whole, capsys):
    (record,) = results(whole)
    assert record["kind"] == "finetune" and record["images"] == 355
    assert record["metrics"]["top1"] * 355 == pytest.approx(round(record["metrics"]["top1"] * 355))
    assert record["labels"] == {"kind": "bernoulli", "fraction": 0.1, "count": 160}
    assert (record["encoder"]["step"], record["encoder"]["method"]) == (10, "SimCLR + SuNCEt")
    assert record["setting"]["lr"] == 0.05 * 64 / 256 and record["setting"]["batchnorm_images"] == 64
    assert record["finetuned"]["ledger"]["updates"] == 3 * (160 // 64)
    shown = [
        "evaluate",
        "accuracy",
        str(CONFIGS / "digits_demo.yaml"),
        *SMALL,
        f"logging.folder={whole}",
        *QUICK,
    ]
    assert main([*shown, "--encoder", str(folder(whole))]) == 0
    assert f"{100 * record['metrics']['top1']:.2f} %" in capsys.readouterr().out
    for path in (whole / "digits_demo" / "results").glob("accuracy*"):
        path.unlink()


def test_it_says_what_it_does_and_what_it_found(runs, capsys):
    assert command(runs) == 0
    told = capsys.readouterr().out
    for part in (
        "step 10, epoch 2.5, SimCLR + SuNCEt; resnet_tiny",
        "160 labeled images",
        "64 images on 1 process; BatchNorm over 64 of them",
        "2 an epoch (each leaves out 32 images, drawn anew), 6 in 3 epochs",
        "lr 0.0125 to 0 along half a cosine, Nesterov momentum 0.9, no weight decay",
        "of 355 images, standard error",
    ):
        assert part in told


def test_what_has_ended_is_told_again_and_not_trained_again(whole, monkeypatch, capsys):
    def no_fit(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(job_module, "fit", no_fit)
    before = results(whole)
    (written,) = (whole / "digits_demo" / "results").glob("finetune*")
    written.unlink()
    assert command(whole) == 0
    assert results(whole) == before, "the result that was removed did not come back"
    told = capsys.readouterr().out
    assert "(done before)" in told and "steps" not in told


def test_another_setting_in_a_finished_folder_is_refused_by_its_key(whole, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}
    assert command(whole, "finetune.lr=0.5", "finetune.epochs=4") == 5
    told = capsys.readouterr().err
    assert "finetune.epochs: 3 there, 4 now" in told and "finetune.lr: 0.0125 there, 0.5 now" in told
    assert "finetune.write_tag=" in told
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()} == before


def test_another_name_keeps_both(runs):
    assert command(runs) == 0
    assert command(runs, "finetune.lr=0.5", "finetune.write_tag=fast") == 0
    assert sorted(record["setting"]["lr"] for record in results(runs)) == [0.0125, 0.5]
    assert folder(runs, "fast").is_dir()


class Killed(BaseException):
    """What kill -9 leaves behind."""


def interrupt(monkeypatch, at: int, how) -> None:
    read = FineTuningStream.__call__

    def watched(stream, step, part):
        if step == at:
            how()
        return read(stream, step, part)

    monkeypatch.setattr(FineTuningStream, "__call__", watched)


@pytest.mark.parametrize("at", [0, 3, 5])  # an epoch is two steps
@pytest.mark.parametrize("gently", [True, False], ids=["SIGTERM", "SIGKILL"])
def test_a_fine_tuning_stopped_anywhere_ends_with_the_same_result(
    whole, runs, monkeypatch, capsys, at, gently
):
    with monkeypatch.context() as patch:
        if gently:
            interrupt(patch, at, lambda: os.kill(os.getpid(), signal.SIGTERM))
            assert command(runs) == 75
            assert "the same command continues" in capsys.readouterr().err
        else:

            def kill():
                raise Killed

            interrupt(patch, at, kill)
            with pytest.raises(Killed):
                command(runs)
    assert results(runs) == []
    # Stopped half way, other settings are refused as they are when it has ended.
    refused = at > 0 or gently
    assert command(runs, "finetune.epochs=4") == (5 if refused else 0)
    if refused:
        assert "finetune.epochs: 3 there, 4 now" in capsys.readouterr().err
        assert command(runs) == 0
        assert results(runs) == results(whole)


def test_every_checkpoint_has_a_folder_and_a_number(runs, capsys):
    assert command(runs, "--every-checkpoint") == 0
    assert [record["encoder"]["step"] for record in results(runs)] == [9, 10]
    assert {path.name for path in folder(runs).parent.iterdir()} == {"bernoulli0.1-step_00000009", TAG}
    table = capsys.readouterr().out.strip().splitlines()[-3:]
    assert table[0].split() == ["step", "epoch", "top", "1", "top", "5"] and table[1].split()[:2] == [
        "9",
        "2.25",
    ]
    assert command(runs, "--step", "9", "finetune.write_tag=named") == 0
    assert folder(runs, "named").is_dir()


def test_a_checkpoint_that_a_run_removes_meanwhile_is_left_out_and_said(runs, monkeypatch, capsys):
    original, kept = job_module.fit, runs / "digits_demo" / "checkpoints"

    def training_goes_on(*arguments, **more):
        shutil.rmtree(kept / "step_00000010")
        return original(*arguments, **more)

    monkeypatch.setattr(job_module, "fit", training_goes_on)
    assert command(runs, "--every-checkpoint") == 0
    assert [record["encoder"]["step"] for record in results(runs)] == [9]
    assert "step_00000010: skipped, deleted by checkpoint.keep" in capsys.readouterr().out
    monkeypatch.setattr(job_module, "fit", original)
    shown = ["evaluate", "knn", str(CONFIGS / "digits_demo.yaml"), *SMALL, f"logging.folder={runs}", *QUICK]
    assert main([*shown, "--every-checkpoint"]) == 0


def test_a_file_of_weights_is_fine_tuned_under_its_own_name(runs, tmp_path):
    torch.save(
        build_model("resnet_tiny", stem="imagenet").encoder.state_dict(), tmp_path / "their weights.pth"
    )
    assert command(runs, "--encoder", str(tmp_path / "their weights.pth")) == 0
    assert folder(runs, "bernoulli0.1-their_weights").is_dir()
    (record,) = results(runs)
    assert record["encoder"] == {"step": None, "epoch": None, "method": None, "ledger": None}


def test_what_is_wrong_is_said_with_its_exit_code_and_leaves_nothing(runs, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    pictures = ("data.kind=image_folder", f"data.root={tmp_path}", "data.validation=held out")
    write_pictures(tmp_path / "train", count=8)
    for code, message, *more in (
        (2, "160 labeled images do not fill a batch of 4,096: at most 160", "finetune.batch_size=4096"),
        (2, "3 passes each (finetune.accumulate): a multiple of 3 can", "finetune.accumulate=3"),
        (2, "has no good checkpoint of step 4. It has 9, 10", "--step", "4"),
        (2, "/nowhere does not exist", "--encoder", "/nowhere"),
        (2, "not allowed with argument", "--step", "4", "--every-checkpoint"),
        (2, "the name of their folder", *pictures[:2], "data.validation=null"),
        (3, "held out", *pictures),
        (3, "no labeled image to fine-tune on", "data.split.fraction=1e-9"),
        (5, "holds no checkpoint", "--encoder", str(tmp_path / "empty")),
    ):
        assert command(runs, *more) == code, more
        assert message in capsys.readouterr().err, more
    without = ("data.split.kind=none", "data.split.fraction=null", "criterion.supervised_epochs=0")
    assert (
        command(runs, *without, "criterion.classes_per_batch=0", "criterion.supervised_imgs_per_class=0") == 2
    )
    assert "fine-tuning learns from labeled training images" in capsys.readouterr().err
    assert not folder(runs).parent.exists()


def test_a_loss_that_is_no_number_is_exit_4(runs, capsys):
    assert command(runs, "finetune.lr=1e38") == 4
    assert "cross_entropy is not a finite number" in capsys.readouterr().err
    assert results(runs) == []


def test_few_classes_have_no_top_5_and_one_without_labels_is_named(runs, tmp_path, capsys):
    for part, count in (("train", 12), ("val", 5)):
        write_pictures(tmp_path / "data" / part, count=count, side=20)
    names = sorted(
        path.relative_to(tmp_path / "data" / "train") for path in (tmp_path / "data").rglob("train/*/*")
    )
    labels = tmp_path / "some.txt"
    labels.write_text("".join(f"{name}\n" for name in names if name.parts[0] != "class_1"))
    split = ("data.split.kind=names", f"data.split.file={labels}", "data.split.fraction=null")
    where = ("data.kind=image_folder", f"data.root={tmp_path / 'data'}", "data.validation=val")
    small = ("criterion.classes_per_batch=2", "criterion.unsupervised_batch_size=4", "finetune.batch_size=4")
    encoder = ("--encoder", str(runs / "digits_demo"))
    assert command(runs, *where, *split, *small, *encoder) == 0
    told = capsys.readouterr().out
    assert (
        "1 of 3 classes have no labeled image (class_1): their 2 validation images will count as wrong"
        in told
    )
    (record,) = results(runs)
    assert list(record["metrics"]) == ["top1"] and record["images"] == 5
    assert folder(runs, "some-step_00000010").is_dir()


def test_many_short_epochs_are_not_saved_one_by_one(runs, monkeypatch):
    saved, original = [], fit_state.save
    monkeypatch.setattr(fit_state, "save", lambda *a, **more: saved.append(a[1]) or original(*a, **more))
    assert command(runs, "finetune.epochs=30", "finetune.batch_size=160") == 0
    assert saved == [*range(2, 31, 2)], "30 updates in 30 epochs"


def test_other_validation_images_are_another_number_of_the_same_network(runs, tmp_path, monkeypatch):
    for part, count in (("train", 12), ("val", 5), ("held", 7)):
        write_pictures(tmp_path / "data" / part, count=count, side=20)
    pictures = ("data.kind=image_folder", f"data.root={tmp_path / 'data'}", "finetune.batch_size=4")
    small = (
        "criterion.classes_per_batch=2",
        "criterion.unsupervised_batch_size=4",
        "data.split.fraction=1.0",
    )
    both = (*pictures, *small, "--encoder", str(runs / "digits_demo"))
    assert command(runs, *both, "data.validation=val") == 0

    def no_update(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr("fastsuncet.evaluation.supervised.fine_tuning.finetune_step", no_update)
    assert command(runs, *both, "data.validation=held") == 0
    assert sorted(record["images"] for record in results(runs)) == [5, 7]


def on_rank(rank: int, world_size: int, runs: str) -> int:
    return command(Path(runs), "finetune.batch_size=60")


def test_ranks_count_every_image_once_and_agree(runs):
    assert run_ranks(on_rank, 3, str(runs)) == [0, 0, 0]
    (record,) = results(runs)
    assert record["images"] == 355 and record["setting"]["batchnorm_images"] == 20
    share = record["metrics"]["top1"] * 355
    assert share == pytest.approx(round(share), abs=1e-6)
    assert json.loads((folder(runs) / "result.json").read_text())["record"]["images"] == 355
