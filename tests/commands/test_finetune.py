"""`fastsuncet finetune` from the command line: a reproducible accuracy, in a folder that can be continued.

`tests/evaluation/finetuning/test_fit.py` stops and kills the training itself at every step.
"""

import hashlib
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastsuncet.checkpoint import manager
from fastsuncet.cli import main
from fastsuncet.commands.sweep.jobs import job_state
from fastsuncet.commands.sweep.runs import Job
from fastsuncet.config import load_config
from fastsuncet.evaluation.encoder import load_encoder
from fastsuncet.evaluation.finetuning import frozen, job
from fastsuncet.evaluation.finetuning.fit import FineTuning, FineTuningStream
from fastsuncet.metrics.results import read_results
from fastsuncet.models.resnet import build_model
from tests.support.pictures import write_pictures
from tests.support.ranks import run_ranks
from tests.support.runs import CONFIGS, SMALL, interrupted_at, small_config, terminate, train

pytestmark = pytest.mark.slow

QUICK = (
    *("data.backend=torchvision", "data.decode_threads=1", "meta.device=cpu", "logging.log_every=1"),
    *("finetune.head=zero", "finetune.batch_size=64", "finetune.epochs=3", "finetune.crop_scale=[0.5,1.0]"),
)
LINEAR = ("finetune.head=linear", "finetune.epochs=1", "finetune.batch_size=4096", "linear.strength=0.1")
TAG = "bernoulli0.1-step_00000010"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    """A folder of runs with one of ten steps, saved at 9 and 10."""
    top = tmp_path_factory.mktemp("pretrained")
    train(small_config(top, "checkpoint.keep=2"))
    return top


@pytest.fixture
def runs(pretrained, tmp_path) -> Path:
    """A copy of it, for one test to write in."""
    return Path(shutil.copytree(pretrained, tmp_path / "runs"))


@pytest.fixture(scope="module")
def whole(pretrained, tmp_path_factory) -> Path:
    top = Path(shutil.copytree(pretrained, tmp_path_factory.mktemp("whole") / "runs"))
    assert run(top) == 0
    return top


def config_of(runs: Path) -> tuple[str, ...]:
    return (str(CONFIGS / "digits_demo.yaml"), *SMALL, f"logging.folder={runs}", *QUICK)


def run(runs: Path, *more: str, command: tuple[str, ...] = ("finetune",)) -> int:
    return main([*command, *config_of(runs), *more])


def folder(runs: Path, tag: str = TAG) -> Path:
    return runs / "digits_demo" / "finetune" / tag


def results(runs: Path) -> list[dict]:
    """Return the results without what is different in every run."""
    found = read_results(runs / "digits_demo")
    for record in found:
        record["finetuned"]["ledger"].pop("seconds")
        record["finetuned"].pop("folder")
        record["encoder"].pop("source")
    return found


def test_finetune_result_is_the_accuracy_of_the_saved_network(whole, capsys):
    (record,) = results(whole)
    assert record["kind"] == "finetune" and record["images"] == 355
    right = sum(of["predicted"].get(name, 0) for name, of in record["classes"].items())
    assert record["metrics"]["top1"] * 355 == pytest.approx(right)
    assert record["labels"] == {"kind": "bernoulli", "fraction": 0.1, "count": 160}
    assert (record["encoder"]["step"], record["encoder"]["method"]) == (10, "SimCLR + SuNCEt")
    assert record["setting"]["lr"] == 0.05 * 64 / 256 and record["setting"]["batchnorm_images"] == 64
    assert record["finetuned"]["ledger"]["updates"] == 3 * (160 // 64)
    path, *overrides = config_of(whole)
    found = Job("finetune", (), (), (), load_config(path, overrides))
    assert job_state(found).done, "a sweep would do it again"
    for trained in (folder(whole), whole / "digits_demo"):
        assert load_encoder(trained).classes == tuple("0123456789")
    assert run(whole, "--encoder", str(folder(whole)), command=("evaluate", "accuracy")) == 0
    assert f"{100 * record['metrics']['top1']:.2f} %" in capsys.readouterr().out
    for path in (whole / "digits_demo" / "results").glob("accuracy*"):
        path.unlink()


def test_finetune_prints_a_finished_one_again_without_training(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(job, "fit")
    before = results(whole)
    (written,) = (whole / "digits_demo" / "results").glob("finetune*.json")
    written.unlink()
    assert run(whole) == 0
    assert results(whole) == before, "the result that was removed was not written again"
    printed = capsys.readouterr().out
    assert "(done before)" in printed and "steps" not in printed
    elsewhere = Path(shutil.copytree(whole, tmp_path / "elsewhere"))
    assert run(elsewhere) == 0
    assert results(elsewhere) == before, "a run that was moved has its result twice"


def test_finetune_refuses_other_settings_by_key_unless_named_otherwise(whole, tmp_path, capsys):
    runs = Path(shutil.copytree(whole, tmp_path / "runs"))
    files = [path for path in runs.rglob("*") if path.is_file() and path.name != ".running"]
    before = {path: path.stat().st_mtime_ns for path in files}
    assert run(runs, "finetune.lr=0.5", "finetune.epochs=4") == 5
    error = capsys.readouterr().err
    assert "finetune.epochs: 3 there, 4 now" in error and "finetune.lr: 0.0125 there, 0.5 now" in error
    assert "finetune.write_tag=" in error
    assert run(runs, "finetune.batch_size=1") == 2 and "a pass one image" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in files} == before
    assert run(runs, "finetune.lr=0.5", "finetune.epochs=1", "finetune.write_tag=fast") == 0
    assert "2 in 1 epochs" in capsys.readouterr().out
    assert sorted(record["setting"]["lr"] for record in results(runs)) == [0.0125, 0.5]
    assert folder(runs, "fast").is_dir()


def test_finetune_from_the_linear_classifier_ends_at_the_mean_of_first_and_last(runs, monkeypatch, capsys):
    monkeypatch.setattr(job, "LEAST_UPDATES", 4)
    monkeypatch.setattr(frozen, "STALE", math.inf)  # with new statistics BatchNorm's are no mean
    seen, after_step = {}, FineTuning.after_step

    def watched(task, step, values):
        """Note the starting weights, and the last ones before and after the mean."""
        seen.setdefault("scale", task.optimizer.param_groups[0]["scale"])
        last = [x.clone() for x in task.averaged()]
        message = after_step(task, step, values)
        seen["means"] = [torch.allclose(x, (a + b) / 2) for x, a, b in zip(task.averaged(), last, task.start)]
        seen["start"], seen["moved"] = task.start, not torch.equal(last[0], task.start[0])
        return message

    with monkeypatch.context() as patch:
        patch.setattr(FineTuning, "after_step", watched)
        assert run(runs, *LINEAR, "finetune.lr=1.0") == 0
    (record,) = results(runs)
    assert record["finetuned"]["ledger"]["updates"] == 4 and record["setting"]["batch_size"] == 160
    assert "note     less than 90 %" in capsys.readouterr().out
    assert all(seen["means"]) and seen["moved"] and seen["scale"] < 1
    # Of another start it is no result, and none to go on from.
    assert run(runs, *LINEAR, "finetune.lr=1.0", "linear.strength=10") == 5
    assert "linear.strength: 0.1 there, 10.0 now" in capsys.readouterr().err
    # The start is what `evaluate linear` measures, and k-NN what `evaluate knn` does.
    for kind, key in (("linear", "linear"), ("knn", "knn_random_crops")):
        assert run(runs, *LINEAR, command=("evaluate", kind)) == 0
        (measured,) = (each for each in read_results(runs / "digits_demo") if each["kind"] == kind)
        assert record["frozen"][key] == pytest.approx(measured["metrics"]["top1"], abs=1 / 355)


def test_finetune_of_a_young_encoder_is_no_worse_than_the_linear_classifier(runs, monkeypatch):
    """After ten updates BatchNorm's statistics are not those of a batch: the mean with the start was 10 % right."""
    monkeypatch.setattr(job, "LEAST_UPDATES", 20)
    assert run(runs, *LINEAR, "finetune.batch_size=80") == 0
    (record,) = results(runs)
    assert record["metrics"]["top1"] > record["frozen"]["linear"] - 0.01
    young = load_encoder(runs / "digits_demo")
    started = young.trained.with_values({"model.init": "timm"})  # with statistics of its own
    assert frozen.has_stale_statistics(young)
    # Without a step the weights are another program's.
    for other in ({"step": 80}, {"tuned": 300}, {"step": None}, {"trained": started}):
        assert not frozen.has_stale_statistics(replace(young, **other))


def test_finetune_stopped_ends_with_the_same_result(runs, tmp_path, monkeypatch, capsys):
    """From the linear classifier, in its last update."""
    monkeypatch.setattr(job, "LEAST_UPDATES", 4)
    words, top = (*LINEAR, "data.split.fraction=0.03"), Path(shutil.copytree(runs, tmp_path / "stopped"))
    assert run(runs, *words) == 0
    with interrupted_at(FineTuningStream, 3, terminate):
        assert run(top, *words) == 75
    assert "the same command continues" in capsys.readouterr().err and results(top) == []
    assert run(top, *words, "finetune.momentum=0.8") == 5, "a stopped one refuses as a finished one"
    assert run(top, *words) == 0
    assert results(top) == results(runs)
    kept = (folder(each, TAG.replace("0.1", "0.03")) / "checkpoints" for each in (top, runs))
    ours, theirs = map(manager.load_newest, kept)
    assert all(torch.equal(x, theirs.model[name]) for name, x in ours.model.items())


def test_finetune_of_every_checkpoint_skips_a_deleted_one_and_prints_a_table(runs, monkeypatch, capsys):
    fit, kept = job.fit, runs / "digits_demo" / "checkpoints"
    words = ("--every-checkpoint", "finetune.epochs=1", "finetune.write_tag=bernoulli0.1")

    def training_goes_on(*arguments, **more):
        (kept / "step_00000010").rename(runs / "step_00000010")
        return fit(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(job, "fit", training_goes_on)
        assert run(runs, *words) == 0
    assert [record["encoder"]["step"] for record in results(runs)] == [9]
    assert "step_00000010: skipped, deleted by checkpoint.keep" in capsys.readouterr().out
    (runs / "step_00000010").rename(kept / "step_00000010")
    assert run(runs, *words) == 0
    assert {path.name for path in folder(runs).parent.iterdir()} == {"bernoulli0.1-step_00000009", TAG}
    out = capsys.readouterr().out
    assert out.count("(done before)") == 1
    blank, *table = out.splitlines()[-4:]
    assert not blank and table[0].split() == ["step", "epoch", "top", "1", "top", "5"]
    assert table[1].split()[:2] == ["9", "2.25"]


def test_finetune_of_a_file_of_weights_is_named_after_it_and_saves_twenty_times(runs, tmp_path, monkeypatch):
    weights = build_model("resnet_tiny", stem="imagenet").encoder.state_dict()
    torch.save(weights, tmp_path / "their weights.pth")
    saved, save = [], manager.save
    monkeypatch.setattr(manager, "save", lambda *a, **more: saved.append(a[1]) or save(*a, **more))
    words = ("finetune.epochs=30", "finetune.batch_size=20", "data.split.fraction=null")
    words += ("data.split.kind=stratified", "data.split.images=20", "--encoder")
    assert run(runs, *words, str(tmp_path / "their weights.pth")) == 0
    assert saved == [*range(2, 31, 2)], "30 updates in 30 epochs"
    assert folder(runs, "stratified20-their_weights").is_dir()
    (record,) = results(runs)
    digest = hashlib.sha256((tmp_path / "their weights.pth").read_bytes()).hexdigest()
    nothing = dict.fromkeys(("step", "epoch", "method", "ledger"))
    assert record["encoder"] == {**nothing, "sha256": digest}


def test_finetune_names_what_is_wrong_and_writes_nothing(runs, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    unlabeled = ("data.split.kind=none", "data.split.fraction=null", "criterion.supervised_epochs=0")
    pictures = ("data.kind=image_folder", f"data.root={tmp_path}", "data.validation=held out")
    write_pictures(tmp_path / "train", count=8)
    for code, message, *more in (
        (2, "must be a multiple of 1, and at most the 160", "finetune.batch_size=4096"),
        (2, "in 3 passes each (finetune.accumulate): must be a multiple of 3", "finetune.accumulate=3"),
        (2, "learns from labeled training images, and the config selects none", *unlabeled),
        (3, "held out", *pictures),
        (3, "no labeled image to fine-tune on", "data.split.fraction=1e-9"),
        (2, "`pip install wandb`", "logging.wandb=project"),
    ):
        assert run(runs, *more) == code, more
        assert message in capsys.readouterr().err, more
    assert not folder(runs).parent.exists()


def test_finetune_names_classes_without_labels_and_leaves_out_top_5(runs, tmp_path, capsys, monkeypatch):
    """Other validation images are another result of the same network, without another update."""
    data = tmp_path / "data"
    for part, count in (("train", 12), ("val", 5), ("held", 7)):
        write_pictures(data / part, count=count, side=20)
    names = sorted(path.relative_to(data / "train") for path in data.rglob("train/*/*"))
    labels = tmp_path / "some.txt"
    labels.write_text("".join(f"{name}\n" for name in names if name.parts[0] != "class_1"))
    options = (
        *("data.kind=image_folder", f"data.root={data}", "--encoder", str(runs / "digits_demo")),
        *("data.split.kind=names", f"data.split.file={labels}", "data.split.fraction=null"),
        *("criterion.classes_per_batch=2", "criterion.unsupervised_batch_size=4", "finetune.batch_size=4"),
    )
    assert run(runs, *options, "data.validation=val") == 0
    said = "note     1 of 3 classes have no labeled image (class_1): no classifier can predict them, and their 2 "
    assert said in capsys.readouterr().out
    (record,) = results(runs)
    assert list(record["metrics"]) == ["top1"] and record["images"] == 5
    assert folder(runs, "some-step_00000010").is_dir()
    monkeypatch.delattr(FineTuning, "train_step")
    assert run(runs, *options, "data.validation=held") == 0
    assert sorted(record["images"] for record in results(runs)) == [5, 7]


def on_rank(rank: int, world_size: int, runs: str) -> int:
    return run(Path(runs), "finetune.batch_size=60", "finetune.epochs=1")


def test_finetune_on_two_ranks_counts_every_image_once(runs):
    assert run_ranks(on_rank, 2, str(runs)) == [0, 0]
    (record,) = results(runs)
    assert record["images"] == 355 and record["setting"]["batchnorm_images"] == 30
    assert sum(of["images"] for of in record["classes"].values()) == 355
    assert json.loads((folder(runs) / "result.json").read_text())["record"]["images"] == 355
