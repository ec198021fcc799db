"""color_jitter.cu to code for a GPU, by NVRTC: it comes with torch's CUDA wheels, and needs no GPU and no toolkit."""

import importlib
from pathlib import Path
from typing import Any

from pipelines.errors import DataError

SOURCES = Path(__file__).parent
# No product contracted with its sum: the bits are the CPU's.
OPTIONS = ("--std=c++17", "--fmad=false")
OLDEST = "compute_75"  # portable code for the oldest card that torch's wheels know; a driver finishes it for newer ones


def unavailable() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        _checked(_nvrtc().nvrtcVersion())
    except (ImportError, RuntimeError, DataError) as error:  # no bindings; or these found no library
        return f"no NVRTC ({error})"
    return None


def compiled(architecture: str = OLDEST) -> bytes:
    """PTX for "compute_XX", a cubin for "sm_XX". Raises DataError with the compiler's log."""
    nvrtc = _nvrtc()
    headers = sorted(SOURCES.glob("*.h"))
    texts, names = [path.read_bytes() for path in headers], [path.name.encode() for path in headers]
    source = (SOURCES / "color_jitter.cu").read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(source, b"color_jitter.cu", len(names), texts, names))
    try:
        flags = [flag.encode() for flag in (f"--gpu-architecture={architecture}", *OPTIONS)]
        if int(nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]) != 0:
            log = _text(program, "ProgramLog").decode(errors="replace").strip("\0\n")
            raise DataError(f"color_jitter.cu does not compile for {architecture}:\n{log}")
        return _text(program, "CUBIN" if architecture.startswith("sm_") else "PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def literal() -> str:
    """The PTX as a string literal of C++."""
    text = compiled().rstrip(b"\0").decode()
    # In pieces: a compiler need take no literal of more than 64 kB.
    pieces = [text[at : at + 8000] for at in range(0, len(text), 8000)]
    return "\n".join(f'R"ptx({piece})ptx"' for piece in pieces)


def _nvrtc() -> Any:
    return importlib.import_module("cuda.bindings.nvrtc")


def _checked(result: tuple) -> Any:
    status, *values = result
    if int(status) != 0:
        raise DataError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _text(program: Any, kind: str) -> bytes:
    nvrtc = _nvrtc()
    text = bytearray(_checked(getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))
    _checked(getattr(nvrtc, f"nvrtcGet{kind}")(program, text))
    return bytes(text)
