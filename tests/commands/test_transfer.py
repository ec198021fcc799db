"""`fastsuncet transfer` on small made data sets, from weights to a number: whole, killed, shared out, on two ranks."""

import dataclasses
import json
import os
import shutil
import signal
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fastsuncet.checkpoint import atomic_files
from fastsuncet.cli import main
from fastsuncet.evaluation.transfer_grid import cell as cells_module
from fastsuncet.evaluation.transfer_grid import run_grid as walk_module
from fastsuncet.evaluation.transfer_grid import tasks as tasks_module
from fastsuncet.evaluation.transfer_grid.run_grid import save_result
from fastsuncet.evaluation.transfer_grid.tasks import open_task
from fastsuncet.metrics.results import read_results
from fastsuncet.models.resnet import build_model
from pipelines.datasets.cifar import CLASSES
from pipelines.loader import Loader
from tests.support.ranks import run_ranks
from tests.support.runs import CONFIGS, small_config
from tests.support.voc import write_voc

SMALL = (
    "transfer.datasets=[cifar10]",
    "transfer.steps=5",
    "transfer.batch_size=16",
    "transfer.learning_rates=[0.01,0.1,0.03]",
    "transfer.weight_decays=[0.001]",
    "transfer.validation=0.25",
    "transfer.size=16",
    "transfer.resize=16",
    "data.backend=torchvision",
    "data.decode_threads=1",
    "meta.device=cpu",
)
TEST_IMAGES = 23  # two ranks cannot share it evenly


def write_cifar(root: Path) -> None:
    """CIFAR-10 as folders of 100 training and 23 test images, whose brightness nearly tells their class."""
    draws = np.random.default_rng(3)
    for part, count in (("train", 100), ("test", TEST_IMAGES)):
        for i in range(count):
            folder = root / part / CLASSES["cifar10"][i % 10]
            folder.mkdir(parents=True, exist_ok=True)
            pixels = draws.normal(25 * (i % 10) + 10, 12, (32, 32, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{i:03}.png")


@pytest.fixture(scope="module")
def bench_top(tmp_path_factory) -> Path:
    """A folder with data and a file of an encoder's weights."""
    top = tmp_path_factory.mktemp("transfer")
    write_cifar(top / "data" / "cifar10")
    write_voc(top / "data", train=16, val=12, test=14)
    torch.manual_seed(1)
    torch.save(build_model("resnet_tiny", "torchvision", "imagenet").encoder.state_dict(), top / "tiny.pth")
    return top


def command(top: Path, runs: Path, *more: str) -> int:
    where = (f"logging.folder={runs}", f"transfer.root={top / 'data'}", "--encoder", str(top / "tiny.pth"))
    return main(["transfer", str(CONFIGS / "digits_demo.yaml"), *where, *SMALL, *more])


def numbers(runs: Path) -> dict[str, dict]:
    """Every record of a transfer but its seconds, by its path."""
    records = {}
    for name in ("cell.json", "selected.json"):
        for path in sorted((runs / "digits_demo" / "transfer").rglob(name)):
            record = json.loads(path.read_text())
            record.pop("seconds")
            records[str(path.relative_to(runs))] = record
    return records


@pytest.fixture(scope="module")
def whole(bench_top, tmp_path_factory) -> Path:
    """The runs folder of an undisturbed transfer."""
    runs = tmp_path_factory.mktemp("whole")
    assert command(bench_top, runs) == 0
    return runs


def test_the_best_cell_is_trained_again_on_all_images_and_counted_on_the_test_images(whole):
    records = numbers(whole)
    cells = [record for path, record in records.items() if path.endswith("cell.json")]
    (selected,) = [record for path, record in records.items() if path.endswith("selected.json")]
    assert len(cells) == 3 and {cell["images"] for cell in cells} == {
        20
    }  # round(.25 x 10) = 2 of each of 10 classes
    (best,) = [cell for cell in cells if all(cell[key] == selected[key] for key in ("lr", "weight_decay"))]
    assert best["validation"] == max(cell["validation"] for cell in cells)
    assert (selected["train_images"], selected["images"]) == (100, TEST_IMAGES)
    (result,) = read_results(whole / "digits_demo")
    assert result["kind"] == "transfer" and result["metrics"] == {"cifar10": selected["test"]}
    chosen = result["chosen"]["cifar10"]
    assert (chosen["lr"], chosen["weight_decay"]) == (best["lr"], best["weight_decay"])
    assert (result["images"], chosen["train_images"], chosen["metric"]) == (TEST_IMAGES, 100, "top-1")
    (grid_csv,) = (whole / "digits_demo").rglob("grid.csv")
    assert len(grid_csv.read_text().splitlines()) == 4
    assert not list((whole / "digits_demo").rglob("fit")), "checkpoints of finished cells are left behind"


def test_cells_are_compared_on_images_they_never_saw_and_the_chosen_one_learns_from_all(
    bench_top, tmp_path, monkeypatch
):
    calls, good = [], {0.01: 0.5, 0.1: 0.85, 0.03: 0.2}  # learning rate -> share of right answers

    def stand_in(encoder, train, indices, index, asked, setting, *_, **__):
        calls.append((setting, indices, index, asked))
        truth, count = torch.from_numpy(index.labels[asked]), round(good[setting.lr] * len(asked))
        said = torch.where(torch.arange(len(asked)) < count, truth, (truth + 1) % 10)
        return types.SimpleNamespace(logits=torch.nn.functional.one_hot(said, 10).float())

    monkeypatch.setattr(cells_module, "fit", stand_in)
    assert command(bench_top, tmp_path) == 0
    *cells, (setting, indices, index, asked) = calls
    for one, learned, where, validated in cells:
        assert sorted([*learned, *validated]) == list(range(100)) and where is cells[0][2]
        assert one.weight_decay == pytest.approx(0.001 / one.lr) and one.bn_momentum == pytest.approx(0.1)
        assert np.array_equal(validated, cells[0][3])
    assert (setting.lr, len(index)) == (0.1, TEST_IMAGES)
    assert indices.tolist() == list(range(100)) and asked.tolist() == list(range(TEST_IMAGES))
    (result,) = read_results(tmp_path / "digits_demo")
    assert result["metrics"]["cifar10"] == pytest.approx(20 / 23)  # round(0.85 x 23)
    assert result["chosen"]["cifar10"]["validation"] == pytest.approx(17 / 20)


def test_the_same_command_again_trains_nothing(whole, bench_top, monkeypatch, capsys):
    def no_fit(*_, **__):
        raise AssertionError("a finished cell was trained again")

    monkeypatch.setattr(cells_module, "fit", no_fit)
    before = numbers(whole)
    (folder,) = (whole / "digits_demo" / "transfer").glob("*/*/lr0.01-wd0.001")
    (folder / "fit").mkdir()  # of a process killed right after it had written the cell's record
    assert command(bench_top, whole) == 0
    assert numbers(whole) == before and not (folder / "fit").exists()
    told = capsys.readouterr().out
    assert told.count("    done before") == 3 and "chosen: lr" in told and "top-1" in told


class Killed(BaseException):
    """What kill -9 leaves behind: no handler ran, nothing was saved on the way out."""


def watch(monkeypatch, read: int = 0, how=None) -> list[int]:
    """Calls `how()` when the transfer asks for its `read`-th batch, counted over all cells; returns the steps asked."""
    asked, original = [], Loader.__call__

    def watched(loader, step):
        asked.append(step)
        if len(asked) == read:
            how()
        return original(loader, step)

    monkeypatch.setattr(Loader, "__call__", watched)
    return asked


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def kill() -> None:
    raise Killed


# A cell reads five batches to train on and one of validation images: 3 is inside the first cell, 6 at its end, 9 in the
# second, 21 in the retraining of the chosen one.
@pytest.mark.parametrize(
    ("read", "how"), [(3, terminate), (6, terminate), (9, terminate), (21, terminate), (9, kill), (21, kill)]
)
def test_a_transfer_stopped_anywhere_is_continued_to_the_bit(
    whole, bench_top, tmp_path, monkeypatch, capsys, read, how
):
    with monkeypatch.context() as patch:
        before = watch(patch, read, how)
        if how is terminate:
            assert command(bench_top, tmp_path) == 75
            assert "the same command" in capsys.readouterr().err
        else:
            with pytest.raises(Killed):
                command(bench_top, tmp_path)
    done = len([path for path in numbers(tmp_path) if path.endswith("cell.json")])
    assert not read_results(tmp_path / "digits_demo")
    with monkeypatch.context() as patch:
        after = watch(patch)
        assert command(bench_top, tmp_path) == 0
    assert capsys.readouterr().out.count("    done before") == done
    if how is terminate:
        assert len(before) + len(after) == 4 * 6, "batches were read twice: a stopped cell began again"
    assert numbers(tmp_path) == numbers(whole)
    ours, theirs = read_results(tmp_path / "digits_demo"), read_results(whole / "digits_demo")
    for result in (*ours, *theirs):
        result["chosen"]["cifar10"].pop("folder")
    assert ours == theirs


def test_shares_of_an_array_make_one_grid_and_the_last_one_chooses(whole, bench_top, tmp_path, capsys):
    told = []
    for part in (2, 3, 1):
        assert not read_results(tmp_path / "digits_demo")
        assert command(bench_top, tmp_path, "--cell", f"{part}/3") == 0
        told.append(capsys.readouterr().out)
    assert "2 of 3 cells are not finished" in told[0] and "1 of 3 cells are not finished" in told[1]
    assert "chosen: lr" in told[2]
    assert numbers(tmp_path) == numbers(whole)


def test_a_cell_that_another_process_trains_is_left_to_it(bench_top, tmp_path, whole, capsys):
    (cell,) = (whole / "digits_demo" / "transfer").glob("*/*/lr0.01-wd0.001")
    folder = tmp_path / cell.relative_to(whole)
    folder.mkdir(parents=True)
    with atomic_files.exclusive(folder / ".running"):
        assert command(bench_top, tmp_path) == 0
    told = capsys.readouterr().out
    assert "skipped: another process is running this cell" in told and "1 of 3 cells are not finished" in told
    assert command(bench_top, tmp_path) == 0
    assert numbers(tmp_path) == numbers(whole)


def test_a_cell_that_diverges_is_a_finding_and_the_others_go_on(bench_top, tmp_path, capsys):
    assert command(bench_top, tmp_path, "transfer.learning_rates=[1e30,0.01]") == 0
    told = capsys.readouterr().out
    assert told.count("    diverged: cross_entropy is") == 1 and "nan" in told and "chosen: lr 0.01" in told
    assert command(bench_top, tmp_path, "transfer.learning_rates=[1e30]") == 4
    assert "every cell of the grid diverged" in capsys.readouterr().err


def test_voc_is_chosen_on_val_and_counted_on_test_by_its_own_metric(bench_top, tmp_path):
    assert command(bench_top, tmp_path, "transfer.datasets=[voc07]", "transfer.learning_rates=[0.01]") == 0
    (result,) = read_results(tmp_path / "digits_demo")
    assert list(result["metrics"]) == ["voc07"] and 0 < result["metrics"]["voc07"] < 1
    chosen = result["chosen"]["voc07"]
    assert (chosen["images"], chosen["validation_images"], chosen["train_images"]) == (14, 12, 28)
    assert chosen["metric"] == "11-point mAP"
    # A data set that is counted later joins the same result.
    assert command(bench_top, tmp_path, "transfer.learning_rates=[0.01]") == 0
    (joined,) = read_results(tmp_path / "digits_demo")
    assert joined["chosen"]["voc07"] == chosen and joined["images"] == 14 + TEST_IMAGES
    assert set(joined["metrics"]) == {"cifar10", "voc07"}


def test_two_data_sets_counted_at_the_same_moment_both_keep_their_number(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    settings = dict.fromkeys(
        ("steps", "batch", "momentum", "size", "resize", "precision", "seed", "processes"), 1
    )
    encoder = types.SimpleNamespace(record=lambda: {"source": "a.pth", "step": None})

    def counted(name: str) -> None:
        task = types.SimpleNamespace(name=name, title="top-1")
        parts = {"task": task, "identity": settings, "encoder": encoder, "folder": tmp_path / name}
        number = {
            "test": 0.5,
            "images": 9,
            "lr": 1,
            "weight_decay": 0,
            "weight_decay_over_lr": 0,
            "train_images": 9,
        }
        save_result(
            types.SimpleNamespace(config=config, **parts), [], {"validation": 0.5, "images": 9}, number
        )

    other = threading.Thread(target=counted, args=["cifar100"])

    def read(run):
        found = read_results(run)
        if threading.current_thread() is not other:
            other.start()
            other.join(0.5)  # long enough to read and write, were it not made to wait
        return found

    monkeypatch.setattr("fastsuncet.evaluation.transfer_grid.run_grid.read_results", read)
    counted("cifar10")
    other.join()
    (result,) = read_results(config.run_folder)
    assert result["metrics"] == {"cifar10": 0.5, "cifar100": 0.5} and result["images"] == 18


def test_what_is_missing_is_named_before_the_first_cell(bench_top, tmp_path, capsys):
    assert command(bench_top, tmp_path, "transfer.datasets=[cifar10,cifar100]") == 3
    assert "no CIFAR-100 under" in capsys.readouterr().err
    assert command(bench_top, tmp_path, "transfer.batch_size=81") == 2
    assert "80 labeled images of cifar10 do not fill a batch of 81: at most 80" in capsys.readouterr().err
    assert command(bench_top, tmp_path, "--encoder", str(bench_top / "data")) == 5
    assert "holds no checkpoint" in capsys.readouterr().err
    assert not numbers(tmp_path)


def test_a_damaged_or_foreign_record_of_a_cell_is_refused(bench_top, tmp_path, whole, capsys):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / "digits_demo" / "transfer").glob("*/*/lr0.01-wd0.001/cell.json")
    record = json.loads(path.read_text())
    for damaged in ("{", json.dumps({**record, "identity": {}})):
        path.write_text(damaged)
        assert command(bench_top, tmp_path) == 5
        assert f"{path}" in capsys.readouterr().err


def on_two_ranks(rank, world_size, top: str, runs: str) -> list:
    """One rank's transfer; returns what its metric was asked: images, and a sum of the logits."""
    asked = []

    def top1(logits, index, numbers):
        asked.append([len(logits), len(set(numbers.tolist())), float(np.abs(logits).sum())])
        return tasks_module.top1(logits, index, numbers)

    tasks = open_task

    def watched(*arguments):
        return dataclasses.replace(tasks(*arguments), metric=top1)

    walk_module.open_task = watched
    assert command(Path(top), Path(runs), "transfer.learning_rates=[0.1]") == 0
    return asked


def test_two_ranks_count_every_image_once(bench_top, tmp_path):
    ranks = run_ranks(on_two_ranks, 2, str(bench_top), str(tmp_path))
    assert ranks[0] == ranks[1], "ranks disagree about the outputs"
    assert [row[:2] for row in ranks[0]] == [[20, 20], [TEST_IMAGES, TEST_IMAGES]]
    (result,) = read_results(tmp_path / "digits_demo")
    assert result["images"] == TEST_IMAGES and result["setting"]["processes"] == 2
