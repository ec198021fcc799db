"""A writer is interrupted, by a kill at every system call, by a power cut, by the disk, or its file is damaged later.

What is left must load, or what reads it says which file is damaged and what to do. `tests/training/test_killed.py`
kills the process of a real run at random moments.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastsuncet.checkpoint import manager
from fastsuncet.errors import CheckpointError
from pipelines import atomic_files
from tests.support.checkpoints import HARMS, assert_whole, newest, save
from tests.support.power_cut import CALLS, crash_at_every_syscall, intercept, watch
from tests.support.writers import REFUSALS, WRITERS, Writer, images

pytestmark = pytest.mark.slow


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
    assert set(os.listdir(folder)) - {"1", ".lock-1"} == writer.names  # the first two are of a pack
    assert not list(folder.rglob(".tmp-*"))


@pytest.mark.parametrize(("name", "before", "number"), CASES)
def test_crash_at_every_call_leaves_the_old_content_or_the_new(tmp_path, name, before, number):
    writer, found = WRITERS[name], []
    prepare(tmp_path / "before", writer, before)

    def look(folder: Path) -> None:
        found.append(writer.read(folder))
        for path in folder.glob("step_*"):  # what has a name is whole, also what was being removed
            assert_whole(manager.load(path))
        require_next(name, folder, number)

    calls = crash_at_every_syscall(
        lambda folder: writer.write(folder, number), tmp_path / "before", look, power_cuts=name not in ROWS
    )
    assert found[-1] == number, "it was lost after it had been written"
    # Cut before the new one counted, and after. Between, an export is not there, or is weights without a record.
    gone = {None} if name.startswith("export") else set()
    assert set(found) - gone == {before[-1] if before else None, number}
    # The power is not cut where NumPy and Python write: they must wait for each file and its folder.
    assert name not in ROWS or calls.count("fsync") >= 5, calls


def test_power_cut_after_make_folder_leaves_it_and_its_parents(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    with watch(folder, lambda watched: None) as watched:
        atomic_files.make_folder(folder / "runs" / "name" / "checkpoints")
    assert all((disk / "runs/name/checkpoints").is_dir() for disk in watched.disks(tmp_path))


def fill(folder: Path, mount, leave: int) -> None:
    status = os.statvfs(folder)
    (folder / "rubbish").write_bytes(bytes(status.f_bavail * status.f_frsize - leave))


def without_inodes(folder: Path, mount) -> None:
    for number in range(os.statvfs(folder).f_ffree - 2):  # room for the new folder and one of its files
        (folder / f"rubbish_{number}").touch()


FULL = ("No space left on device", "df -h", "as they were")
TOO_SMALL = (
    "is 1.1 MB",
    "(2.1 MB) of free",
    "has 2.0 MB. Free 0.1 MB (all checkpoints but the newest can go)",
)
DISKS = {  # options of the disk, what happens to it, words of the message, rows of the weights
    **{f"full but for {n}": ("size=400k", partial(fill, leave=n), FULL, 64) for n in (0, 4096, 3 * 4096)},
    "no inodes": ("size=40m,nr_inodes=12", without_inodes, ("No space left on device", "df -i"), 64),
    "read only": ("size=40m", lambda _, mount: mount("ro"), ("Read-only file system", "logging.folder"), 64),
    "too small, seen before writing": ("size=4m", partial(fill, leave=2_000_000), TOO_SMALL, 4100),
}


@pytest.mark.parametrize("disk", DISKS)
def test_disk_that_refuses_a_save_keeps_what_was_there(small_disk, monkeypatch, disk):
    options, spoil, words, rows = DISKS[disk]
    folder = small_disk(options)
    save(folder, 1, rows=64)
    spoil(folder, small_disk)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        if "full" in disk:
            # The check for free space sees no end, as it does under a quota or when another program writes meanwhile.
            patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 60))
        with pytest.raises(CheckpointError) as caught:
            save(folder, 2, keep=2, rows=rows)
    assert all(word in str(caught.value) for word in ("step_00000002", str(folder), *words))
    assert newest(folder) == (1, [])
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    if "full" in disk:
        (folder / "rubbish").unlink()
        save(folder, 2, rows=64)
        assert newest(folder) == (2, [])


ERRORS = (errno.EIO, errno.ESTALE)


def each_call_fails(
    names: tuple[str, ...], late: bool = False
) -> Iterator[tuple[int, contextlib.AbstractContextManager]]:
    """Yield a number and a context in which the call of that number fails; in the last one, no call does.

    `late`: the call happens, and only its answer is lost.
    """
    calls, fatal = [], 0

    def hook(kind, call, arguments, keywords):
        calls.append(kind)
        fails = len(calls) == fatal + 1
        answer = None if fails and not late else call(*arguments, **keywords)
        if fails:
            raise OSError(ERRORS[fatal % 2], os.strerror(ERRORS[fatal % 2]))
        return answer

    while fatal <= len(calls):
        calls.clear()
        yield fatal, intercept(hook, names)
        fatal += 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("name", "before", "number"), [case for case in CASES if case[1] or case[0] == "pack"]
)
def test_io_error_at_any_call_leaves_good_content_and_no_rubbish(
    tmp_path, capsys, name, before, number, late
):
    """The writer fails with the reason, or (in the cleanup only) succeeds and reports what it could not remove."""
    writer, outcomes = WRITERS[name], set()
    prepare(tmp_path / "before", writer, before)
    # Opening a file that cannot be opened is tested with the disks.
    for fatal, failing in each_call_fails(CALLS[1:], late):
        folder, failure = tmp_path / str(fatal), ERRORS[fatal % 2]
        shutil.copytree(tmp_path / "before", folder)
        capsys.readouterr()
        with failing:
            try:
                writer.write(folder, number)
                outcomes.add("saved, and something said" if capsys.readouterr().out else "saved")
            except REFUSALS as error:
                advised = atomic_files.advice(OSError(failure, ""), "")[:40] in str(error)
                outcomes.add(f"refused: {os.strerror(failure) in str(error)}, {advised}")
        gone = {None} if name == "export" else set()
        assert writer.read(folder) in {before[-1] if before else None, number} | gone
        if name == "checkpoint":  # not only under its hidden name, and without passing over a damaged one
            assert manager.load_newest(folder, say=pytest.fail).path.name[0] != "."
        elif name not in ("pack", *ROWS):
            assert not list(folder.rglob(".tmp-*"))
        require_next(name, folder, number)
    advised = name in ("checkpoint", "index", "pack", *ROWS)  # the others get their advice from their command
    assert outcomes - {"saved", "saved, and something said"} == {f"refused: True, {advised}"}
    assert name in ROWS or (before == (1, 2)) == ("saved, and something said" in outcomes)
    assert len(outcomes) > 1


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ROWS])
def test_read_error_at_any_call_names_the_file_or_leaves_a_cache_out(tmp_path, name):
    writer, outcomes = WRITERS[name], set()
    prepare(tmp_path / "files", writer, (1,))
    for fatal, failing in each_call_fails(("open", "pread")):
        with failing:
            try:
                outcomes.add(writer.read(tmp_path / "files"))
            except REFUSALS as error:
                outcomes.add((str(tmp_path) in str(error), os.strerror(ERRORS[fatal % 2]) in str(error)))
    assert outcomes == {1, None if name in ("index", "code") else (True, True)}


CHECKPOINT = r"step_00000002 cannot be used: {}"
SHARD = r"2/000000\.tar.*(Copy the pack here again|is a link that leads out|dmesg|move it away)"
WEIGHTS = r"(was changed after|holds no checkpoint|cannot be listed|has 54 GB)"
# The writer of a file, and what is said of damage to it.
FILES = {
    "step_00000002/model.safetensors": ("checkpoint", CHECKPOINT.format(r"model\.safetensors")),
    "step_00000002/train_state.pt": ("checkpoint", CHECKPOINT.format(r"train_state\.pt")),
    "step_00000002/meta.json": ("checkpoint", CHECKPOINT.format(r"meta\.json")),
    "index.npz": ("index", r"index\.npz (cannot be read.* Delete it if |is made anew, because )"),
    "2/index.npz": ("pack", r"2/index\.npz cannot be read"),
    "2/000000.tar": ("pack", SHARD),
    "kernels/code": ("code", None),
    "weights.pth": ("export", rf"weights\.pth {WEIGHTS}"),
    "weights.json": ("export", r"weights\.(json is no record|pth holds no ResNet)"),
    "weights/model.safetensors": ("export folder", rf"model\.safetensors {WEIGHTS}"),
    "weights/fastsuncet.json": ("export folder", r"(fastsuncet\.json is no record|holds no checkpoint)"),
}
# What leaves all that is needed: a last line feed, a byte after the end of a zip, the first name in a tar's header, and
# shards whose own labels and sizes are read where a pack has no index.
HARMLESS = {
    *((file, "truncated") for file in ("weights.json", "weights/fastsuncet.json")),
    *((file, "longer") for file in ("index.npz", "2/index.npz")),
    *(("2/index.npz", harm) for harm in ("missing", "pipe", "endless device", "folder")),
    ("2/000000.tar", "flipped"),
}
ABSENT = {
    ("weights.pth", "folder"),
    *((file, "missing") for file in FILES if "step" not in file and "2/" not in file),
}
ABSENT -= {("weights/model.safetensors", "missing")}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("file", FILES)
def test_damaged_file_is_named_and_its_content_not_used(tmp_path, capsys, file, harm):
    """The older checkpoint is used, a cache is made anew, and the rest is refused."""
    images()
    name, said = FILES[file]
    writer = WRITERS[name]
    for number in (1, 2):
        writer.write(tmp_path, number)
    capsys.readouterr()
    HARMS[harm](tmp_path / file)
    try:
        found, text = writer.read(tmp_path), ""
    except REFUSALS as error:
        found, text = "refused", str(error)
    text = text + capsys.readouterr().out
    if (file, harm) in HARMLESS:
        assert found == 2
    elif name == "code" or (file, harm) in ABSENT:
        assert (found, text) == (None, "")
    else:
        assert found == (1 if name == "checkpoint" else None if "made anew" in text else "refused")
        assert re.search(said, text), text
    if harm in ("truncated", "longer") and name == "checkpoint" and "meta" not in file:
        assert "bytes were written" in text  # a full disk, and not a broken one
    if harm != "folder" and name not in ("pack", "export"):
        if name == "index" and found == "refused":
            (tmp_path / file).unlink()  # as the message says
        writer.write(tmp_path, 2)
        assert writer.read(tmp_path) == 2
