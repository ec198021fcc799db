"""Compile the CUDA sources of this folder at run time (pipelines/cuda_compiler.py), without a CUDA toolkit."""

from pathlib import Path

from pipelines import cuda_compiler

SOURCES = Path(__file__).parent
# C++17 for `if constexpr`. No fast math: it would make NaN and infinity undefined, and hide a diverged run.
OPTIONS = ("--std=c++17",)


def compiled(source: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """Return `source`, a file of this folder, as a cubin for "sm_XX" or as PTX for "compute_XX".

    Raises KernelError with the compiler's log, or with the reason why there is no compiler.
    """
    return cuda_compiler.compiled(SOURCES / source, arch, (*OPTIONS, *options))
