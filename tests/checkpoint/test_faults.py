"""A writer is interrupted: by a kill at every system call, by a power cut, by the disk. What is left must load.

`tests/training/test_killed.py` kills the process of a real run at random moments.
"""

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastsuncet import cli
from fastsuncet.checkpoint import manager
from fastsuncet.errors import CheckpointError
from pipelines import atomic_files
from tests.support import faulty_files
from tests.support.checkpoints import assert_whole, save
from tests.support.exports import save_run
from tests.support.power_cut import CALLS, crash_at_every_syscall, intercept, watch
from tests.support.writers import REFUSALS, WRITERS, Writer, images

pytestmark = pytest.mark.slow


def load_silently(folder: Path) -> manager.LoadedCheckpoint:
    """Return the newest checkpoint, which must be whole and found without passing over a damaged one."""
    loaded = manager.load_newest(folder, say=pytest.fail)
    assert_whole(loaded)
    return loaded


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


ROWS = ("features.npz", "predictions.csv")  # written by NumPy and Python, out of sight of os.write
CASES = [  # what is written, the numbers before, that which is written next
    ("checkpoint", (), 1),
    ("checkpoint", (1, 2), 3),  # number 3 is the only one that stays
    ("checkpoint", (2,), 2),  # in place of itself
    ("index", (), 1),
    ("index", (1,), 2),
    ("code", (1,), 2),
    ("pack", (), 1),
    ("export", (1,), 2),
    ("export folder", (1,), 2),
    ("features.npz", (1,), 2),
    ("predictions.csv", (1,), 2),
]


def prepare(folder: Path, writer: Writer, numbers: tuple[int, ...]) -> None:
    images()  # written once, and not by what is crashed
    folder.mkdir(parents=True)
    for number in numbers:
        writer.write(folder, number)


def require_next(name: str, folder: Path, number: int) -> None:
    """Run the same command again, and another one where it matters: what a dead writer left is gone or hidden."""
    writer = WRITERS[name]
    # Where each number has its own name, number 3 takes the place of all.
    for each in (number, 3) if name in ("checkpoint", "pack") else (number,):
        writer.write(folder, each)
        assert writer.read(folder) == each
    assert names(folder) - {"1", ".lock-1"} == writer.names  # the first two are of a pack
    assert not list(folder.rglob(".tmp-*"))


# --------------------------------------------------------------------------------------- kill and power cut


@pytest.mark.parametrize(("name", "before", "number"), CASES)
def test_crash_at_every_call_leaves_the_old_content_or_the_new(tmp_path, name, before, number):
    writer, found = WRITERS[name], set()
    prepare(tmp_path / "before", writer, before)

    def look(folder: Path) -> None:
        found.add(writer.read(folder))
        for path in folder.glob("step_*"):  # what has a name is whole, also what was being removed
            assert_whole(manager.load(path))
        require_next(name, folder, number)

    calls = crash_at_every_syscall(
        lambda folder: writer.write(folder, number), tmp_path / "before", look, power_cuts=name not in ROWS
    )
    # Cut before the new one counted, and after. Between, an export is not there, or is weights without a record.
    found -= {None} if name.startswith("export") else set()
    assert found == {before[-1] if before else None, number}
    # What this test is about must be in there: each file is written, synced and renamed, and so is its folder.
    least = {"checkpoint": (4, 7, 2), "index": (1, 2, 1), "code": (1, 2, 1), "pack": (2, 6, 3)}
    least |= {"export": (2, 4, 2), "export folder": (4, 6, 2)}
    least = least.get(name, (2, 5, 3))
    assert [calls.count("write") >= least[0], calls.count("fsync") >= least[1]] == [True, True], calls
    assert calls.count("rename") + calls.count("replace") >= least[2]


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
TOO_SMALL = ("is 1.1 MB", "(2.1 MB) of free", "has 2.0 MB", "Free 0.1 MB", "logging.folder")
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


CONFIG = """\
data: {kind: images, root: IMAGES, backend: torchvision}
criterion: {temperature: 0.1, unsupervised_batch_size: 2}
optimization: {epochs: 1, lr: 1.0}
logging: {folder: runs}
"""


@pytest.mark.parametrize("command", ["embed", "data pack"])
def test_command_on_a_full_disk_ends_with_5_and_continues_on_a_larger_one(
    small_disk, tmp_path, monkeypatch, capsys, command
):
    disk = small_disk("size=8k")
    save_run(tmp_path / "run", "model.name=resnet_tiny", "data.augmentation.size=32")
    (tmp_path / "run.yaml").write_text(CONFIG.replace("IMAGES", str(images().root)))
    words = {
        "embed": ["embed", str(tmp_path / "run"), str(images().root), "--output", str(disk / "output.npz")],
        "data pack": ["data", "pack", str(tmp_path / "run.yaml"), "--output", str(disk / "output")],
    }[command]
    # As under a quota: the disk is not known to be small before it is full.
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 60))
    for _ in range(2):
        assert cli.main(words) == 5
        assert re.search(r"cannot .*: .*No space left on device.*df -h", capsys.readouterr().err)
        assert not Path(words[-1]).exists()
    small_disk("size=8m")
    assert cli.main(words) == 0
    assert names(disk) == {Path(words[-1]).name}


def test_limit_on_file_sizes_is_named(tmp_path):
    save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert_refused_and_untouched(tmp_path, 2, "File too large", "ulimit -f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("name", "before", "number"), [case for case in CASES if case[1] or case[0] == "pack"]
)
def test_io_error_at_any_call_leaves_good_content_and_no_rubbish(tmp_path, capsys, name, before, number):
    """The writer fails with the reason, or (in the cleanup only) succeeds and reports what it could not remove."""
    writer, outcomes, calls, fatal = WRITERS[name], set(), [], 0
    prepare(tmp_path / "before", writer, before)

    def hook(kind, call, arguments, keywords):
        calls.append(kind)
        if len(calls) == fatal + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*arguments, **keywords)

    while fatal <= len(calls):
        calls.clear()
        folder = tmp_path / str(fatal)
        shutil.copytree(tmp_path / "before", folder)
        capsys.readouterr()
        with intercept(hook, CALLS[1:]):  # opening a file that cannot be opened is tested with the disks
            try:
                writer.write(folder, number)
                outcomes.add("saved, and something said" if capsys.readouterr().out else "saved")
            except REFUSALS as error:
                outcomes.add(f"refused: {'Input/output error' in str(error)}, {'dmesg' in str(error)}")
        gone = {None} if name == "export" else set()
        assert writer.read(folder) in {before[-1] if before else None, number} | gone
        if name == "checkpoint":
            assert load_silently(folder).path.name[0] != "."  # not only under its hidden name
        elif name not in ("pack", *ROWS):
            assert not list(folder.rglob(".tmp-*"))
        require_next(name, folder, number)
        fatal += 1
    advised = name in ("checkpoint", "index", "pack", *ROWS)  # the others get their advice from their command
    assert outcomes - {"saved", "saved, and something said"} == {f"refused: True, {advised}"}
    assert name in ROWS or (before == (1, 2)) == ("saved, and something said" in outcomes)
    assert len(outcomes) > 1


# --------------------------------------------------------------------------------------------- another account


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["index", "code"])
@pytest.mark.parametrize("theirs", ["*", "*/*", "link"])
def test_cache_that_another_account_wrote_is_made_anew(tmp_path, capsys, name, theirs):
    writer = WRITERS[name]
    prepare(tmp_path / "cache", writer, (1,))
    if not (found := [*(tmp_path / "cache").glob("*" if theirs == "link" else theirs)]):
        pytest.skip("an index is in no folder of its own")
    for path in found:
        if theirs == "link":  # to content of this user
            path.rename(tmp_path / "mine")
            path.symlink_to(tmp_path / "mine")
        os.chown(path, 12345, 12345, follow_symlinks=False)
    assert writer.read(tmp_path / "cache") == (1 if (name, theirs) == ("code", "link") else None)
    assert name == "code" or "is made anew, because " in capsys.readouterr().out
    if found[0].is_file():
        writer.write(tmp_path / "cache", 2)
        assert writer.read(tmp_path / "cache") == 2


# ------------------------------------------------------------------------------------------------ file server


def faults(name: str) -> list[dict[str, str]]:
    """Return faults: each of the first calls of every kind ends with an error, once, or the first comes late."""
    calls = ("open", "read", "write", "fsync", "close", "rename", "mkdir", "stat")
    found = [
        {"FAULT_CALL": call, "FAULT_ERRNO": str(error), "FAULT_LATE": str(late), "FAULT_AT": str(number)}
        for call in calls
        for late in (0, 1)
        for number, error in enumerate([errno.EIO, errno.ESTALE] * 5, 1 - late)
        if 0 < number < (9 if name == "checkpoint" else 4)
    ]
    found += [{"FAULT_CALL": call, "FAULT_US": "20000"} for call in ("open", "fsync", "rename")]
    return [{"writer": name, **fault} for fault in (*found, {"SHORT_READS": "7"})]


@pytest.fixture(scope="module")
def wrong_server(tmp_path_factory):
    """Give what sends faults to a process with a wrong file server, and returns their outcomes and its folder."""
    folder = tmp_path_factory.mktemp("server")
    command = [sys.executable, "-m", "tests.support.faulty_server", str(folder)]
    environment, errors = faulty_files.preloaded(folder), folder / "errors"
    with errors.open("w") as file:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file}
        process = subprocess.Popen(command, env=environment, text=True, **pipes)

    def send(table: list[dict[str, str]]) -> tuple[list[dict], str]:
        process.stdin.write(f"{json.dumps(table)}\n")
        process.stdin.flush()
        # The writers' own lines come before the outcomes.
        found = next((line for line in process.stdout if line.startswith("[{")), "[]")
        assert not errors.read_text()
        return json.loads(found), str(folder)

    with process:
        yield send
        process.stdin.close()


@pytest.mark.skipif(faulty_files.COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("name", WRITERS)
def test_writers_on_a_wrong_file_server_leave_whole_content(wrong_server, name):
    """Also where a call has happened and only its answer is lost, and where it comes late."""
    table = faults(name)
    outcomes, folder = wrong_server(table)
    assert len(outcomes) == len(table)
    refused = set()
    for fault, outcome in zip(table, outcomes, strict=True):
        # It can be refused and complete, where the answer of its last calls was lost.
        newest = {1, 2} | ({None} if name == "export" else set())  # weights without a record
        assert outcome["newest"] == 2 if outcome["refused"] is None else outcome["newest"] in newest, fault
        # A cache that cannot be read is made anew.
        nothing = {None} if name in ("index", "code") or outcome["newest"] is None else set()
        read = outcome["read"]
        assert read in {1, 2} | nothing or folder in read, (fault, outcome)
        assert outcome["after"] == 3, fault
        sound = "FAULT_ERRNO" not in fault
        assert not sound or outcome == {"refused": None, "newest": 2, "read": 2, "after": 3}, fault
        refused |= {fault.get("FAULT_CALL")} if outcome["refused"] else set()
    # NumPy and Python write rows with calls that a library before theirs does not see.
    assert refused >= {"open", "write", "fsync", "rename"}
