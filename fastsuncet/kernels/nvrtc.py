"""CUDA sources to machine code at run time, with NVIDIA's compiler library and no toolkit.

NVRTC is a dependency of torch's CUDA wheels, and needs neither a GPU nor a C++ compiler. What it made is kept in
memory and on the disk, by everything that decides it: source, headers, architecture, options, version of the compiler.

The folder is $FASTSUNCET_CACHE, else $XDG_CACHE_HOME/fastsuncet, else ~/.cache/fastsuncet. It may be removed any time.
"""

import contextlib
import functools
import hashlib
import importlib
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCES = Path(__file__).parent
# C++17 for `if constexpr`. No fast math: it would make NaN and infinity undefined, and a diverged run unseen.
OPTIONS = ("--std=c++17",)
DIGEST = hashlib.sha256().digest_size


class KernelError(RuntimeError):
    """A kernel cannot be compiled, loaded or launched; the text says what the compiler or the driver said."""


@functools.cache
def bindings(name: str) -> ModuleType:
    """`nvrtc` or `driver` of NVIDIA's Python bindings. Raises KernelError with the reason where there are none.

    From cuda-bindings 12.8 on they are `cuda.bindings.*`; before, `cuda.nvrtc` and `cuda.cuda`.
    """
    older = {"nvrtc": "cuda.nvrtc", "driver": "cuda.cuda"}[name]
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as first:
        try:
            return importlib.import_module(older)
        except ImportError as second:
            told = f"cuda.bindings.{name}: {first}; {older}: {second}"
            raise KernelError(
                f"no bindings of NVIDIA's libraries (pip install cuda-bindings): {told}"
            ) from second


def unavailable() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        version()
    except KernelError as error:
        return str(error)
    return None


@functools.cache
def version() -> tuple[int, int]:
    """NVRTC's own. Raises KernelError where there is none: what else is asked of it, is asked after this."""
    nvrtc = bindings("nvrtc")
    try:
        return check(nvrtc.nvrtcVersion())
    except RuntimeError as error:  # the bindings' own, where they find no libnvrtc
        raise KernelError(f"NVRTC: {error}") from error


def check(result: tuple[Any, ...]) -> Any:
    """What a call of the bindings returned beside its status: None, a value, or a tuple. Raises KernelError."""
    status, *values = result
    if int(status) != 0:
        raise KernelError(f"{type(status).__name__} {int(status)}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


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
    if own := os.environ.get("FASTSUNCET_CACHE"):
        return Path(own) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastsuncet" / "kernels"


def _compile(source: str, texts: dict[str, bytes], arch: str, options: tuple[str, ...]) -> bytes:
    nvrtc = bindings("nvrtc")
    headers = {name: text for name, text in texts.items() if name != source}
    program = check(
        nvrtc.nvrtcCreateProgram(
            texts[source],
            source.encode(),
            len(headers),
            list(headers.values()),
            [name.encode() for name in headers],
        )
    )
    try:
        flags = [flag.encode() for flag in (f"--gpu-architecture={arch}", *options)]
        status = nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]
        if int(status) != 0:
            log = _text(program, "ProgramLog").decode(errors="replace").strip("\0\n")
            raise KernelError(
                f"{source} does not compile for {arch} with NVRTC {version()}: {status.name}\n{log}"
            )
        return _text(program, "CUBIN" if arch.startswith("sm_") else "PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(program: Any, kind: str) -> bytes:
    nvrtc = bindings("nvrtc")
    text = bytearray(check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))
    check(getattr(nvrtc, f"nvrtcGet{kind}")(program, text))
    return bytes(text)


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
