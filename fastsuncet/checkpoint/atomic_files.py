"""Files that are either whole or not there, on any file system a cluster has.

A name is only given to what is already on the disk: write under another name, fsync, rename, fsync the
folder. Without the first fsync a power cut can leave the new name on an empty file; without the second, the
rename itself can be lost.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

# One write() call: small enough that a signal is noticed soon, large enough that the calls cost nothing.
CHUNK = 8 << 20  # bytes


def write_synced(path: Path, payload: bytes | memoryview) -> str:
    """Writes `payload` to `path` and waits until it is on the disk; returns the sha256 of what was meant.

    The digest is taken from memory, not read back, so that a byte lost on the way is found by the first
    reader. Refuses to follow a symbolic link at `path`. Raises OSError.
    """
    digest = hashlib.sha256()
    rest = memoryview(payload)
    # 0o666 less the umask: a checkpoint is for the group's eyes if the user's other files are (mkstemp's are
    # not).
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        while rest:
            written = os.write(descriptor, rest[:CHUNK])
            digest.update(rest[:written])
            rest = rest[written:]
        sync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def sync(descriptor: int) -> None:
    """Waits until what was written to an open file is on the disk. Raises OSError."""
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder (new, renamed, removed) are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot fsync a folder and say EINVAL; their servers order renames
        # themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Makes a folder and its parents where there is none, and waits until its name is on the disk."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        sync_folder(path.parent)


def replace(path: Path, payload: bytes) -> None:
    """Gives `path` new content in one step: a reader, or a kill at any moment, finds all old or all new."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        write_synced(temporary, payload)
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Removes a file, a symbolic link (never what it points to) or a folder with everything in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Holds the lock file `path`, or yields False at once if another process on any host does.

    The kernel drops the lock with the process, however it dies: whoever holds it knows that half-written
    things beside it have no living owner. (A process id would not do: in a container it is 1 in every life.)
    On a file system without locks this yields True: two writers are then not told from one.
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
        yield held
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Bytes this user can still write on the file system of `folder`; a per-user quota may allow fewer."""
    return shutil.disk_usage(folder).free


def advice(error: OSError) -> str:
    """What a person can do about a failed write: one sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "The disk, its inodes or your quota are used up (df -h, df -i, quota -s): free some, or point "
            "logging.folder to another disk."
        )
    if error.errno == errno.EFBIG:
        return "A limit on file sizes is in force (ulimit -f): raise it."
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "This user cannot write there: check the owner and how it is mounted, or set logging.folder."
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOTCONN):
        return "The folder, or the mount it is on, has gone away: bring it back, or set logging.folder."
    return "The disk or the network file system failed: see the system's log (dmesg)."
