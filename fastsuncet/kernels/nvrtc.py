"""Compile the CUDA sources of this folder at run time (pipelines/cuda_compiler.py), without a CUDA toolkit.

The result is kept in memory and on disk, named by everything that decides it: source, headers, architecture,
options and compiler version. The folder is $FASTSUNCET_CACHE, else $XDG_CACHE_HOME/fastsuncet, else
~/.cache/fastsuncet. It can be removed at any time.
"""

import contextlib
import functools
import hashlib
import os
import tempfile
from pathlib import Path

from pipelines.cuda_compiler import KernelError, bindings, cache_folder, check, compile_cuda, version

SOURCES = Path(__file__).parent
# C++17 for `if constexpr`. No fast math: it would make NaN and infinity undefined, and hide a diverged run.
OPTIONS = ("--std=c++17",)
DIGEST = hashlib.sha256().digest_size


def architecture(major: int, minor: int) -> str:
    """Return the architecture to compile for on a device of this compute capability.

    Usually it is the device's own machine code. On a GPU newer than the compiler it is the newest portable code
    that the compiler knows, which the driver finishes. Raises KernelError for a GPU too old for the compiler.
    """
    compiler, known = version(), check(bindings("nvrtc").nvrtcGetSupportedArchs())
    asked = 10 * major + minor
    if asked in known:
        return f"sm_{asked}"
    older = [each for each in known if each < asked]
    if not older:
        raise KernelError(
            f"NVRTC {compiler} cannot compile for sm_{asked}: its oldest is sm_{min(known)}. "
            "Use a torch build for an older CUDA version"
        )
    return f"compute_{max(older)}"


@functools.cache
def compiled(source: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """Return `source`, a file of this folder, as a cubin for "sm_XX" or as PTX for "compute_XX".

    Raises KernelError with the compiler's log, or with the reason why there is no compiler.
    """
    headers = {path.name: path.read_bytes() for path in sorted(SOURCES.glob("*.cuh"))}
    text, options = (SOURCES / source).read_bytes(), (*OPTIONS, *options)
    inputs = [
        arch,
        *options,
        str(version()),
        *(f"{k}\n{v.decode()}" for k, v in headers.items()),
        text.decode(),
    ]
    path = folder() / f"{source}-{arch}-{hashlib.sha256(chr(0).join(inputs).encode()).hexdigest()[:32]}"
    if (code := _read(path)) is None:
        code = compile_cuda(source, text, headers, arch, options)
        # A read-only home or a full disk costs half a second at the next start, and nothing else.
        with contextlib.suppress(OSError):
            _write(path, code)
    return code


def folder() -> Path:
    """Return the folder of compiled kernels."""
    return cache_folder("kernels")


def _read(path: Path) -> bytes | None:
    """Return the code in a file, or None if it is absent or damaged (a full disk, a bad one)."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code = content[DIGEST:]
    return code if code and hashlib.sha256(code).digest() == content[:DIGEST] else None


def _write(path: Path, code: bytes) -> None:
    """Write digest and code under a temporary name and rename: all ranks of a machine write at the same time."""
    # The file is code that will run, so nobody else can write to its folder.
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".tmp-", delete=False) as stream:
        try:
            stream.write(hashlib.sha256(code).digest() + code)
            stream.close()
            os.replace(stream.name, path)
        except BaseException:
            os.unlink(stream.name)
            raise
