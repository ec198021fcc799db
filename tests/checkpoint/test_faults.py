"""A save is interrupted: by a kill at every system call, by a power cut, by the disk. What is left must load.

`tests/training/test_killed.py` kills the process of a real run at random moments.
"""

import contextlib
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastsuncet.checkpoint import manager
from fastsuncet.checkpoint.run_folder import RunStatus, exclusive_run_folder, require_run_folder
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import CheckpointError
from pipelines import atomic_files
from tests.support.checkpoints import assert_whole, save
from tests.support.power_cut import CALLS, intercept, watch
from tests.support.runs import Killed
from tools.bench import slow_files

pytestmark = pytest.mark.slow


def load_silently(folder: Path) -> manager.LoadedCheckpoint:
    """Return the newest checkpoint, which must be whole and found without passing over a damaged one."""
    loaded = manager.load_newest(folder, say=pytest.fail)
    assert_whole(loaded)
    return loaded


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


SCENARIOS = {  # steps saved before, their keep; the step saved next
    "the first of all": ((), 2, 1),
    "one more, the oldest goes": ((1, 2), 2, 3),
    "one more, in place of the only one": ((2,), 1, 3),
    "the only one again": ((2,), 1, 2),
}


def prepare(folder: Path, scenario: str) -> tuple[set[int | None], int, int]:
    """Fill `folder`; return the steps (None: no checkpoint) that can be newest after a cut, the next step, its keep."""
    before, keep, step = SCENARIOS[scenario]
    folder.mkdir()
    for number in before:
        save(folder, number, keep)
    return {before[-1] if before else None, step}, step, keep


# ------------------------------------------------------------------------------------------------------- kill


def save_and_die(folder: Path, step: int, keep: int, fatal: int, half: bool = False) -> list[str]:
    """Save, but die just before the system call number `fatal`, or half through a write; return the calls before.

    What is on the disk is what kill -9 would leave: from that call on, every call fails without any effect.
    """
    calls = []

    def hook(name, call, arguments, keywords):
        if len(calls) == fatal and half:
            call(arguments[0], arguments[1][: len(arguments[1]) // 2])
        calls.append(name)
        if len(calls) > fatal:
            raise Killed
        return call(*arguments, **keywords)

    with intercept(hook), contextlib.suppress(Killed):
        save(folder, step, keep)
    return calls[:fatal]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kill_at_every_call_leaves_the_old_checkpoint_or_the_new_one(tmp_path, scenario):
    possible, step, keep = prepare(tmp_path / "before", scenario)
    shutil.copytree(tmp_path / "before", tmp_path / "undisturbed")
    calls = save_and_die(tmp_path / "undisturbed", step, keep, fatal=1000)
    # What this test is about must be in there: three files and `latest`, each synced, and the two renames.
    assert calls.count("write") == 4
    assert calls.count("fsync") >= 7
    assert calls.count("rename") + calls.count("replace") >= 2
    found = set()
    for fatal, name in enumerate(calls):
        for half in [False, True] if name == "write" else [False]:
            folder = tmp_path / f"{fatal}_{half}"
            shutil.copytree(tmp_path / "before", folder)
            assert save_and_die(folder, step, keep, fatal, half) == calls[:fatal]
            loaded = manager.load_newest(folder, say=pytest.fail)
            found.add(loaded and loaded.step)
            for path in folder.glob("step_*"):  # what has a name is whole, also what was being removed
                assert_whole(manager.load(path))
            # The same command again: what the dead writer left is gone after the next save.
            save(folder, step + 1, keep=1)
            assert names(folder) == {".lock", "latest", f"step_{step + 1:08d}"}
            assert load_silently(folder).step == step + 1
            shutil.rmtree(folder)
    assert found == possible  # cut before the new one counted, and after


# -------------------------------------------------------------------------------------------------- power cut


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_power_cut_after_any_call_leaves_the_old_checkpoint_or_the_new_one(tmp_path, scenario):
    folder = tmp_path / "run"
    possible, step, keep = prepare(folder, scenario)
    disks = tmp_path / "disks"
    disks.mkdir()
    found = set()

    def look(watched):
        for _, disk in watched.disks(disks):
            loaded = manager.load_newest(disk, say=pytest.fail)
            found.add(loaded and loaded.step)
            if loaded is not None:
                assert_whole(loaded)
            shutil.rmtree(disk)

    with watch(folder, look) as watched:
        save(folder, step, keep)
    assert found == possible
    assert watched.calls.count("fsync") >= 7
    # Once save has returned, the new one is what any disk holds.
    for kind, disk in watched.disks(disks):
        assert load_silently(disk).step == step, kind


def test_power_cut_model_forgets_what_was_not_synced(tmp_path):
    """The oracle's own test: without fsync both worst disks are worse than the file system looks."""
    folder = tmp_path / "run"
    folder.mkdir()
    with watch(folder, lambda watched: None) as watched:
        descriptor = os.open(folder / "new", os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, b"text")
        os.close(descriptor)
        os.rename(folder / "new", folder / "name")
    eager, lazy = (disk for _, disk in watched.disks(tmp_path))
    assert (folder / "name").read_bytes() == b"text"
    assert (eager / "name").read_bytes() == b""
    assert names(lazy) == set()


def test_power_cut_after_make_folder_leaves_it_and_its_parents(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    with watch(folder, lambda watched: None) as watched:
        atomic_files.make_folder(folder / "runs" / "name" / "checkpoints")
    assert all((disk / "runs/name/checkpoints").is_dir() for _, disk in watched.disks(tmp_path))


# ------------------------------------------------------------------------------------------------------- disk


def assert_refused_and_untouched(folder: Path, step: int, *words: str, rows: int = 64) -> None:
    """Saving fails with all of `words` in the message, and leaves everything as it was."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as caught:
        save(folder, step, keep=2, rows=rows)
    for word in (f"step_{step:08d}", str(folder), *words):
        assert word in str(caught.value)
    assert caught.value.exit_code == 5
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert load_silently(folder).step < step


def filled(leave: int):
    """Return what fills a disk up to `leave` bytes."""

    def fill(folder: Path, mount) -> None:
        status = os.statvfs(folder)
        (folder / "rubbish").write_bytes(bytes(status.f_bavail * status.f_frsize - leave))

    return fill


def without_inodes(folder: Path, mount) -> None:
    for number in range(os.statvfs(folder).f_ffree - 2):  # room for the new folder and one of its files
        (folder / f"rubbish_{number}").touch()


FULL = ("No space left on device", "df -h", "as they were")
TOO_SMALL = ("is 1.1 MB", "(2.1 MB) of free", "has 2.0 MB", "Free 0.1 MB", "checkpoint.keep")
DISKS = {  # options of the disk, what happens to it, words of the message, rows of the weights
    **{f"full but for {leave}": ("size=400k", filled(leave), FULL, 64) for leave in (0, 4096, 3 * 4096)},
    "no inodes": ("size=40m,nr_inodes=12", without_inodes, ("No space left on device", "df -i"), 64),
    "read only": ("size=40m", lambda _, mount: mount("ro"), ("Read-only file system", "logging.folder"), 64),
    "too small, seen before writing": ("size=4m", filled(2_000_000), TOO_SMALL, 4100),
}


@pytest.mark.parametrize("disk", DISKS)
def test_disk_that_refuses_a_save_keeps_what_was_there(small_disk, monkeypatch, disk):
    options, spoil, words, rows = DISKS[disk]
    folder = small_disk(options)
    save(folder, 1, rows=64)
    spoil(folder, small_disk)
    with monkeypatch.context() as patch:
        if "full" in disk:
            # The check for free space sees no end, as it does under a quota or when another program writes meanwhile.
            patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 60))
        assert_refused_and_untouched(folder, 2, *words, rows=rows)
    if "full" in disk:
        (folder / "rubbish").unlink()
        save(folder, 2, rows=64)
        assert load_silently(folder).step == 2


def test_disk_that_is_unmounted_under_a_run_ends_it_and_nothing_is_written_below(small_disk):
    disk = small_disk("size=4m")
    place = Place(0, 1, 0, torch.device("cpu"))
    with exclusive_run_folder(disk / "run", place):
        require_run_folder()
        subprocess.run(["umount", "-l", str(disk)], check=True)  # what uses it does not hold it
        with pytest.raises(CheckpointError, match=r"run was removed, moved, replaced or unmounted"):
            require_run_folder()
        RunStatus(disk / "run" / "status.json", place).write("failed", 3)
    assert list(disk.iterdir()) == []


def test_limit_on_file_sizes_is_named(tmp_path):
    save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert_refused_and_untouched(tmp_path, 2, "File too large", "ulimit -f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_io_error_at_any_call_leaves_a_good_checkpoint_and_no_rubbish(tmp_path):
    """The save fails with the reason, or (in the cleanup only) succeeds and reports what it could not remove."""
    before = tmp_path / "before"
    before.mkdir()
    for step in (1, 2):
        save(before, step)
    outcomes, calls, fatal = set(), [], 0
    while fatal <= len(calls):
        folder = tmp_path / str(fatal)
        shutil.copytree(before, folder)
        outcome, calls = _save_with_io_error(folder, fatal)
        outcomes.add(outcome)
        assert load_silently(folder).path == folder / "step_00000002"  # not only under its hidden name
        save(folder, 3, keep=1)
        assert names(folder) == {".lock", "latest", "step_00000003"}
        fatal += 1
    assert fatal > 20
    assert outcomes == {"refused", "saved", "saved, and something said"}


def _save_with_io_error(folder: Path, fatal: int) -> tuple[str, list[str]]:
    """Save step 2 again with keep=1 while system call number `fatal` fails; return the outcome and the calls."""
    calls, lines = [], []

    def hook(name, call, arguments, keywords):
        calls.append(name)
        if len(calls) == fatal + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*arguments, **keywords)

    with intercept(hook, CALLS[1:]):  # opening a file that cannot be opened is tested with the disks
        try:
            save(folder, 2, keep=1, say=lines.append)
        except CheckpointError as refusal:
            error = str(refusal)
        else:
            return "saved, and something said" if lines else "saved", calls
    assert "Input/output error" in error and "dmesg" in error
    return "refused", calls


# ------------------------------------------------------------------------------------------------ file server


def faulty(call: str, error: int, late: int) -> list[dict[str, str]]:
    """Return faults: each of the first eight calls of one kind ends with an error, once."""
    kind = {"FAULT_CALL": call, "FAULT_ERRNO": str(error), "FAULT_LATE": str(late), "FAULT_US": "1000"}
    return [{**kind, "FAULT_AT": str(number)} for number in range(1, 9)]


@pytest.mark.skipif(slow_files.COMPILER is None, reason="no C compiler")
def test_save_and_load_on_a_wrong_file_server_give_whole_checkpoints(tmp_path):
    """Also where a call has happened and only its answer is lost."""
    calls = ("open", "read", "write", "fsync", "close", "rename", "mkdir", "stat")
    faults = [
        fault
        for call in calls
        for error in (errno.EIO, errno.ESTALE)
        for late in (0, 1)
        for fault in faulty(call, error, late)
    ] + [{"SHORT_READS": "7"}]
    command = [sys.executable, "-m", "tests.support.faulty_server", str(tmp_path), *map(json.dumps, faults)]
    done = subprocess.run(command, env=slow_files.preloaded(tmp_path), capture_output=True, text=True)
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == len(faults), done.stderr
    for fault, outcome in zip(faults, outcomes, strict=True):
        # It can be refused and complete, where the answer of its last calls was lost.
        assert outcome["newest"] == 2 if outcome["save"] is None else outcome["newest"] in (1, 2), fault
        assert outcome["read"] in (1, 2) or "cannot be" in outcome["read"], (fault, outcome)
        assert outcome["after"] == 3, fault
    kinds = {fault.get("FAULT_CALL") for fault, outcome in zip(faults, outcomes) if outcome["save"]}
    assert kinds >= {"open", "write", "fsync", "rename", "mkdir"}
    assert outcomes[-1] == {"save": None, "newest": 2, "read": 2, "after": 3}
