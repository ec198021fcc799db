"""Compile CUDA C++ with NVRTC, and name the folder where compiled code is kept.

NVRTC comes with torch's CUDA wheels. It needs no GPU, no CUDA toolkit and no C++ compiler.
"""

import functools
import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class KernelError(RuntimeError):
    """A kernel cannot be compiled, loaded or launched. The text holds the message of the compiler or the driver."""


@functools.cache
def bindings(name: str) -> ModuleType:
    """Return NVIDIA's Python bindings `name`, "nvrtc" or "driver". Raises KernelError with the reason if absent.

    From cuda-bindings 12.8 on they are `cuda.bindings.*`; before, `cuda.nvrtc` and `cuda.cuda`.
    """
    older = {"nvrtc": "cuda.nvrtc", "driver": "cuda.cuda"}[name]
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as first:
        try:
            return importlib.import_module(older)
        except ImportError as second:
            reasons = f"cuda.bindings.{name}: {first}; {older}: {second}"
            raise KernelError(
                f"no Python bindings of NVIDIA's libraries (pip install cuda-bindings): {reasons}"
            ) from second


@functools.cache
def version() -> tuple[int, int]:
    """Return NVRTC's version. Raises KernelError where NVRTC is absent, so call this before any other use of it."""
    nvrtc = bindings("nvrtc")
    try:
        return check(nvrtc.nvrtcVersion())
    except RuntimeError as error:  # raised by the bindings when they find no libnvrtc
        raise KernelError(f"NVRTC: {error}") from error


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


def cache_folder(kind: str) -> Path:
    """Return $FASTSUNCET_CACHE/kind, else $XDG_CACHE_HOME/fastsuncet/kind, else ~/.cache/fastsuncet/kind."""
    if folder := os.environ.get("FASTSUNCET_CACHE"):
        return Path(folder) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastsuncet" / kind
