"""CUDA sources to machine code at run time, with NVIDIA's compiler library (pipelines/cuda_compiler.py) and no toolkit.

What it made is kept in memory and on the disk, by everything that decides it: source, headers, architecture, options,
version of the compiler.

The folder is $FASTSUNCET_CACHE, else $XDG_CACHE_HOME/fastsuncet, else ~/.cache/fastsuncet. It may be removed any time.
"""

import contextlib
import functools
import hashlib
import os
import tempfile
from pathlib import Path

from pipelines.cuda_compiler import KernelError, bindings, cache_folder, check, compile_cuda, version

SOURCES = Path(__file__).parent
# C++17 for `if constexpr`. No fast math: it would make NaN and infinity undefined, and a diverged run unseen.
OPTIONS = ("--std=c++17",)
DIGEST = hashlib.sha256().digest_size


def architecture(major: int, minor: int) -> str:
    """What to compile for on a device of this compute capability: its own machine code, or, on a card newer than
    the compiler, the newest portable code it knows, which the driver finishes."""
    compiler, known = version(), check(bindings("nvrtc").nvrtcGetSupportedArchs())
    asked = 10 * major + minor
    if asked in known:
        return f"sm_{asked}"
    older = [each for each in known if each < asked]
    if not older:
        raise KernelError(
            f"NVRTC {compiler} compiles for none as old as sm_{asked}; its oldest is sm_{min(known)}"
        )
    return f"compute_{max(older)}"


@functools.cache
def compiled(source: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """`source`, a file beside this one, as a cubin for "sm_XX" or as PTX for "compute_XX".

    Raises KernelError with the compiler's log, or with the reason why there is no compiler.
    """
    texts = {path.name: path.read_bytes() for path in sorted(SOURCES.glob("*.cuh"))}
    texts[source] = (SOURCES / source).read_bytes()
    decides = [arch, *OPTIONS, *options, str(version()), *(f"{k}\n{v.decode()}" for k, v in texts.items())]
    key = hashlib.sha256("\0".join(decides).encode()).hexdigest()[:32]
    kept = folder() / f"{source}-{arch}-{key}"
    if (code := _read(kept)) is None:
        code = _compile(source, texts, arch, (*OPTIONS, *options))
        _keep(kept, code)
    return code


def folder() -> Path:
    """Where compiled kernels are kept."""
    return cache_folder("kernels")


def _compile(source: str, texts: dict[str, bytes], arch: str, options: tuple[str, ...]) -> bytes:
    headers = {name: text for name, text in texts.items() if name != source}
    return compile_cuda(source, texts[source], headers, arch, options)


def _read(path: Path) -> bytes | None:
    """What was kept, or None where nothing was, or where it is not what was kept (a full disk, a bad one)."""
    try:
        held = path.read_bytes()
    except OSError:
        return None
    code = held[DIGEST:]
    return code if code and hashlib.sha256(code).digest() == held[:DIGEST] else None


def _keep(path: Path, code: bytes) -> None:
    """In one step and under a name of its own: all ranks of a machine compile, and write, at the same time."""
    # A read-only home or a full disk costs this process half a second at its next start, and nothing else.
    with contextlib.suppress(OSError):
        path.parent.mkdir(
            parents=True, exist_ok=True, mode=0o700
        )  # code that will run: nobody else's to write
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".tmp-", delete=False) as stream:
            try:
                stream.write(hashlib.sha256(code).digest() + code)
                stream.close()
                os.replace(stream.name, path)
            except BaseException:
                os.unlink(stream.name)
                raise
