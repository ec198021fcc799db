"""Keep compiled code on disk: whole, and only where no other user could have written it, because it will be executed.

The folder is $FASTSUNCET_CACHE/kind, else $XDG_CACHE_HOME/fastsuncet/kind, else ~/.cache/fastsuncet/kind. It can be
deleted at any time.
"""

import hashlib
import os
import stat
import tempfile
from pathlib import Path

LIMIT = 1 << 26  # bytes of compiled code
DIGEST = hashlib.sha256().digest_size


def cache_folder(kind: str) -> Path:
    """Return the folder of one kind of compiled code. Raises RuntimeError for a user without a home directory."""
    if folder := os.environ.get("FASTSUNCET_CACHE"):
        return Path(folder) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastsuncet" / kind


def problem(path: Path) -> str | None:
    """Return why the code in a file must not be executed; None if it is safe or does not exist.

    Safe is what belongs, with its folder, to this user, to root or to the owner of this program, and what nobody else
    can write to.
    """
    for each in (path.parent, path):
        try:
            status = each.stat()
        except OSError:
            continue
        if status.st_uid not in (os.geteuid(), 0, Path(__file__).stat().st_uid) or status.st_mode & 0o022:
            return (
                f"other users can write to {each}, and compiled code is executed from there; correct its owner and "
                "mode, or set FASTSUNCET_CACHE to another folder"
            )
    return None


def read(path: Path) -> bytes | None:
    """Return the code in a file, or None if it is absent, unsafe (see `problem`), or damaged: a crash, a full disk."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            status = os.fstat(stream.fileno())
            plain = stat.S_ISREG(status.st_mode) and status.st_size <= LIMIT and not problem(path)
            content = stream.read(LIMIT) if plain else b""
    except OSError:
        return None
    code = content[:-DIGEST]
    return code if code and hashlib.sha256(code).digest() == content[-DIGEST:] else None


def write(path: Path, code: bytes) -> None:
    """Write code, then its digest, where a loader of libraries does not look. Raises OSError."""
    replace(path, code + hashlib.sha256(code).digest())


def replace(path: Path, content: bytes) -> None:
    """Give a file new content in one step. Raises OSError.

    Whatever the umask, file and folders are for their owner alone. The file is renamed into place: all ranks of a
    machine write at the same time.
    """
    make_folder(path.parent)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".tmp-", delete=False) as stream:  # mode 0600
        try:
            stream.write(content)
            stream.close()
            os.replace(stream.name, path)
        except BaseException:
            os.unlink(stream.name)
            raise


def make_folder(folder: Path) -> None:
    """Create a folder, and those above it that are missing, for its owner alone. Raises OSError."""
    # `parents=True` would create those above it with the mode of the umask.
    for each in reversed([folder, *folder.parents]):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
