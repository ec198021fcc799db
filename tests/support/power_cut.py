"""Crash a writer at every system call, by a kill and by a power cut.

A power cut needs a file system that forgets: what a disk can hold afterwards, at worst, by the words of POSIX.
`watch(folder)` records what a program does under a folder, call by call. After each call, `disks()` builds the two
worst disks that a power cut could leave there:

    eager   every name (new, renamed, removed) has reached the disk, but no byte that was not fsynced
    lazy    a name counts only once its folder was fsynced after it, bytes as above

It sees calls of Python's os module only: open, write, fsync, mkdir, rename, replace, unlink, rmdir (and shutil's, which
uses these).
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import pytest

from tests.support.runs import Killed

CALLS = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")


@contextlib.contextmanager
def intercept(
    hook: Callable[[str, Callable, tuple, dict], Any], names: tuple[str, ...] = CALLS
) -> Iterator[None]:
    """Call `hook(name, call, arguments, keywords)` in place of each system call; it can make the call, or not."""
    real = {name: getattr(os, name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, lambda *args, _name=name, **keys: hook(_name, real[_name], args, keys))
        yield


Children = dict[str, tuple[int, bool]]  # name -> inode, and whether it is a folder


class Watched:
    """The calls so far, as names, and what of the folder is on the disk, by inode."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.calls: list[str] = []
        self._durable: dict[int, bytes | Children] = {}
        self.held: list[int] = []  # descriptors: while a file is open, no other gets its inode
        for path in (folder, *folder.rglob("*")):  # what is there before is on the disk
            self.held.append(os.open(path, os.O_RDONLY))
            self._sync(self.held[-1])

    def disks(self, under: Path) -> Iterator[Path]:
        """Write each disk that a power cut could leave now to a new folder in `under`; yield the folders."""
        for kind in ("eager", "lazy"):
            target = under / f"{len(self.calls)}_{kind}"
            self._store(target, os.stat(self.folder).st_ino, True, self.folder if kind == "eager" else None)
            yield target

    def _store(self, target: Path, inode: int, is_folder: bool, now: Path | None) -> None:
        """Write what is on the disk of an inode, a folder with the names that `now` has, if that is given."""
        if not is_folder:
            target.write_bytes(self._durable.get(inode, b""))
            return
        target.mkdir()
        for name, child in (children(now) if now else self._durable.get(inode, {})).items():
            self._store(target / name, *child, now and now / name)

    def _sync(self, file: int) -> None:
        status = os.fstat(file)
        here = Path(f"/proc/self/fd/{file}")
        self._durable[status.st_ino] = children(here) if S_ISDIR(status.st_mode) else here.read_bytes()

    def note(self, name: str, args: tuple) -> None:
        if name == "fsync":
            self._sync(args[0])
        elif name == "mkdir" or (name == "open" and args[1] & os.O_CREAT):
            # Opened anew: a copy of the program's descriptor would hold its locks.
            self.held.append(os.open(args[0], os.O_RDONLY))


def children(folder: Path) -> Children:
    with os.scandir(folder) as found:
        return {each.name: (each.inode(), each.is_dir()) for each in found}


@contextlib.contextmanager
def watch(folder: Path, after_call: Callable[[Watched], None]) -> Iterator[Watched]:
    """Record every call; `after_call(watched)` runs after each that changed something under `folder`."""
    watched = Watched(folder)
    looking = False  # while `after_call` works, its calls are not the program's

    def hook(name: str, call: Callable, args: tuple, keys: dict) -> Any:
        nonlocal looking
        result = call(*args, **keys)
        if looking:
            return result
        looking = True
        watched.note(name, args)
        if name != "open" or args[1] & os.O_CREAT:
            watched.calls.append(name)
            after_call(watched)
        looking = False
        return result

    try:
        with intercept(hook):
            yield watched
    finally:
        for held in watched.held:
            os.close(held)


def die_at(write: Callable[[], object], fatal: int, half: bool = False) -> list[str]:
    """Call `write`, but die just before the system call number `fatal`, or half through a write; return those before.

    What is on the disk is what kill -9 would leave: from that call on, every call fails without any effect.
    """
    calls = []

    def hook(name: str, call: Callable, args: tuple, keys: dict) -> Any:
        if len(calls) == fatal and half:
            call(args[0], args[1][: len(args[1]) // 2])
        calls.append(name)
        if len(calls) > fatal:
            raise Killed
        return call(*args, **keys)

    with intercept(hook), contextlib.suppress(Killed):
        write()
    return calls[:fatal]


def crash_at_every_syscall(
    write: Callable[[Path], object], before: Path, look: Callable[[Path], None], *, power_cuts: bool = True
) -> list[str]:
    """Crash `write(folder)`, which changes a folder that is as `before`, and `look(folder)` at what is left each time.

    It is killed before each system call and half through each write, and its power is cut after each call. What several
    of these crashes leave alike is looked at once. Return the calls of a whole write, the last one of which leaves the
    new content on any disk.
    """
    scratch, seen = before.with_name(f"{before.name}-crashed"), set()

    def look_once(folder: Path) -> None:
        paths = sorted(folder.rglob("*"))
        left = tuple((path.relative_to(folder), path.is_file() and path.read_bytes()) for path in paths)
        if left not in seen:
            seen.add(left)
            look(folder)
        shutil.rmtree(folder)

    shutil.copytree(before, scratch / "whole")
    calls = die_at(lambda: write(scratch / "whole"), 100_000)
    for fatal, name in enumerate(calls):
        for half in (False, True) if name == "write" else (False,):
            folder = scratch / f"{fatal}-{half}"
            shutil.copytree(before, folder)
            assert die_at(lambda folder=folder: write(folder), fatal, half) == calls[:fatal]
            look_once(folder)

    if not power_cuts:
        return calls

    def look_at_disks(watched: Watched) -> None:
        for disk in watched.disks(scratch):
            look_once(disk)

    shutil.copytree(before, scratch / "watched")
    with watch(scratch / "watched", look_at_disks):
        write(scratch / "watched")
    return calls
