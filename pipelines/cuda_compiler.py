"""Compile CUDA C++ with NVRTC, and keep the result in memory and on disk (`pipelines.code_cache`).

NVRTC comes with torch's CUDA wheels. It needs no GPU, no CUDA toolkit and no C++ compiler.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pipelines import code_cache
from pipelines.output import say_line


class KernelError(RuntimeError):
    """A kernel cannot be compiled, loaded or launched. The text holds the message of the compiler or the driver."""


@functools.cache
def bindings(name: str) -> ModuleType:
    """Return NVIDIA's Python bindings `name`, "nvrtc" or "driver". Raises KernelError with the reason if absent."""
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise KernelError(
            f"no Python bindings of NVIDIA's libraries (pip install 'cuda-bindings>=12.9.1'): {error}"
        ) from error


@functools.cache
def version() -> tuple[int, int]:
    """Return NVRTC's version. Raises KernelError where NVRTC is absent, so call this before any other use of it."""
    nvrtc = bindings("nvrtc")
    try:
        return check(nvrtc.nvrtcVersion())
    except RuntimeError as error:  # raised by the bindings when they find no libnvrtc
        raise KernelError(f"NVRTC: {error}") from error


def driver_version() -> int:
    """Return the newest CUDA that this machine's driver supports, 13000 for 13.0. Raises OSError without a driver.

    torch has no name for it. It starts nothing on the GPU, and needs no bindings.
    """
    number = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    return number.value


def unavailable() -> str | None:
    """Return why nothing can be compiled here, or None."""
    try:
        version()
    except KernelError as error:
        return str(error)
    return None


def check(result: tuple[Any, ...]) -> Any:
    """Return what a call of the bindings gives after its status: None, a value or a tuple. Raises KernelError."""
    status, *values = result
    if int(status) != 0:
        raise KernelError(f"{type(status).__name__} {int(status)}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


def compile_cuda(
    name: str, source: bytes, headers: Mapping[str, bytes], arch: str, options: Sequence[str]
) -> bytes:
    """Compile `source` and the headers it includes: to a cubin for "sm_XX", to PTX for "compute_XX".

    Raises KernelError with the compiler's log, or with the reason why there is no compiler.
    """
    nvrtc, names = bindings("nvrtc"), [header.encode() for header in headers]
    program = check(
        nvrtc.nvrtcCreateProgram(source, name.encode(), len(names), list(headers.values()), names)
    )

    def read(kind: str) -> bytes:
        text = bytearray(check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))
        check(getattr(nvrtc, f"nvrtcGet{kind}")(program, text))
        return bytes(text)

    try:
        flags = [flag.encode() for flag in (f"--gpu-architecture={arch}", *options)]
        status = nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]
        if int(status) != 0:
            log = read("ProgramLog").decode(errors="replace").strip("\0\n")
            raise KernelError(f"{name} does not compile for {arch}: {status.name}, NVRTC {version()}\n{log}")
        return read("CUBIN" if arch.startswith("sm_") else "PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


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
def compiled(path: Path, arch: str, options: tuple[str, ...]) -> bytes:
    """Return the code of a source and the headers (.h, .cuh) of its folder, from the cache if it is there.

    See `compile_cuda`. A file of the cache is named by everything that decides it: source, headers, architecture,
    options and NVRTC's version.
    """
    headers = {each.name: each.read_bytes() for each in sorted(path.parent.glob("*.*h")) if each.is_file()}
    source = path.read_bytes()
    texts = (f"{header}\n{text.decode()}" for header, text in headers.items())
    decisive = [arch, *options, str(version()), *texts, source.decode()]
    name = f"{path.name}-{arch}-{hashlib.sha256(chr(0).join(decisive).encode()).hexdigest()[:32]}"
    try:
        kept = code_cache.cache_folder("kernels") / name
    except RuntimeError:  # a user without a home directory
        return compile_cuda(path.name, source, headers, arch, options)
    if (code := code_cache.read(kept)) is None:
        code = compile_cuda(path.name, source, headers, arch, options)
        if (problem := code_cache.problem(kept)) is not None:
            say_line(f"Compiled {path.name} and kept it in memory only: {problem}.")
            return code
        # A read-only home or a full disk costs half a second at the next start, and nothing else.
        with contextlib.suppress(OSError):
            code_cache.write(kept, code)
    return code
