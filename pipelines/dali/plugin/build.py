"""Compile the plug-in into a library that DALI loads, and keep it in the cache folder.

The folder is $FASTSUNCET_CACHE/plugin, else $XDG_CACHE_HOME/fastsuncet/plugin, else ~/.cache/fastsuncet/plugin. It can
be deleted at any time. Its libraries are executed, so it is used only if no other user can write to it. A library's
name holds a hash of what decides its code: sources, flags (those in $CXX and DALI's too), the versions of DALI and its
CUDA, the kind of processor. The compiler is not part of it, so a run needs none to use what was built.
"""

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from pipelines import cuda_compiler
from pipelines.backend import dali_problem
from pipelines.data_errors import DataError

SOURCES = Path(__file__).parent
NAMES = {"cpu": "color_jitter", "gpu": "color_jitter_gpu"}
COMPILERS = ("g++", "c++", "clang++")
# DALI does not contract a product with a sum, so neither compiler may. The second row lets the loops become vectors
# (minimum, maximum and choice without branches). It changes NaN, infinity, traps and the sign of zero, none of which
# occur here, and the result of no operation.
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-ffp-contract=off"),
    *("-ffinite-math-only", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)
NVRTC_FLAGS = ("--std=c++17", "--fmad=false")
# Code for the oldest card that torch's wheels support; the driver translates it for newer ones.
PTX_ARCH = "compute_75"
# DALI's headers include them; wheels hold them in two places.
CUDA_HEADERS = ("crt/host_config.h", "nv/target")
DALI_HEADER = "dali/core/geom/mat.h"
DIGEST = hashlib.sha256().digest_size


def build(prove: Callable[[Path], None], device: str = "cpu") -> Path:
    """Return the plug-in for a device, compiled unless it is kept already. `prove(path)` raises if it must not be kept.

    Raises DataError where it cannot be compiled (the text says what is missing, or what the compiler said), kept, or
    loaded by DALI.
    """
    if (reason := unavailable(device)) is not None:
        raise DataError(f"the color operator cannot be built here: {reason}")
    target = library_path(device)
    if is_whole(target):
        return target
    try:
        # Others must not be able to write to the folder: its code is executed.
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tmp-") as work:
            library = Path(work) / target.name
            _compile(library, device)
            try:
                prove(library)
            except RuntimeError as error:  # from DALI
                raise DataError(f"the color operator compiles, but DALI cannot run it: {error}") from error
            # Atomic: another process that builds at the same time writes the same file.
            os.replace(library, target)
    except OSError as error:
        raise DataError(
            f"the color operator cannot be kept in {target.parent}: {error.strerror or error}; set FASTSUNCET_CACHE to "
            "a folder that can be written"
        ) from error
    return target


def kept(device: str = "cpu") -> Path | None:
    """Return the plug-in built for this DALI and this kind of processor, or None."""
    if dali_problem() is not None or folder_problem() is not None:
        return None
    path = library_path(device)
    return path if is_whole(path) else None


def unavailable(device: str = "cpu") -> str | None:
    """Return why the plug-in cannot be built here, or None. Whether the device exists is for `prove` to find out."""
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
    if header_folder(DALI_HEADER) is None:
        return f"DALI's header {DALI_HEADER} was not found: install DALI from its wheel"
    if (problem := folder_problem()) is not None:
        return problem
    if device == "gpu" and (problem := cuda_compiler.unavailable()) is not None:
        return f"no NVRTC ({problem})"
    return None


def folder_problem() -> str | None:
    """Return why nothing can be kept in, or executed from, the cache folder; None if it is safe or does not exist."""
    try:
        folder = cuda_compiler.cache_folder("plugin")
        status = folder.stat()
    except RuntimeError as error:  # a user without a home directory
        return f"there is no cache folder ({error}); set FASTSUNCET_CACHE to a folder"
    except OSError:
        return None
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        return (
            f"other users can write to {folder}, and its files are executed; correct its owner and mode, or set "
            "FASTSUNCET_CACHE to another folder"
        )
    return None


def library_path(device: str = "cpu") -> Path:
    """Return where this machine's plug-in for a device is kept, or would be."""
    import nvidia.dali
    from nvidia.dali import sysconfig

    # DALI's include paths are left out: they decide nothing.
    flags = [flag for flag in sysconfig.get_compile_flags() if not flag.startswith("-I")]
    versions = [nvidia.dali.__version__, str(nvidia.dali.__cuda_version__)]
    parts = [*_cxx()[1:], *FLAGS, *flags, *NVRTC_FLAGS, *versions, platform.machine()]
    parts += [f"{path.name}\n{path.read_text()}" for path in sources()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return cuda_compiler.cache_folder("plugin") / f"{NAMES[device]}-{key}.so"


def sources() -> list[Path]:
    """Return the plug-in's C++ and CUDA files."""
    return sorted(path for ending in ("cc", "cu", "h") for path in SOURCES.glob(f"*.{ending}"))


def is_whole(library: Path) -> bool:
    """Return whether a library holds what was written: after a crash, half of one can remain and even load."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return len(content) > DIGEST and hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def _compile(library: Path, device: str) -> None:
    from nvidia.dali import sysconfig

    if device == "gpu":
        (library.parent / "ptx.inc").write_text(ptx_literal())
    folders = dict.fromkeys([str(library.parent), *(str(header_folder(name)) for name in CUDA_HEADERS)])
    command = [
        *compiler(),
        *FLAGS,
        "-w",  # DALI's headers cause warnings
        *sysconfig.get_compile_flags(),
        *[f"-I{folder}" for folder in folders],
        str(SOURCES / f"{NAMES[device]}.cc"),
        *sysconfig.get_link_flags(),
        "-ldali_core",
        *("-o", str(library)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 or not library.is_file():
        message = done.stderr.strip()[-4000:] or "it wrote no library"
        raise DataError(f"the color operator does not compile with {shlex.join(compiler())}:\n{message}")
    # Behind the last section, where a loader does not look, for `is_whole`.
    code = library.read_bytes()
    library.write_bytes(code + hashlib.sha256(code).digest())


def ptx(arch: str = PTX_ARCH) -> bytes:
    """Compile color_jitter.cu: to PTX for "compute_XX", to a cubin for "sm_XX". Raises DataError with NVRTC's log."""
    headers = {path.name: path.read_bytes() for path in sorted(SOURCES.glob("*.h"))}
    source = (SOURCES / "color_jitter.cu").read_bytes()
    try:
        return cuda_compiler.compile_cuda("color_jitter.cu", source, headers, arch, NVRTC_FLAGS)
    except cuda_compiler.KernelError as error:
        raise DataError(str(error)) from error


def ptx_literal() -> str:
    """Return the PTX as a C++ string literal, in pieces: a compiler need not accept one of more than 64 kB."""
    text = ptx().rstrip(b"\0").decode()
    pieces = [text[start : start + 8000] for start in range(0, len(text), 8000)]
    return "\n".join(f'R"ptx({piece})ptx"' for piece in pieces)


def compiler() -> list[str]:
    """Return $CXX, or the first of COMPILERS that exists, as the start of a command line; empty if there is none."""
    if named := _cxx():
        return named if shutil.which(named[0]) else []
    return next(([found] for name in COMPILERS if (found := shutil.which(name))), [])


def _cxx() -> list[str]:
    try:
        return shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # an unclosed quotation mark: no such command
        return [os.environ["CXX"]]


def header_folder(name: str) -> Path | None:
    """Return the folder that holds a header of CUDA or DALI; the wheels of this environment come first."""
    folders = [each / "include" for wheel in _installed("nvidia") for each in sorted(wheel.glob("*"))]
    folders += [path / "backends" / "nvidia" / "include" for path in _installed("triton")]
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders += [Path(home) / "include" for home in homes if home]
    tried = [folder for each in folders for folder in (each, each / "cccl")]
    return next((folder for folder in tried if (folder / name).is_file()), None)


def _installed(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [Path(path) for path in (spec and spec.submodule_search_locations) or ()]
