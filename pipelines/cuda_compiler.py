"""CUDA C++ to code for a GPU, by NVIDIA's compiler library: it comes with torch's CUDA wheels, and needs no GPU, no
toolkit and no C++ compiler. Who calls it keeps what it made.
"""

import functools
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any


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


def code_of(
    name: str, source: bytes, headers: Mapping[str, bytes], arch: str, options: Sequence[str]
) -> bytes:
    """`source` and the headers it names as a cubin for "sm_XX" or as PTX for "compute_XX".

    Raises KernelError with the compiler's log, or with the reason why there is no compiler.
    """
    nvrtc, names = bindings("nvrtc"), [header.encode() for header in headers]
    program = check(
        nvrtc.nvrtcCreateProgram(source, name.encode(), len(names), list(headers.values()), names)
    )
    try:
        flags = [flag.encode() for flag in (f"--gpu-architecture={arch}", *options)]
        status = nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]
        if int(status) != 0:
            log = _text(program, "ProgramLog").decode(errors="replace").strip("\0\n")
            raise KernelError(f"{name} does not compile for {arch}: {status.name}, NVRTC {version()}\n{log}")
        return _text(program, "CUBIN" if arch.startswith("sm_") else "PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(program: Any, kind: str) -> bytes:
    nvrtc = bindings("nvrtc")
    text = bytearray(check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))
    check(getattr(nvrtc, f"nvrtcGet{kind}")(program, text))
    return bytes(text)
