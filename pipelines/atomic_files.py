"""Files that are either whole or absent, on any file system of a cluster.

A name is given only to content that is already on the disk: write under another name, fsync, rename, fsync the
folder. Without the first fsync, a power cut can leave the new name on an empty file. Without the second, the rename
can be lost.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

# Bytes of one write() call: small enough that a signal is noticed soon, large enough that the calls cost nothing.
CHUNK = 8 << 20
TEMPORARY = ".tmp-"  # the names of what is being written or removed begin so
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes of this machine
LOCKS: dict[Path, int] = {}  # the lock files that this process holds, and their descriptors


class _InChunks(io.FileIO):
    """A file whose every write is one system call of at most CHUNK bytes."""

    def write(self, content: Any) -> int:
        return os.write(self.fileno(), memoryview(content)[:CHUNK])


@contextlib.contextmanager
def new_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a stream into `path`; at the end, wait until its content is on the disk.

    `mode` less the umask are the permissions: by default a colleague who can read the user's other files can read it.
    Raises OSError, also if `path` is a symbolic link.
    """

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, mode)

    with _InChunks(path, "wb", opener=opened) as file, io.BufferedWriter(file) as stream:
        yield stream
        stream.flush()
        os.fsync(file.fileno())


def write_synced(path: Path, payload: bytes) -> None:
    """Write `payload` to `path` and wait until it is on the disk. Raises OSError, also if `path` is a symbolic link."""
    with new_file(path) as stream:
        stream.write(payload)


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


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and its parents where they are missing, and wait until their names are on the disk."""
    if not path.is_dir():
        make_folder(path.parent, mode)
        path.mkdir(mode, exist_ok=True)
        sync(path.parent)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a stream whose content `path` gets in one step: a kill at any moment leaves all of the old or of the new.

    Several processes can write one path at a time: the last one stays. Raises OSError; then the old content stays.
    """
    with _temporary(path, mode) as temporary:
        try:
            with new_file(temporary, mode) as stream:
                yield stream
            os.replace(temporary, path)
        except BaseException:
            try_to_remove(temporary)
            raise
    sync(path.parent)


@contextlib.contextmanager
def _temporary(path: Path, mode: int) -> Iterator[Path]:
    """Yield the name of a file next to `path` that no other process writes or removes.

    It follows from the name of `path`, so that the next write on this machine removes what a killed one left. A writer
    locks its file while it lives. Where another one has this name, or something without a lock, the name is random.
    """
    name = hashlib.sha256(_boot() + os.fsencode(path.name)).hexdigest()[:16]
    temporary = path.with_name(f"{TEMPORARY}{name}")
    with contextlib.ExitStack() as stack:

        def lock(flags: int) -> bool | None:
            descriptor = os.open(temporary, flags | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
            stack.callback(os.close, descriptor)
            # The writer before can have renamed or removed its file after it was opened here.
            return _flock(descriptor) and _leads_to(temporary, descriptor)

        mine = False
        with contextlib.suppress(OSError):  # there is nothing
            if lock(0):
                os.unlink(temporary)
        stack.close()  # the disk has the room of an unlinked file again once it is closed
        with contextlib.suppress(OSError):  # if the disk refuses, it refuses the random name too
            mine = lock(os.O_CREAT | os.O_EXCL) is not False
        yield temporary if mine else path.with_name(f"{TEMPORARY}{os.urandom(8).hex()}")


@functools.cache
def _boot() -> bytes:
    """Return what differs between two machines: the locks of some file systems hold on one machine only."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return os.urandom(16)


def replace(path: Path, payload: bytes, mode: int = 0o666) -> None:
    """Give `path` new content in one step, as `replacing`."""
    with replacing(path, mode) as stream:
        stream.write(payload)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left in a folder. Call it only under a lock: then none of these writers is alive."""
    for path in folder.glob(f"{TEMPORARY}*"):
        try_to_remove(path)


def replace_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Give `path` the folder that `write(temporary)` makes: after a kill at any moment the old or the new one is whole.

    `write` waits until the files in it are on the disk. If anything fails, the old folder is there and no other.
    """
    temporary, old = path.with_name(f"{TEMPORARY}{path.name}"), path.with_name(f".replaced-{path.name}")
    try:
        write(temporary)
        # A folder cannot be renamed onto a full one. Between these two renames the old folder counts under its hidden
        # name: it can be the only one there is.
        if exists(path):
            remove(old)
            os.rename(path, old)
        os.rename(temporary, path)
        sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # nothing was moved, or the new one is there
            os.rename(old, path)
        try_to_remove(temporary)
        raise
    try_to_remove(old)


def as_json(value: Any) -> bytes:
    """Return the content of a small JSON file that people read too."""
    return json.dumps(value, indent=1).encode() + b"\n"


@contextlib.contextmanager
def open_file(path: Path, limit: int, *, own: bool = False) -> Iterator[BinaryIO]:
    """Open a regular file of at most `limit` bytes to read. With `own`, no other user may have written it.

    Raises OSError for anything else, without waiting.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its writer. Another user can have made a link to a file of ours.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if own else 0)
    with open(os.open(path, flags), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > limit:
            text = f"it has {status.st_size:,} bytes; at most {limit:,} bytes were written"
            raise OSError(errno.EFBIG, text, str(path))
        if own and (why := foreign(status)):
            raise PermissionError(errno.EPERM, why, str(path))
        yield stream


def foreign(status: os.stat_result) -> str | None:
    """Return why another user can have written a file or folder; None if only this user can.

    Root and the owner of this program can change what is executed anyway.
    """
    if status.st_uid not in (os.geteuid(), 0, os.stat(__file__).st_uid):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"other users can write it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def read_bytes(path: Path, limit: int, *, own: bool = False) -> bytes:
    """Return the content of a file. Raises as `open_file`."""
    with open_file(path, limit, own=own) as stream:
        return stream.read(limit)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file, {} where none can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def exists(path: Path) -> bool:
    """Return whether anything is at `path`, a link to nothing too. Raises OSError if the file server does not say it.

    `os.path.lexists` says then that nothing is there, and a file of the user would be replaced.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def remove(path: Path) -> None:
    """Remove a file, a symbolic link (never its target) or a folder with all its content. Nothing there: no error."""
    if not exists(path):
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        os.unlink(path)


def try_to_remove(path: Path) -> None:
    """Remove what no reader looks at. Ignore an error: it must not hide another one, and the next save tries again."""
    with contextlib.suppress(OSError):
        remove(path)


@contextlib.contextmanager
def exclusive(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the lock file `path`; yield False at once, or `wait`, if another process on any host holds it.

    The kernel releases the lock when the process ends, however it ends. So the holder knows that half-written files in
    the folder belong to no living process. (A process id in a file would not do: in a container it is always 1.)
    On a file system without locks this yields True, and two writers are not detected.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        held = _flock(descriptor, wait=wait) is not False
        if held:
            LOCKS[path] = descriptor
        yield held
    finally:
        if LOCKS.get(path) == descriptor:
            del LOCKS[path]
        os.close(descriptor)


def _flock(descriptor: int, *, wait: bool = False) -> bool | None:
    """Lock an open file; return False if another process holds it, None on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        return None
    return True


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
    if error.errno == errno.ENAMETOOLONG:
        return f"A file cannot have this name there: set {setting} to another one."
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
        return f"A file, a folder or a broken link is in its place: move it away, or set {setting}."
    if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTCONN):
        return f"The folder or its mount has disappeared: bring it back, or set {setting}."
    return "The disk or the network file system failed: see the system's log (dmesg)."
