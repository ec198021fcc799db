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
    """Record every call; `after_call(watched)` runs after each that changed something under `folder`.

    A write is made in two halves, each a call: it can be cut in its middle.
    """
    watched = Watched(folder)
    looking = False  # while `after_call` works, its calls are not the program's

    def made(name: str, call: Callable, args: tuple, keys: dict) -> Any:
        nonlocal looking
        result = call(*args, **keys)
        looking = True
        watched.note(name, args)
        if name != "open" or args[1] & os.O_CREAT:
            watched.calls.append(name)
            after_call(watched)
        looking = False
        return result

    def hook(name: str, call: Callable, args: tuple, keys: dict) -> Any:
        if looking:
            return call(*args, **keys)
        if name != "write":
            return made(name, call, args, keys)
        file, content = args
        half = made(name, call, (file, content[: len(content) // 2]), keys)
        return half + made(name, call, (file, content[half:]), keys)

    try:
        with intercept(hook):
            yield watched
    finally:
        for held in watched.held:
            os.close(held)


def crash_at_every_syscall(
    write: Callable[[Path], object], before: Path, look: Callable[[Path], None], *, power_cuts: bool = True
) -> list[str]:
    """Crash `write(folder)`, which changes a folder that is as `before`, and `look(folder)` at what is left each time.

    It is killed after each system call and half through each write, and its power is cut there. What several of these
    crashes leave alike is looked at once, in the order of their last call: the last look is at the lazy disk of a power
    cut after the whole write. Return the calls.
    """
    scratch, left = before.with_name(f"{before.name}-crashed"), {}

    def keep(watched: Watched) -> None:
        killed = scratch / f"{len(watched.calls)}_killed"
        shutil.copytree(watched.folder, killed)
        for folder in (killed, *(watched.disks(scratch) if power_cuts else ())):
            files = [(path, path.is_file() and path.read_bytes()) for path in sorted(folder.rglob("*"))]
            content = tuple((path.relative_to(folder), held) for path, held in files)
            if content in left:
                shutil.rmtree(left.pop(content))
            left[content] = folder

    shutil.copytree(before, scratch / "watched")
    with watch(scratch / "watched", keep) as watched:
        write(scratch / "watched")
    for folder in left.values():
        look(folder)
    return watched.calls
