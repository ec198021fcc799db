"""What all ranks do together, ranks that were not started alike, and the folder that a run holds."""

import errno
import json
import os
import shutil
import socket
from pathlib import Path

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


def raised_on_rank(rank: int, world_size: int) -> list[list]:
    """Return the exit code and the text of each error of rank 0, as this rank raises it."""
    found, place = [], Place(rank, world_size, torch.device("cpu"))
    for error in [kind("why") for kind in run_folder.ERRORS.values()]:

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            on_rank_0(place, fail)
        found.append([caught.value.exit_code, str(caught.value)])
    return [*found, on_rank_0(place, lambda: ["rank", rank])]


@pytest.mark.slow
def test_on_rank_0_raises_its_errors_with_their_exit_code_on_every_rank():
    assert run_ranks(raised_on_rank, 2) == [
        [*([code, text] for code in (2, 3, 4, 5)), ["rank", 0]] for text in ("why", "rank 0: why")
    ]


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


def test_refuse_existing_takes_no_failing_file_server_for_an_empty_place(tmp_path, monkeypatch):
    def stale(*_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "lstat", stale)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*Stale file handle"):
        run_folder.refuse_existing(tmp_path / "mine.npz", force=False)


# Only rank 1 has the override. Its key, and the two values.
OTHERS = {
    "optimization.lr=0.7": ("optimization.lr", 1.0, 0.7),
    "meta.seed=1": ("meta.seed", 0, 1),
    "data.augmentation.blur=0.2": ("data.augmentation.blur", 0.0, 0.2),
    "optimization.steps=9": ("optimization.steps", 10, 9),  # the others would wait for it
}


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as caught, ranks.as_rank(config):
        pass
    return str(caught.value)


def started_differently(rank: int, world_size: int, folder: str) -> list[str]:
    found = []
    for override in OTHERS:
        overrides = [*SMALL, f"logging.folder={folder}", *([override] if rank else [])]
        found.append(refusal(load_config(CONFIGS / "digits_demo.yaml", overrides)))
    config = load_config(CONFIGS / "digits_demo.yaml", SMALL)
    ranks.digest_of_sources = lambda: f"of rank {rank}"  # in this process, which ends with the test
    found.append(refusal(config))
    ranks.versions = lambda: {"torch": f"2.{rank}"}
    found.append(refusal(config))
    return found + with_other_lists(rank, Path(folder, "colors"))


def with_other_lists(rank: int, folder: Path) -> list[str]:
    """Open the same images from local lists: equal ones, then lists that are other or wrong on rank 1."""
    place, found = Place(rank, 2, torch.device("cpu")), []
    names = [f"{c}/{i}.png" for c in "rgb" for i in range(5)]
    for case in ("equal", "labels", "split", "no split", "no labels"):
        local = folder / f"{case}-{rank}"
        local.mkdir()
        labels = [name[0] for name in names]
        if case == "labels" and rank:
            labels[3] = "g"
        rows = "".join(f"{name},{label}\n" for name, label in zip(names, labels))
        (local / "labels.csv").write_text("" if case == "no labels" and rank else f"file,label\n{rows}")
        (local / "split.txt").write_text("\n".join(names[: 9 + (case == "split" and rank)]) + "\n")
        if case == "no split" and rank:
            (local / "split.txt").unlink()
        lists = ("data.kind=csv", f"data.csv={local}/labels.csv", "data.train=train", "data.validation=null")
        split = f"data.split={{kind: names, file: {local}/split.txt}}"
        config = load_config(folder / "colors.yaml", [*lists, split])
        try:
            dataset.open_images(config, place, validation=False)
            found.append("")
        except DataError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
def test_ranks_started_differently_are_refused_before_the_first_step(tmp_path):
    write_colors(tmp_path / "colors")
    ranks = run_ranks(started_differently, 2, str(tmp_path))
    # Every rank ends, none waits.
    assert ranks[0] == [found if found in ranks[0] else f"rank 1: {found}" for found in ranks[1]]
    host = socket.gethostname()
    *configs, sources, version, equal, labels, split, no_split, no_labels = ranks[0]
    assert "digest of fastsuncet's sources:\n  'of rank 0' on rank 0" in sources
    assert "version of torch (1 more differ):\n  '2.0' on rank 0" in version
    for message, (key, ours, theirs) in zip(configs, OTHERS.values(), strict=True):
        assert f"{key}:\n  {ours!r} on rank 0, host {host}\n  {theirs!r} on rank 1, host {host}\n" in message
    assert equal == "" and "labels of the training images (1 more differ):" in labels
    assert "labeled split:" in split
    assert no_split.startswith("rank 1: ") and "split.txt" in no_split
    assert no_labels.startswith("rank 1: ") and "labels.csv" in no_labels
    assert not list(tmp_path.glob("*/status.json"))
