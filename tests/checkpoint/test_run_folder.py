"""What rank 0 does for all ranks, and the folder that a run holds."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from fastsuncet.checkpoint import run_folder
from fastsuncet.checkpoint.run_folder import RunStatus, exclusive_run_folder, on_rank_0, require_run_folder
from fastsuncet.distributed.place import Place
from fastsuncet.errors import CheckpointError
from tests.support.colors import ALONE
from tests.support.ranks import run_ranks


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
