"""A file system that forgets: what a disk may hold after a power cut, by POSIX's words and no kinder.

`watch(folder)` records what a program does under a folder, call by call. After each call, `disks()` builds
the two worst disks a power cut could leave there:

    eager   every name (new, renamed, removed) has reached the disk, no byte has that was not fsynced
    lazy    a name counts only once its folder was fsynced after it, bytes as above

Python-level calls only: os.open, write, fsync, mkdir, rename, replace, unlink, rmdir (and shutil, which uses
these).
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class File:
    content: bytes = b""
    durable: bytes = b""


@dataclass
class Folder:
    names: dict[str, "File | Folder"] = field(default_factory=dict)
    durable: dict[str, "File | Folder"] = field(default_factory=dict)


def _load(path: Path) -> "File | Folder":
    """What is there already is on the disk already."""
    if path.is_dir():
        names = {entry.name: _load(entry) for entry in path.iterdir()}
        return Folder(dict(names), dict(names))
    return File(path.read_bytes(), path.read_bytes())


def _store(node: "File | Folder", path: Path, lazy: bool) -> None:
    if isinstance(node, File):
        path.write_bytes(node.durable)
        return
    path.mkdir()
    for name, child in (node.durable if lazy else node.names).items():
        _store(child, path / name, lazy)


class Watched:
    """The calls so far, as names, and the file system they made."""

    def __init__(self, folder: Path):
        self.folder, self.root = folder, _load(folder)
        self.calls: list[str] = []
        self._open: dict[int, File | Folder] = {}
        self._paths: dict[int, Path] = {}  # of folders open by descriptor, for calls relative to them

    def disks(self, under: Path) -> Iterator[tuple[str, Path]]:
        """(kind, folder) of each disk a power cut could leave now, written to new folders in `under`."""
        for kind in ("eager", "lazy"):
            target = under / f"{len(self.calls)}_{kind}"
            _store(self.root, target, lazy=kind == "lazy")
            yield kind, target

    def _inside(self, path: object, dir_fd: int | None = None) -> tuple[str, ...] | None:
        """The names that lead to `path` below the watched folder; None for what is elsewhere."""
        path = Path(os.fspath(path))
        if dir_fd is not None:
            path = self._paths[dir_fd] / path
        absolute = Path(os.path.abspath(path))
        return absolute.relative_to(self.folder).parts if absolute.is_relative_to(self.folder) else None

    def _parent(self, parts: tuple[str, ...]) -> Folder:
        node = self.root
        for name in parts[:-1]:
            node = node.names[name]
        return node

    def opened(self, descriptor: int, path: object, flags: int, dir_fd: int | None) -> None:
        parts = self._inside(path, dir_fd)
        if parts is None:
            return
        if not parts:
            node = self.root
        elif (node := self._parent(parts).names.get(parts[-1])) is None:
            node = self._parent(parts).names[parts[-1]] = File()
        if isinstance(node, File) and flags & os.O_TRUNC:
            node.content = b""
        self._open[descriptor] = node
        self._paths[descriptor] = self.folder.joinpath(*parts)

    def written(self, descriptor: int, payload: bytes) -> None:
        if descriptor in self._open:
            self._open[descriptor].content += payload

    def synced(self, descriptor: int) -> None:
        node = self._open.get(descriptor)
        if isinstance(node, File):
            node.durable = node.content
        elif node is not None:
            node.durable = dict(node.names)

    def made(self, path: object) -> None:
        if parts := self._inside(path):
            self._parent(parts).names[parts[-1]] = Folder()

    def renamed(self, old: object, new: object) -> None:
        source, target = self._inside(old), self._inside(new)
        self._parent(target).names[target[-1]] = self._parent(source).names.pop(source[-1])

    def removed(self, path: object, dir_fd: int | None) -> None:
        if parts := self._inside(path, dir_fd):
            del self._parent(parts).names[parts[-1]]


@contextlib.contextmanager
def watch(folder: Path, after_call) -> Iterator[Watched]:
    """Records every call; `after_call(watched)` runs after each that changed something under `folder`."""
    folder = Path(os.path.abspath(folder))
    watched = Watched(folder)
    real = {name: getattr(os, name) for name in CALLS}
    asleep = False  # while `after_call` works, its own calls are not the program's

    def wrap(name: str):
        def call(*arguments, **keywords):
            nonlocal asleep
            result = real[name](*arguments, **keywords)
            if asleep:
                return result
            CALLS[name](watched, result, arguments, keywords)
            if name == "open" and not arguments[1] & os.O_CREAT:
                return result
            asleep = True
            try:
                watched.calls.append(name)
                after_call(watched)
            finally:
                asleep = False
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrap(name))
        yield watched


CALLS = {
    "open": lambda w, fd, a, k: w.opened(fd, a[0], a[1], k.get("dir_fd")),
    "write": lambda w, count, a, k: w.written(a[0], bytes(a[1][:count])),
    "fsync": lambda w, _, a, k: w.synced(a[0]),
    "mkdir": lambda w, _, a, k: w.made(a[0]),
    "rename": lambda w, _, a, k: w.renamed(a[0], a[1]),
    "replace": lambda w, _, a, k: w.renamed(a[0], a[1]),
    "unlink": lambda w, _, a, k: w.removed(a[0], k.get("dir_fd")),
    "rmdir": lambda w, _, a, k: w.removed(a[0], k.get("dir_fd")),
}
