"""`fastsuncet transfer` on small made-up data sets: whole, stopped, in shards, on two ranks."""

import json
import shutil
import sys
import threading
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from fastsuncet.cli import main
from fastsuncet.commands.sweep.jobs import job_state
from fastsuncet.commands.sweep.runs import Job
from fastsuncet.config import load_config
from fastsuncet.errors import NumericalError
from fastsuncet.evaluation.finetuning import transfer
from fastsuncet.evaluation.finetuning.fit import FineTuning, fit
from fastsuncet.metrics.results import read_results, write_result
from fastsuncet.models.resnet import build_model
from pipelines import atomic_files
from pipelines.loader import Loader
from tests.support.colors import ALONE
from tests.support.ranks import run_ranks
from tests.support.runs import CONFIGS, Killed, kill, small_config, terminate
from tests.support.voc import write_voc

pytestmark = pytest.mark.slow

SMALL = (
    *("transfer.datasets=[cifar10]", "transfer.learning_rates=[0.01,0.1,0.03]", "transfer.steps=5"),
    *("transfer.weight_decays=[0.001]", "transfer.validation=0.2", "transfer.batch_size=16"),
    *("transfer.size=16", "transfer.resize=16", "data.backend=torchvision", "data.decode_threads=1"),
    *("data.augmentation.size=24", "data.augmentation.crop_ratio=[1.0,1.0]", "meta.device=cpu"),
)
TEST_IMAGES = 23  # two ranks cannot share them evenly
ONE_RATE = "transfer.learning_rates=[0.01]"


def write_cifar(root: Path) -> None:
    """Write CIFAR-10 as folders of 100 training and 23 test images, whose brightness nearly tells their class."""
    draws = np.random.default_rng(3)
    for part, count in (("train", 100), ("test", TEST_IMAGES)):
        for i in range(count):
            folder = root / part / "abcdefghij"[i % 10]
            folder.mkdir(parents=True, exist_ok=True)
            pixels = draws.normal(25 * (i % 10) + 10, 12, (32, 32, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{i:03}.png")


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    """A folder with data sets and a file of an encoder's weights."""
    top = tmp_path_factory.mktemp("transfer")
    write_cifar(top / "data" / "cifar10")
    write_voc(top / "data", train=16, val=12, test=14)
    torch.manual_seed(1)
    torch.save(build_model("resnet_tiny", "imagenet").encoder.state_dict(), top / "tiny.pth")
    return top


def config_of(top: Path, runs: Path) -> tuple[str, ...]:
    where = (f"logging.folder={runs}", f"transfer.root={top / 'data'}")
    return (str(CONFIGS / "digits_demo.yaml"), *where, *SMALL)


def run(top: Path, runs: Path, *more: str) -> int:
    return main(["transfer", *config_of(top, runs), "--encoder", str(top / "tiny.pth"), *more])


def records_of(runs: Path, name: str = "*.json") -> dict[str, dict]:
    """Return every record of a transfer without its seconds, by its path."""
    records = {}
    for path in sorted((runs / "digits_demo" / "transfer").glob(f"*/*/*/{name}")):
        record = json.loads(path.read_text())
        record.pop("seconds")
        records[str(path.relative_to(runs))] = record
    return records


def cell_folder(runs: Path) -> Path:
    (folder,) = (runs / "digits_demo" / "transfer").glob("*/*/lr0.01-wd0.001")
    return folder


@pytest.fixture(scope="module")
def fits(top, tmp_path_factory) -> tuple[Path, list[tuple]]:
    """The folder of a whole transfer; of each fit its settings, the images learned from and those that judged it."""
    runs, patch = tmp_path_factory.mktemp("whole"), mock.patch.object
    with patch(transfer, "FineTuning", wraps=FineTuning) as made, patch(transfer, "fit", wraps=fit) as fitted:
        assert run(top, runs, "logging.tensorboard=true") == 0
    for config in (call.args[3] for call in made.mock_calls):
        assert not config.logging.trackers, "they get the result alone"
        views = config.data.augmentation
        assert (views.size, views.flip, views.crop_ratio) == (16, 0.5, (3 / 4, 4 / 3)), "SimCLR's protocol"
    calls = zip(made.mock_calls, fitted.mock_calls, strict=True)
    return runs, [(a.args[3].finetune, a.kwargs, a.args[2].tolist(), *b.args[1:3]) for a, b in calls]


@pytest.fixture(scope="module")
def whole(fits) -> Path:
    return fits[0]


def test_transfer_retrains_the_best_cell_and_tests_it(top, fits):
    """Cells are compared on images that they never saw."""
    whole, (*compared, retrained) = fits
    cells = list(records_of(whole, "cell.json").values())
    (selected,) = records_of(whole, "selected.json").values()
    # Two of each of 10 classes.
    assert len(cells) == 3 and {cell["images"] for cell in cells} == {20}
    (best,) = [cell for cell in cells if all(cell[key] == selected[key] for key in ("lr", "weight_decay"))]
    assert best["metric"] == max(cell["metric"] for cell in cells)
    assert (selected["train_images"], selected["images"]) == (100, TEST_IMAGES)
    for settings, options, learned, index, validated in compared:
        assert sorted([*learned, *validated]) == list(range(100)) and index is compared[0][3]
        assert np.array_equal(validated, compared[0][4])
        assert settings.weight_decay == pytest.approx(0.001 / settings.lr)
        assert options["bn_momentum"] == pytest.approx(0.1)
    assert [settings.lr for settings, *_ in compared] == [0.01, 0.1, 0.03]
    settings, _, learned, index, tested = retrained
    assert (settings.lr, len(index)) == (best["lr"], TEST_IMAGES)
    assert learned == list(range(100)) and tested.tolist() == list(range(TEST_IMAGES))
    (result,) = read_results(whole / "digits_demo")
    assert result["kind"] == "transfer" and result["metrics"] == {"cifar10": selected["metric"]}
    path, *overrides = config_of(top, whole)
    found = Job("transfer", (), (), ("--encoder", str(top / "tiny.pth")), load_config(path, overrides))
    assert job_state(found).done, "a sweep would do it again"
    chosen = result["chosen"]["cifar10"]
    assert (chosen["lr"], chosen["weight_decay"]) == (best["lr"], best["weight_decay"])
    assert (chosen["validation"], chosen["metric"]) == (best["metric"], "top-1")
    assert (result["images"], chosen["train_images"]) == (TEST_IMAGES, 100)
    assert not list((whole / "digits_demo").rglob("fit")), "checkpoints of finished cells are left behind"


def test_finished_transfer_trains_nothing(whole, top, monkeypatch):
    monkeypatch.delattr(transfer, "fit")
    before, left = records_of(whole), cell_folder(whole) / "fit"
    left.mkdir()  # of a process killed right after it had written the cell's record
    assert run(top, whole) == 0
    assert records_of(whole) == before and not left.exists()


def watch(monkeypatch, read: int = 0, how=None) -> list[int]:
    """Call `how()` when the transfer reads its `read`-th batch, counted over all cells; return the steps read."""
    steps, original = [], Loader.__call__

    def watched(loader, step):
        steps.append(step)
        if len(steps) == read:
            how()
        return original(loader, step)

    monkeypatch.setattr(Loader, "__call__", watched)
    return steps


# A cell reads five batches to train on and one of validation images: 9 is in the second cell, 21 in the retraining of
# the chosen one. tests/evaluation/finetuning/test_fit.py has all steps of a cell and its evaluation.
@pytest.mark.parametrize(("how", "read"), [(terminate, 21), (kill, 9)])
def test_transfer_stopped_anywhere_continues_to_the_bit(whole, top, tmp_path, monkeypatch, capsys, read, how):
    with monkeypatch.context() as patch:
        before = watch(patch, read, how)
        if how is terminate:
            assert run(top, tmp_path) == 75
            assert "the same command" in capsys.readouterr().err
        else:
            with pytest.raises(Killed):
                run(top, tmp_path)
    done = len(records_of(tmp_path, "cell.json"))
    assert not read_results(tmp_path / "digits_demo")
    with monkeypatch.context() as patch:
        after = watch(patch)
        assert run(top, tmp_path) == 0
    assert capsys.readouterr().out.count("    done before") == done
    if how is terminate:
        assert len(before) + len(after) == 4 * 6, "a stopped cell began again"
    assert records_of(tmp_path) == records_of(whole)
    ours, theirs = read_results(tmp_path / "digits_demo"), read_results(whole / "digits_demo")
    for result in (*ours, *theirs):
        result["chosen"]["cifar10"].pop("folder")
    assert ours == theirs


def test_shards_make_one_grid_and_the_last_one_chooses(whole, top, tmp_path):
    for number in (2, 3, 1):
        assert not read_results(tmp_path / "digits_demo")
        assert run(top, tmp_path, "--cell", f"{number}/3") == 0
    assert records_of(tmp_path) == records_of(whole)


def test_cell_that_another_process_runs_is_skipped(top, tmp_path, whole, capsys):
    folder = tmp_path / cell_folder(whole).relative_to(whole)
    folder.mkdir(parents=True)
    with atomic_files.exclusive(folder / ".running"):
        assert run(top, tmp_path) == 0
    printed = capsys.readouterr().out
    assert "skipped: another process is running this cell" in printed
    assert "1 of 3 cells are not finished" in printed


def test_cell_that_diverges_is_a_result_and_the_others_go_on(top, tmp_path, capsys, monkeypatch):
    assert run(top, tmp_path, "transfer.learning_rates=[1e9,0.01]") == 0
    printed = capsys.readouterr().out
    assert printed.count("    diverged: cross_entropy is") == 1
    assert "nan" in printed and "chosen: lr 0.01" in printed
    assert run(top, tmp_path, "transfer.learning_rates=[1e9]", "transfer.datasets=[cifar10,voc07]") == 4
    failed = capsys.readouterr().err
    assert all(f"{name}: every cell of the grid diverged" in failed for name in ("cifar10", "voc07"))
    fits = iter([fit, mock.Mock(side_effect=NumericalError("loss is nan. Lower it"))])
    monkeypatch.setattr(transfer, "fit", lambda *given: next(fits)(*given))
    assert run(top, tmp_path / "retraining", ONE_RATE) == 4
    failed = " ".join(capsys.readouterr().err.split())
    assert "cifar10, lr 0.01, weight decay 0.001/lr: the retraining diverged: loss is nan; replace" in failed
    assert not read_results(tmp_path / "retraining" / "digits_demo")


def test_voc_is_chosen_on_val_and_tested_by_its_own_metric(top, tmp_path):
    assert run(top, tmp_path, "transfer.datasets=[voc07]", ONE_RATE) == 0
    (result,) = read_results(tmp_path / "digits_demo")
    assert list(result["metrics"]) == ["voc07"] and 0 < result["metrics"]["voc07"] < 1
    chosen = result["chosen"]["voc07"]
    assert (chosen["images"], chosen["validation_images"], chosen["train_images"]) == (14, 12, 28)
    assert chosen["metric"] == "11-point mAP"
    # A data set that is run later joins the same result.
    assert run(top, tmp_path, ONE_RATE) == 0
    (joined,) = read_results(tmp_path / "digits_demo")
    assert joined["chosen"]["voc07"] == chosen and joined["images"] == 14 + TEST_IMAGES
    assert set(joined["metrics"]) == {"cifar10", "voc07"}


def test_results_of_data_sets_saved_at_the_same_moment_or_after_a_move_are_kept(tmp_path, monkeypatch):
    retrained = {**dict.fromkeys(transfer.FROM_RETRAINED, 1), "metric": 0.5, "images": 9}

    def save(name: str, top: Path = tmp_path / "old", *overrides: str, sha256: str = "a") -> None:
        config = small_config(top, *overrides)
        source = f"{config.run_folder}/checkpoints/step_00000010"
        record = {"source": source, "step": 10, "sha256": sha256}
        encoder = types.SimpleNamespace(record=lambda: record, sha256=sha256)
        task = types.SimpleNamespace(name=name, title="top-1")
        shared = {"config": config, "asked": {}, "task": task, "encoder": encoder, "place": ALONE}
        dataset = types.SimpleNamespace(**shared, folder=tmp_path / name)
        transfer.save_result(dataset, {"metric": 0.5, "images": 9}, retrained)

    other = threading.Thread(target=save, args=["cifar100"])

    def write(run, record):
        if threading.current_thread() is not other:
            other.start()
            other.join(0.5)  # long enough to read and write, if it did not wait for the lock
        return write_result(run, record)

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "write_result", write)
        save("cifar10")
        other.join()
    (tmp_path / "old").rename(tmp_path / "new")
    save("voc07", tmp_path / "new")
    (result,) = read_results(small_config(tmp_path / "new").run_folder)
    assert result["metrics"] == {"cifar10": 0.5, "cifar100": 0.5, "voc07": 0.5} and result["images"] == 27
    # Of a file of weights the config says the pixels, and other ones are another result.
    save("cifar10", tmp_path / "new", "data.augmentation.std=[0.5,0.5,0.5]")
    assert len(read_results(small_config(tmp_path / "new").run_folder)) == 2
    # Other weights of the same name have none of the metrics.
    save("cifar100", tmp_path / "new", sha256="b")
    found = [record["metrics"] for record in read_results(small_config(tmp_path / "new").run_folder)]
    assert {"cifar100": 0.5} in found and len(found) == 2


def test_transfer_names_what_is_missing_before_the_first_cell(top, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for code, message, word in (
        (3, "CIFAR-100", "transfer.datasets=[cifar10,cifar100]"),
        (2, "and at most the 80 labeled images of cifar10", "transfer.batch_size=81"),
        (2, "`pip install wandb`", "logging.wandb=project"),
    ):
        assert run(top, tmp_path, word) == code
        assert message in capsys.readouterr().err
    assert not records_of(tmp_path) and not list(tmp_path.rglob("transfer/*/*"))


def test_damaged_or_foreign_record_of_a_cell_is_refused(top, tmp_path, whole, capsys):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    path = cell_folder(tmp_path) / "cell.json"
    for text in ("{", json.dumps({**json.loads(path.read_text()), "identity": {}})):
        path.write_text(text)
        assert run(top, tmp_path) == 5
        assert f"{path.parent}" in capsys.readouterr().err


def on_two_ranks(rank: int, world_size: int, top: str, runs: str) -> int:
    return run(Path(top), Path(runs), ONE_RATE)


def test_transfer_on_two_ranks_counts_every_image_once(top, tmp_path):
    assert run_ranks(on_two_ranks, 2, str(top), str(tmp_path)) == [0, 0]
    (result,) = read_results(tmp_path / "digits_demo")
    assert result["images"] == TEST_IMAGES and result["setting"]["processes"] == 2
    classes = result["chosen"]["cifar10"]["classes"]
    assert sum(of["images"] for of in classes.values()) == TEST_IMAGES
    right = sum(of["predicted"].get(name, 0) for name, of in classes.items())
    assert result["metrics"]["cifar10"] == right / TEST_IMAGES
