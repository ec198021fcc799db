"""What all ranks do together, ranks that were not started alike, and the folder that a run holds."""

import contextlib
import errno
import json
import os
import re
import shutil
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch

from fastsuncet.checkpoint import run_folder
from fastsuncet.checkpoint.run_folder import RunStatus, exclusive_run_folder, on_rank_0, require_run_folder
from fastsuncet.commands import ranks
from fastsuncet.config import Config, load_config
from fastsuncet.data import dataset
from fastsuncet.distributed.place import Place
from fastsuncet.errors import CheckpointError, ConfigError
from pipelines.data_errors import DataError
from tests.support.colors import ALONE, write_colors
from tests.support.ranks import run_ranks
from tests.support.runs import CONFIGS, SMALL


def errors_of_rank_0_are_raised_on_every_rank(rank: int, world_size: int) -> None:
    place = Place(rank, world_size, torch.device("cpu"))
    assert tuple(run_folder.ERRORS) == (2, 3, 4, 5)
    for code, kind in run_folder.ERRORS.items():
        with pytest.raises(kind, match="^rank 0: why$" if rank else "^why$") as caught:
            on_rank_0(place, mock.Mock(side_effect=kind("why")))
        assert caught.value.exit_code == code
    assert on_rank_0(place, lambda: ["rank", rank]) == ["rank", 0]


@pytest.mark.slow
def test_on_rank_0_raises_its_errors_with_their_exit_code_on_every_rank():
    run_ranks(errors_of_rank_0_are_raised_on_every_rank, 2)


def replace(folder: Path) -> None:
    """Do what a user and a new run do."""
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / ".running").touch()


def test_status_says_on_a_full_disk_how_the_run_ended(small_disk):
    disk = small_disk("size=64k")
    status = RunStatus(disk / "status.json", ALONE)
    with pytest.raises(OSError, match="No space left"), status.recording():
        (disk / "other").write_bytes(bytes(1 << 20))
    record = json.loads(status.path.read_text())
    assert record["state"] == "failed" and "No space left" in record["message"]


@pytest.mark.parametrize("change", [shutil.rmtree, lambda folder: folder.rename(f"{folder}-moved"), replace])
def test_run_folder_that_is_not_the_locked_one_is_refused(change, tmp_path):
    """After an unmount the path leads to another folder, or nowhere, as it does here."""
    folder = tmp_path / "run"
    status = RunStatus(folder / "status.json", ALONE)
    with exclusive_run_folder(folder, ALONE):
        require_run_folder()
        change(folder)
        with pytest.raises(CheckpointError, match=r"run was removed, moved, replaced or unmounted"):
            require_run_folder()
        status.write("failed", 3)
        assert not status.path.exists()
    require_run_folder()  # it holds none any more


def test_run_folder_of_a_refused_run_is_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), exclusive_run_folder(tmp_path / "run", ALONE):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with exclusive_run_folder(tmp_path / "run", ALONE):
        (tmp_path / "run" / "config.yaml").touch()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".running", "config.yaml"}


def test_refuse_existing_takes_no_place_that_cannot_be_read_for_an_empty_one(tmp_path, monkeypatch):
    def stale(*_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with pytest.raises(CheckpointError, match=r"File name too long.*set --output to another one"):
        run_folder.refuse_existing(tmp_path / (300 * "x"), force=False)
    monkeypatch.setattr(os, "lstat", stale)
    with pytest.raises(CheckpointError, match=r"written: .*Stale file handle.*mount has disappeared"):
        run_folder.refuse_existing(tmp_path / "mine.npz", force=False)


# Only rank 1 has the override. Its key, and the two values.
OTHERS = {
    "optimization.lr=0.7": ("optimization.lr", 1.0, 0.7),
    "meta.seed=1": ("meta.seed", 0, 1),
    "data.augmentation.blur=0.2": ("data.augmentation.blur", 0.0, 0.2),
    "optimization.steps=9": ("optimization.steps", 10, 9),  # the others would wait for it
}


DEMO = CONFIGS / "digits_demo.yaml"


def require_refusal(config: Config, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)), ranks.as_rank(config):
        pass


def started_differently_is_refused(rank: int, world_size: int, folder: str) -> None:
    host = socket.gethostname()
    for override, (key, ours, theirs) in OTHERS.items():
        config = load_config(DEMO, [*SMALL, f"logging.folder={folder}", *([override] if rank else [])])
        both = f"{key}:\n  {ours!r} on rank 0, host {host}\n  {theirs!r} on rank 1, host {host}\n"
        require_refusal(config, both)
    config = load_config(DEMO, SMALL)
    ranks.digest_of_sources = lambda: f"of rank {rank}"  # in this process, which ends with the test
    require_refusal(config, "digest of fastsuncet's sources:\n  'of rank 0' on rank 0")
    ranks.versions = lambda: {"torch": f"2.{rank}"}
    require_refusal(config, "version of torch (1 more differ):\n  '2.0' on rank 0")


# What is different in the lists of rank 1, and what is said of it.
LISTS = {
    "equal": "",
    "labels": r"labels of the training images \(1 more differ\):",
    "split": "labeled split:",
    "no split": r"split\.txt",
    "no labels": r"labels\.csv",
}


def other_lists_are_refused(rank: int, world_size: int, folder: str) -> None:
    """Open the same images from local lists: equal ones, then lists that are other or wrong on rank 1."""
    place, names = Place(rank, 2, torch.device("cpu")), [f"{c}/{i}.png" for c in "rgb" for i in range(5)]
    for case, said in LISTS.items():
        local, other = Path(folder, f"{case}-{rank}"), case if rank else ""
        local.mkdir()
        rows = "".join(f"{name},{name[0]}\n" for name in names)
        if other == "labels":
            rows = rows.replace("r/3.png,r", "r/3.png,g")
        (local / "labels.csv").write_text("" if other == "no labels" else f"file,label\n{rows}")
        if other != "no split":
            (local / "split.txt").write_text("\n".join(names[: 9 + (other == "split")]) + "\n")
        lists = ("data.kind=csv", f"data.csv={local}/labels.csv", "data.train=train", "data.validation=null")
        split = f"data.split={{kind: names, file: {local}/split.txt}}"
        config = load_config(Path(folder, "colors.yaml"), [*lists, split])
        of_rank_1 = "^rank 1: .*" if case.startswith("no") and not rank else ""
        refused = pytest.raises(DataError, match=of_rank_1 + said) if said else contextlib.nullcontext()
        with refused:
            dataset.open_images(config, place, validation=False)


@pytest.mark.slow
def test_ranks_started_differently_are_refused_before_the_first_step(tmp_path):
    run_ranks(started_differently_is_refused, 2, str(tmp_path))
    run_ranks(other_lists_are_refused, 2, str(write_colors(tmp_path / "colors")))
    assert not list(tmp_path.glob("*/status.json"))
