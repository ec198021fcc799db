"""Compile the view operator: a library that DALI loads, kept in the cache folder or in this package, and GPU kernels.

A library's name holds a hash of what decides its code: sources, flags (those in $CXX and DALI's too), the versions of
DALI and its CUDA, the kind of processor. The compiler is not part of it, so a run needs none to use what was built.
"""

import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

from pipelines import code_cache
from pipelines.backend import dali_problem
from pipelines.data_errors import DataError
from pipelines.sampling.augmentation import Augmentation

SOURCES = Path(__file__).parent
# For all users of an installation: a container's build fills it, where no run could write.
PREBUILT = SOURCES / "prebuilt"
COMPILERS = ("g++", "c++", "clang++")
# DALI does not contract a product with a sum, so neither compiler may. The second row lets the loops become vectors
# (minimum, maximum and choice without branches). It changes NaN, infinity, traps and the sign of zero, none of which
# occur here, and the result of no operation.
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-ffp-contract=off"),
    *("-ffinite-math-only", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)
# DALI's headers include them; wheels hold them in two places.
CUDA_HEADERS = ("cuda.h", "crt/host_config.h", "nv/target")
# Whole numbers and sums are rounded where DALI's CPU operators round them, so no product may be contracted with a sum.
NVRTC_OPTIONS = ("--std=c++17", "--fmad=false")
WIDEST_BLUR = 65  # pixels, on a GPU: kWidest of pixel.h on each side
# The settings of a view that it knows.
KNOWN = (
    *("size", "crop_scale", "crop_ratio", "flip", "jitter", "strength", "brightness", "contrast"),
    *("saturation", "hue", "color_order", "gray", "blur", "blur_sigma", "blur_window", "mean", "std"),
)


def kept(*, prebuilt: bool = False) -> Path | None:
    """Return what was built for this DALI and this kind of processor, or None. It is whole, and no other user's.

    `prebuilt`: what is kept in this package, and not in the cache folder.
    """
    if dali_problem() is not None:
        return None
    name, folders = library_name(), [PREBUILT]
    if not prebuilt:
        with contextlib.suppress(RuntimeError):  # a user without a home directory
            folders.append(code_cache.cache_folder("view_operator"))
    return next((path for f in folders if code_cache.read(path := f / name) is not None), None)


def unavailable() -> str | None:
    """Return why the view operator cannot be built here, or None."""
    if (problem := dali_problem()) is not None:
        return f"DALI cannot be used ({problem})"
    if not compiler():
        named = f"$CXX ({os.environ['CXX']})" if os.environ.get("CXX") else f"one of {', '.join(COMPILERS)}"
        return f"no C++ compiler: {named} was not found"
    if missing := [name for name in CUDA_HEADERS if header_folder(name) is None]:
        return (
            f"CUDA's headers {' and '.join(missing)} were not found: torch's CUDA wheels for Linux have them, or set "
            "CUDA_HOME"
        )
    try:
        folder = code_cache.cache_folder("view_operator")
    except RuntimeError as error:  # a user without a home directory
        return f"there is no cache folder ({error}); set FASTSUNCET_CACHE to a folder"
    return code_cache.problem(folder / library_name())


def library_name() -> str:
    """Return the name of the view operator's file for this machine."""
    import nvidia.dali
    from nvidia.dali import sysconfig

    # DALI's include paths are left out: they decide nothing.
    flags = [flag for flag in sysconfig.get_compile_flags() if not flag.startswith("-I")]
    versions = [nvidia.dali.__version__, str(nvidia.dali.__cuda_version__)]
    parts = [*os.environ.get("CXX", "").split()[1:], *FLAGS, *flags, *versions, platform.machine()]
    parts += [f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in sources()]
    return f"view-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.so"


def sources() -> list[Path]:
    """Return the C++ files of the library. view.cu is compiled for the GPU of the machine when a graph is built."""
    return sorted(path for ending in ("cc", "h") for path in SOURCES.glob(f"*.{ending}"))


def compile_library(library: Path) -> None:
    """Compile the view operator into the file `library`. Raises DataError with what the compiler says."""
    from nvidia.dali import sysconfig

    command = [
        *compiler(),
        *FLAGS,
        "-w",  # DALI's headers cause warnings
        *sysconfig.get_compile_flags(),
        *[f"-I{folder}" for folder in dict.fromkeys(str(header_folder(name)) for name in CUDA_HEADERS)],
        str(SOURCES / "view.cc"),
        *sysconfig.get_link_flags(),
        "-ldali_core",
        *("-o", str(library)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or not library.is_file():
        message = done.stderr.strip()[-4000:] or "it wrote no library"
        raise DataError(f"the view operator does not compile with {' '.join(compiler())}:\n{message}")


def compiler() -> list[str]:
    """Return $CXX, or the first of COMPILERS that exists, as the start of a command line; empty if there is none."""
    if named := os.environ.get("CXX", "").split():
        return named if shutil.which(named[0]) else []
    return next(([found] for name in COMPILERS if (found := shutil.which(name))), [])


def header_folder(name: str) -> Path | None:
    """Return the folder that holds a header of CUDA; the wheels of this environment come first."""
    folders = [each / "include" for wheel in _installed("nvidia") for each in sorted(wheel.glob("*"))]
    folders += [path / "backends" / "nvidia" / "include" for path in _installed("triton")]
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders += [Path(home) / "include" for home in homes if home]
    tried = [folder for each in folders for folder in (each, each / "cccl")]
    return next((folder for folder in tried if (folder / name).is_file()), None)


def _installed(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [Path(path) for path in (spec and spec.submodule_search_locations) or ()]


def unknown(augmentation: Augmentation) -> str | None:
    """Return why the view operator cannot make such views on any device, or None: a setting that is not off."""
    asked = (each for each in fields(augmentation) if getattr(augmentation, each.name) != each.default)
    name = next((each.name for each in asked if each.name not in KNOWN), None)
    return name and f"the view operator does not know data.augmentation.{name}"


def too_wide(widest_blur: int) -> str | None:
    """Return why view.cu cannot make views with a blur of so many pixels, or None."""
    if widest_blur <= WIDEST_BLUR:
        return None
    return f"it blurs up to {WIDEST_BLUR} pixels wide on a GPU, and data.augmentation asks for {widest_blur}"


def kernels(widest_blur: int, device_id: int) -> bytes:
    """Return view.cu as compiled for a GPU. Raises DataError, also for a blur that is too wide for it."""
    if reason := too_wide(widest_blur):
        raise DataError(f"view_operator: true: {reason}. Set data.view_operator to auto or false.")
    import torch  # only for a GPU, as all below

    from pipelines import cuda_compiler

    try:
        arch = cuda_compiler.architecture(*torch.cuda.get_device_capability(device_id))
        return cuda_compiler.compiled(SOURCES / "view.cu", arch, NVRTC_OPTIONS)
    except cuda_compiler.KernelError as error:
        raise DataError(f"the view operator cannot be compiled for this GPU: {error}") from error
