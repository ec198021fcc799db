"""Fetches one file of known size and sha256: continued after a break, and never under its name unverified."""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path

from pipelines.data_errors import DataError
from pipelines.datasets.image_headers import Progress

_BLOCK = 1 << 20
_TIMEOUT = 60  # seconds without a byte


def sha256_of(path: str | Path) -> str:
    """The file's sha256 as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def download(url: str, target: Path, *, sha256: str, size: int, progress: Progress | None = None) -> None:
    """Brings `url` (`size` bytes) to `target`, for one process at a time; `progress(bytes, size)` follows.

    Bytes gather in `target` + ".part", which the next attempt continues. Raises DataError when the server
    cannot be reached, breaks off, or sends anything but the file that was meant, which is then deleted.
    """
    partial = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _append(url, partial, size, progress)
        got = partial.stat().st_size
        if got < size:
            raise DataError(
                f"{url} broke off after {got} of {size} bytes: the same command again continues it"
            )
        digest = sha256_of(partial)
        if got != size or digest != sha256:
            partial.unlink()
            raise DataError(
                f"{url} sent another file than expected ({got} bytes, sha256 {digest}; wanted {size} bytes, "
                f"{sha256}); it was deleted"
            )
        os.replace(partial, target)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"cannot download {url} to {target}: {error or type(error).__name__}; the same command again "
            f"continues it, or fetch the file there by other means"
        ) from error


def _append(url: str, partial: Path, size: int, progress: Progress | None) -> None:
    have = partial.stat().st_size if partial.exists() else 0
    if have >= size:
        return
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
        # A server that does not know ranges answers 200 and starts over.
        continued = response.status == 206
        have = have if continued else 0
        with open(partial, "ab" if continued else "wb") as stream:
            # One block more than announced is enough to see that it is another file.
            while have <= size and (block := response.read(_BLOCK)):
                stream.write(block)
                have += len(block)
                if progress is not None:
                    progress(min(have, size), size)
