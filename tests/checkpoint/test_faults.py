"""A save is cut off: by kill -9 at every system call, by a power cut, by the disk. What is left must load."""

import errno
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from fastsuncet.checkpoint import atomic_files, manager
from fastsuncet.errors import CheckpointError
from tests.support.power_cut import watch

# Children are forked from a clean server that has torch imported: a fresh interpreter each would take
# seconds.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.checkpoint.test_faults"])


def content(step: int) -> dict:
    """What a run would save at `step`: every value depends on the step, so that a mixture is found out."""
    weights = torch.full((64, 32), float(step)) + torch.arange(32)
    return {
        "model": {"weight": weights, "count": torch.tensor(step)},
        "state": {"momentum": [weights / 2], "step": step},
        "meta": {"config": {"seed": 0}, "ledger": {"images": 10 * step}},
    }


def save(folder: Path, step: int, keep: int = 2) -> Path:
    return manager.save(folder, step, keep=keep, **content(step))


def assert_whole(loaded: manager.Checkpoint) -> None:
    wanted = content(loaded.step)
    assert loaded.model.keys() == wanted["model"].keys()
    assert all(torch.equal(loaded.model[name], wanted["model"][name]) for name in loaded.model)
    assert torch.equal(loaded.state["momentum"][0], wanted["state"]["momentum"][0])
    assert loaded.state["step"] == loaded.step
    assert loaded.meta["ledger"] == wanted["meta"]["ledger"]


def load_silently(folder: Path) -> manager.Checkpoint:
    """The newest checkpoint, whole, found without passing over a damaged one."""
    lines = []
    loaded = manager.load_newest(folder, say=lines.append)
    assert lines == []
    assert_whole(loaded)
    return loaded


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def a_run(folder: Path, scenario: str) -> tuple[set[int], int, int]:
    """Fills `folder`; returns the steps there may be after a cut, the step saved next, and its keep."""
    if scenario == "the first of all":
        folder.mkdir()
        return set(), 1, 2
    if scenario == "one more, the oldest goes":
        for step in (1, 2):
            save(folder, step)
        return {2}, 3, 2
    save(folder, 2, keep=1)
    return {2}, 3 if scenario == "one more, in place of the only one" else 2, 1


SCENARIOS = [
    "the first of all",
    "one more, the oldest goes",
    "one more, in place of the only one",
    "the only one again",
]


# -----------------------------------------------------------------------------------------------------------9


def _save_and_die(folder: Path, step: int, keep: int, fatal: int, half: bool, pipe) -> None:
    """In a child: saves, and dies just before the system call number `fatal`, or half through a write."""
    calls = []

    def deadly(name: str, real):
        def call(*arguments, **keywords):
            if len(calls) == fatal:
                if half:
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            calls.append(name)
            return real(*arguments, **keywords)

        return call

    for name in ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, deadly(name, getattr(os, name)))
    manager.save(folder, step, keep=keep, **content(step))
    pipe.send(calls)


def in_a_child(*arguments) -> tuple[int, list[str] | None]:
    """(exit code, what the child sent) of _save_and_die in a process of its own."""
    receiver, sender = SERVER.Pipe(duplex=False)
    child = SERVER.Process(target=_save_and_die, args=(*arguments, sender))
    child.start()
    sender.close()
    child.join()
    sent = None
    if child.exitcode == 0:
        sent = receiver.recv()
    receiver.close()
    return child.exitcode, sent


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kill_9_at_every_system_call_of_a_save_leaves_the_old_checkpoint_or_the_new_one(tmp_path, scenario):
    old, step, keep = a_run(tmp_path / "before", scenario)
    shutil.copytree(tmp_path / "before", tmp_path / "undisturbed")
    code, calls = in_a_child(tmp_path / "undisturbed", step, keep, -1, False)
    assert code == 0
    # What this test is about must be in there: three files and `latest`, each synced, and the two renames.
    assert calls.count("write") == 4
    assert calls.count("fsync") >= 7
    assert calls.count("rename") + calls.count("replace") >= 2
    found = set()
    for fatal, name in enumerate(calls):
        for half in [False, True] if name == "write" else [False]:
            folder = tmp_path / f"{fatal}_{half}"
            shutil.copytree(tmp_path / "before", folder)
            code, _ = in_a_child(folder, step, keep, fatal, half)
            assert code == -signal.SIGKILL
            if not old and manager.load_newest(folder) is None:
                found.add(None)
            else:
                loaded = load_silently(folder)
                found.add(loaded.step)
                assert loaded.step in old | {step}
            for path in folder.glob("step_*"):  # what has a name is whole, also what was being removed
                assert_whole(manager.load(path))
            # The same command again: what the dead writer left is gone after the next save.
            save(folder, step + 1, keep=1)
            assert names(folder) == {".lock", "latest", f"step_{step + 1:08d}"}
            assert load_silently(folder).step == step + 1
            shutil.rmtree(folder)
    assert found == (old or {None}) | {step}  # cut before it counted, and after


def _save_for_ever(folder: Path) -> None:
    loaded = manager.load_newest(folder)
    step = 0 if loaded is None else loaded.step
    while True:
        step += 1
        save(folder, step)


def test_ten_kills_at_random_moments_lose_no_checkpoint_that_was_complete(tmp_path):
    moments = random.Random(0)
    reached = 0
    for _ in range(10):
        child = SERVER.Process(target=_save_for_ever, args=(tmp_path,))
        child.start()
        # The first save proves that the child got over what the last one left behind.
        deadline = time.monotonic() + 60
        while (reached_now := _latest_step(tmp_path)) <= reached:
            assert child.is_alive() and time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.05))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        loaded = load_silently(tmp_path)
        assert loaded.step >= reached_now
        reached = loaded.step
    assert reached >= 10


def _latest_step(folder: Path) -> int:
    try:
        return int((folder / "latest").read_text().removeprefix("step_"))
    except FileNotFoundError:
        return 0


# -------------------------------------------------------------------------------------------------- power cut


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_power_cut_after_any_call_leaves_the_old_checkpoint_or_the_new_one(tmp_path, scenario):
    folder = tmp_path / "run"
    old, step, keep = a_run(folder, scenario)
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
    assert found == (old or {None}) | {step}
    assert watched.calls.count("fsync") >= 7
    # Once save has returned, the new one is what any disk holds.
    for kind, disk in watched.disks(disks):
        assert load_silently(disk).step == step, kind


def test_the_model_of_a_power_cut_forgets_what_was_not_synced(tmp_path):
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


# ------------------------------------------------------------------------------------------------------- disk


@pytest.fixture
def small_disk(tmp_path):
    """mount(options) gives a folder on a file system of its own; skips where mounting is not allowed."""
    mounted = []

    def mount(options: str) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if mounted:
            command = ["mount", "-o", f"remount,{options}", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("no mount command here")
        if done.returncode:
            pytest.skip(f"mounting a small disk is not allowed here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    if mounted:
        subprocess.run(["umount", "-l", str(mounted[0])], check=True)


@pytest.fixture
def blind(monkeypatch):
    """The check for free space sees no end, as it does under a quota or with another writer beside it."""
    monkeypatch.setattr(atomic_files, "free_bytes", lambda folder: 1 << 60)


def fill(folder: Path, leave: int) -> Path:
    """Fills the disk up to `leave` bytes."""
    rubbish = folder / "rubbish"
    with open(rubbish, "wb") as stream:
        stream.write(bytes(shutil.disk_usage(folder).free - leave))
    return rubbish


def assert_refused_and_untouched(folder: Path, step: int, *words: str) -> None:
    """Saving fails with all of `words` in the message, and leaves everything as it was."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as caught:
        save(folder, step)
    for word in (f"step_{step:08d}", str(folder), *words):
        assert word in str(caught.value)
    assert caught.value.exit_code == 5
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert load_silently(folder).step < step


@pytest.mark.parametrize("leave", [0, 4096, 3 * 4096])
def test_a_disk_that_fills_up_in_the_middle_of_a_save_keeps_what_was_there(small_disk, blind, leave):
    folder = small_disk("size=400k")
    save(folder, 1)
    rubbish = fill(folder, leave)
    assert_refused_and_untouched(folder, 2, "No space left on device", "df -h", "as they were")
    rubbish.unlink()
    save(folder, 2)
    assert load_silently(folder).step == 2


def test_a_disk_without_inodes_keeps_what_was_there(small_disk):
    folder = small_disk("size=40m,nr_inodes=12")
    save(folder, 1)
    spare = os.statvfs(folder).f_ffree - 2  # room for the new folder and one of its files
    for number in range(spare):
        (folder / f"rubbish_{number}").touch()
    assert_refused_and_untouched(folder, 2, "No space left on device", "df -i")


def test_a_read_only_disk_says_so(small_disk):
    folder = small_disk("size=40m")
    save(folder, 1)
    small_disk("ro")
    assert_refused_and_untouched(folder, 2, "Read-only file system", "logging.folder")


def test_too_little_free_space_is_refused_before_a_byte_is_written_with_the_numbers(small_disk):
    folder = small_disk("size=4m")
    save(folder, 1)
    fill(folder, 2_000_000)
    assert_refused_and_untouched(folder, 2, "1.1 MB", "2.1 MB", "2.0 MB", "Free 0.1 MB", "checkpoint.keep")


def test_a_limit_on_file_sizes_is_named(tmp_path):
    save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert_refused_and_untouched(tmp_path, 2, "File too large", "ulimit -f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_io_error_at_any_call_leaves_a_checkpoint_that_loads_and_no_rubbish(tmp_path, monkeypatch):
    """The save fails with the reason, or (clearing up only) succeeds and says what it could not remove."""
    before = tmp_path / "before"
    before.mkdir()
    for step in (1, 2):
        save(before, step)
    outcomes, calls, fatal = set(), [], 0
    while fatal <= len(calls):
        folder = tmp_path / str(fatal)
        shutil.copytree(before, folder)
        outcome, calls = _save_with_io_error(folder, fatal, monkeypatch)
        outcomes.add(outcome)
        assert load_silently(folder).path == folder / "step_00000002"  # not only under its hidden name
        save(folder, 3, keep=1)
        assert names(folder) == {".lock", "latest", "step_00000003"}
        fatal += 1
    assert fatal > 20
    assert outcomes == {"refused", "saved", "saved, and something said"}


def _save_with_io_error(folder: Path, fatal: int, monkeypatch) -> tuple[str, list[str]]:
    """Saves step 2 again with keep=1 while system call number `fatal` fails: the outcome, and the calls."""
    calls, lines = [], []

    def failing(name: str, real):
        def call(*arguments, **keywords):
            calls.append(name)
            if len(calls) == fatal + 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments, **keywords)

        return call

    with monkeypatch.context() as patch:
        for name in ("write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, failing(name, getattr(os, name)))
        try:
            manager.save(folder, 2, keep=1, say=lines.append, **content(2))
        except CheckpointError as refusal:
            error = refusal
        else:
            return "saved, and something said" if lines else "saved", calls
    assert "Input/output error" in str(error)
    assert "dmesg" in str(error)
    return "refused", calls
