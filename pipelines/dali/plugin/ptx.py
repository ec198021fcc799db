"""color_jitter.cu to code for a GPU, by NVRTC: it comes with torch's CUDA wheels, and needs no GPU and no toolkit."""

from pathlib import Path

from pipelines import cuda_compiler as nvrtc
from pipelines.data_errors import DataError

SOURCES = Path(__file__).parent
# No product contracted with its sum: the bits are the CPU's.
OPTIONS = ("--std=c++17", "--fmad=false")
OLDEST = "compute_75"  # portable code for the oldest card that torch's wheels know; a driver finishes it for newer ones


def unavailable() -> str | None:
    """Why nothing can be compiled here, or None."""
    reason = nvrtc.unavailable()
    return None if reason is None else f"no NVRTC ({reason})"


def compiled(architecture: str = OLDEST) -> bytes:
    """PTX for "compute_XX", a cubin for "sm_XX". Raises DataError with the compiler's log."""
    headers = {path.name: path.read_bytes() for path in sorted(SOURCES.glob("*.h"))}
    source = (SOURCES / "color_jitter.cu").read_bytes()
    try:
        return nvrtc.code_of("color_jitter.cu", source, headers, architecture, OPTIONS)
    except nvrtc.KernelError as error:
        raise DataError(str(error)) from error


def literal() -> str:
    """The PTX as a string literal of C++."""
    text = compiled().rstrip(b"\0").decode()
    # In pieces: a compiler need take no literal of more than 64 kB.
    pieces = [text[at : at + 8000] for at in range(0, len(text), 8000)]
    return "\n".join(f'R"ptx({piece})ptx"' for piece in pieces)
