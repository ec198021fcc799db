"""Keep compiled code on disk: whole, and only where no other user could have written it, because it will be executed.

The folder is $FASTSUNCET_CACHE/kind, else $XDG_CACHE_HOME/fastsuncet/kind, else ~/.cache/fastsuncet/kind. It can be
deleted at any time.
"""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from pipelines import atomic_files

LIMIT = 1 << 26  # bytes of compiled code
DIGEST = hashlib.sha256().digest_size


def cache_folder(kind: str) -> Path:
    """Return the folder of one kind of compiled code. Raises RuntimeError for a user without a home directory."""
    if folder := os.environ.get("FASTSUNCET_CACHE"):
        return Path(folder) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastsuncet" / kind


def private_folder(kind: str) -> Path:
    """Return a folder for compiled code that another program writes and executes: `cache_folder`, made for this user.

    It is a new folder below /tmp where that one is not safe (see `problem`) or cannot be written.
    """
    with contextlib.suppress(OSError, RuntimeError):
        folder = cache_folder(kind)
        atomic_files.make_folder(folder, 0o700)
        if not problem(folder / "code") and os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix=f"fastsuncet-{kind}-"))


def problem(path: Path) -> str | None:
    """Return why the code in a file must not be executed; None if it is safe or does not exist.

    Safe is what belongs, with its folder, to this user, to root or to the owner of this program, and what nobody else
    can write to.
    """
    for each in (path.parent, path):
        with contextlib.suppress(OSError):
            if atomic_files.foreign(each.stat()):
                return (
                    f"other users can write to {each}, and compiled code is executed from there; correct its owner and "
                    "mode, or set FASTSUNCET_CACHE to another folder"
                )
    return None


def read(path: Path) -> bytes | None:
    """Return the code in a file, or None if it is absent, unsafe (see `problem`), or damaged: a crash, a full disk."""
    if problem(path):
        return None
    try:
        content = atomic_files.read_bytes(path, LIMIT, own=True)
    except OSError:
        return None
    code = content[:-DIGEST]
    return code if code and hashlib.sha256(code).digest() == content[-DIGEST:] else None


def write(path: Path, code: bytes) -> None:
    """Write code, then its digest, where a loader of libraries does not look. Raises OSError."""
    replace(path, code + hashlib.sha256(code).digest())


def replace(path: Path, content: bytes) -> None:
    """Give a file new content in one step, for its owner alone: its folders too, whatever the umask. Raises OSError."""
    atomic_files.make_folder(path.parent, 0o700)
    atomic_files.replace(path, content, 0o600)
