"""Files that are either whole or absent, on any file system of a cluster.

A name is given only to content that is already on the disk: write under another name, fsync, rename, fsync the
folder. Without the first fsync, a power cut can leave the new name on an empty file. Without the second, the rename
can be lost.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Bytes of one write() call: small enough that a signal is noticed soon, large enough that the calls cost nothing.
CHUNK = 8 << 20
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes of this machine
LOCKS: dict[Path, int] = {}  # the lock files that this process holds, and their descriptors


def write_synced(path: Path, payload: bytes) -> None:
    """Write `payload` to `path` and wait until it is on the disk. Raises OSError, also if `path` is a symbolic link."""
    rest = memoryview(payload)
    # 0o666 less the umask: a colleague who can read the user's other files can read a checkpoint (mkstemp forbids it).
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest[:CHUNK]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder (new, renamed, removed), are on the disk.

    Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems answer EINVAL to the fsync of a folder; their servers keep renames in order.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and its parents where they are missing, and wait until their names are on the disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def replace(path: Path, payload: bytes) -> None:
    """Give `path` new content in one step: after a kill at any moment it holds all of the old or all of the new."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        write_synced(temporary, payload)
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    sync(path.parent)


def replace_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Give `path` the folder that `write(temporary)` makes: after a kill at any moment the old or the new one is whole.

    `write` waits until the files in it are on the disk. If anything fails, the old folder is there and no other.
    """
    temporary, old = path.with_name(f".tmp-{path.name}"), path.with_name(f".replaced-{path.name}")
    try:
        write(temporary)
        # A folder cannot be renamed onto a full one. Between these two renames the old folder counts under its hidden
        # name: it can be the only one there is.
        if os.path.lexists(path):
            remove(old)
            os.rename(path, old)
        os.rename(temporary, path)
        sync(path.parent)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(path):
            os.rename(old, path)
        try_to_remove(temporary)
        raise
    try_to_remove(old)


def as_json(value: Any) -> bytes:
    """Return the content of a small JSON file that people read too."""
    return json.dumps(value, indent=1).encode() + b"\n"


def read_bytes(path: Path, limit: int) -> bytes:
    """Return a file's content. Raises OSError, without waiting, for all but a regular file of at most `limit` bytes."""
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > limit:
            text = f"it has {status.st_size:,} bytes; at most {limit:,} bytes were written"
            raise OSError(errno.EFBIG, text, str(path))
        return stream.read(limit)


def remove(path: Path) -> None:
    """Remove a file, a symbolic link (never its target) or a folder with all its content. Nothing there: no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def try_to_remove(path: Path) -> None:
    """Remove what no reader looks at. Ignore an error: it must not hide another one, and the next save tries again."""
    with contextlib.suppress(OSError):
        remove(path)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Hold the lock file `path`; yield False at once if another process on any host holds it.

    The kernel releases the lock when the process ends, however it ends. So the holder knows that half-written files in
    the folder belong to no living process. (A process id in a file would not do: in a container it is always 1.)
    On a file system without locks this yields True, and two writers are not detected.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        held = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                held = False
            elif error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
        if held:
            LOCKS[path] = descriptor
        yield held
    finally:
        if LOCKS.get(path) == descriptor:
            del LOCKS[path]
        os.close(descriptor)


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[bool]:
    """Do as `exclusive` while `path`, a file or folder among others of the user, is written; leave no lock file."""
    lock = path.with_name(f".lock-{path.name}")
    with exclusive(lock) as held:
        # The holder before can have removed the lock file after it was opened here.
        held = held and _leads_to(lock, LOCKS[lock])
        try:
            yield held
        finally:
            if held:
                try_to_remove(lock)


def _leads_to(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def lost_lock() -> Path | None:
    """Return a lock file of this process whose path leads elsewhere by now, None if there is none.

    Its folder was removed, moved or unmounted, and what is written there now can belong to another run, or fill the
    disk below the mount point.
    """
    return next((path for path, descriptor in LOCKS.items() if not _leads_to(path, descriptor)), None)


def advice(error: OSError, setting: str = "logging.folder") -> str:
    """Return one sentence on what the user can do about a failed write to where `setting` points."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "The disk, its inodes or your quota are used up (df -h, df -i, quota -s): free some, or point "
            f"{setting} to another disk."
        )
    if error.errno == errno.EFBIG:
        return "A limit on file sizes is in force (ulimit -f): raise it."
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"You cannot write there: check the owner, the mode and how it is mounted, or set {setting}."
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"A file or a broken link is where a folder must be: move it away, or set {setting}."
    if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTCONN):
        return f"The folder or its mount has disappeared: bring it back, or set {setting}."
    return "The disk or the network file system failed: see the system's log (dmesg)."
