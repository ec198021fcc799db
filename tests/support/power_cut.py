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
from dataclasses import dataclass, field
from pathlib import Path
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


@dataclass
class Node:
    """A file (bytes) or a folder (a dict of nodes by name), as programs see it and as the disk has it."""

    now: Any
    durable: Any = field(default=None)

    def sync(self) -> "Node":
        self.durable = dict(self.now) if isinstance(self.now, dict) else self.now
        return self


def _load(path: Path) -> Node:
    """Return what is there before the program runs: all of it is on the disk."""
    return Node(
        {entry.name: _load(entry) for entry in path.iterdir()} if path.is_dir() else path.read_bytes()
    ).sync()


def _store(node: Node, path: Path, lazy: bool) -> None:
    if isinstance(node.now, bytes):
        path.write_bytes(node.durable)
        return
    path.mkdir()
    for name, child in (node.durable if lazy else node.now).items():
        _store(child, path / name, lazy)


class Watched:
    """The calls so far, as names, and the file system that they made."""

    def __init__(self, folder: Path):
        self.folder, self.root = folder, _load(folder)
        self.calls: list[str] = []
        # By descriptor; folders too, for calls relative to them.
        self._open: dict[int, tuple[Path, Node]] = {}

    def disks(self, under: Path) -> Iterator[tuple[str, Path]]:
        """Write each disk that a power cut could leave now to a new folder in `under`; yield (kind, folder)."""
        for kind in ("eager", "lazy"):
            target = under / f"{len(self.calls)}_{kind}"
            _store(self.root, target, lazy=kind == "lazy")
            yield kind, target

    def note(self, name: str, result: Any, args: tuple, keys: dict) -> None:
        """Do to the model what the call did to the file system."""
        if name in ("write", "fsync"):
            _, node = self._open.get(args[0], (None, None))
            if node is not None and name == "write":
                node.now += bytes(args[1][:result])
            elif node is not None:
                node.sync()
            return
        path = Path(os.fspath(args[0]))
        if keys.get("dir_fd") is not None:
            path = self._open[keys["dir_fd"]][0] / path
        path = Path(os.path.abspath(path))
        if not path.is_relative_to(self.folder):
            if name == "open":  # the number of a file that was closed
                self._open.pop(result, None)
            return
        siblings = self._names(path.parent)
        if name == "open":
            node = self.root if path == self.folder else siblings.setdefault(path.name, Node(b"", b""))
            if args[1] & os.O_TRUNC:
                node.now = b""
            self._open[result] = path, node
        elif name == "mkdir":
            siblings[path.name] = Node({}, {})
        elif name in ("rename", "replace"):
            target = Path(os.path.abspath(args[1]))
            self._names(target.parent)[target.name] = siblings.pop(path.name)
        else:
            del siblings[path.name]

    def _names(self, folder: Path) -> dict[str, Node]:
        node = self.root
        for part in folder.relative_to(self.folder).parts if folder.is_relative_to(self.folder) else ():
            node = node.now[part]
        return node.now


@contextlib.contextmanager
def watch(folder: Path, after_call: Callable[[Watched], None]) -> Iterator[Watched]:
    """Record every call; `after_call(watched)` runs after each that changed something under `folder`."""
    watched = Watched(Path(os.path.abspath(folder)))
    looking = False  # while `after_call` works, its calls are not the program's

    def hook(name: str, call: Callable, args: tuple, keys: dict) -> Any:
        nonlocal looking
        result = call(*args, **keys)
        if looking:
            return result
        watched.note(name, result, args, keys)
        if name != "open" or args[1] & os.O_CREAT:
            looking = True
            watched.calls.append(name)
            after_call(watched)
            looking = False
        return result

    with intercept(hook):
        yield watched


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
        for _, disk in watched.disks(scratch):
            look_once(disk)

    shutil.copytree(before, scratch / "watched")
    with watch(scratch / "watched", look_at_disks):
        write(scratch / "watched")
    return calls
