"""The C++ of this folder to a library that DALI loads: which compiler, which headers, where it is kept.

The folder is $FASTSUNCET_CACHE, else $XDG_CACHE_HOME/fastsuncet, else ~/.cache/fastsuncet. It may be removed any time.
It is used only where nobody else may write to it: what lies in it is run.
A library is kept by everything that decides it: sources, flags (those in $CXX and DALI's own too), the versions of the
compiler, of DALI and of its CUDA, the kind of processor.
"""

import functools
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

from pipelines import compile_cache as cache
from pipelines.backend import dali_problem
from pipelines.dali.plugin import ptx
from pipelines.data_errors import DataError

SOURCES = Path(__file__).parent
NAMES = {"cpu": "color_jitter", "gpu": "color_jitter_gpu"}
COMPILERS = ("g++", "c++", "clang++")
# No product is contracted with its sum: DALI's are not. VECTORS are what the loops need to become vectors
# (minimum, maximum and choice without branches); they change what happens to NaN, infinity, traps and the sign of zero,
# of which there are none here, and not the result of any operation.
VECTORS = ("-ffinite-math-only", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno")
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-ffp-contract=off", *VECTORS)
NEEDED = ("crt/host_config.h", "nv/target")  # of CUDA's headers, which DALI's include; wheels hold them apart
NEEDED_OF_DALI = "dali/core/geom/mat.h"
DIGEST = hashlib.sha256().digest_size
ANSWER = 60  # seconds for a compiler to tell its version: every run asks, and one that waits for a license never tells


def build(prove: Callable[[Path], None], device: str = "cpu") -> Path:
    """The plug-in for a device, compiled unless it is kept already; `prove(path)` loads it first, and raises if it is
    not fit.

    Raises DataError where there is no DALI, no compiler or no CUDA headers, with what the compiler said, or where the
    library cannot be kept or DALI cannot load it.
    """
    if (reason := unavailable(device)) is not None:
        raise DataError(f"the color operator cannot be built here: {reason}")
    target = place(device)
    if whole(target):
        return target
    try:
        return _built(target, prove, device)
    except OSError as error:
        raise DataError(
            f"the color operator cannot be kept in {target.parent}: {error.strerror or error}; set FASTSUNCET_CACHE to "
            "a folder that can be written"
        ) from error


def _built(target: Path, prove: Callable[[Path], None], device: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # code that will run: nobody else's to write
    # In one step and under a name of its own: whoever builds at the same time writes the same.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tmp-") as work:
        made = Path(work) / target.name
        if device == "gpu":
            (Path(work) / "ptx.inc").write_text(ptx.literal())
        line = [*command(device), f"-I{work}", "-o", str(made)]
        compiled = subprocess.run(line, capture_output=True, text=True)
        if compiled.returncode != 0 or not made.is_file():
            told = compiled.stderr.strip()[-4000:] or "it wrote nothing"
            raise DataError(f"the color operator does not compile with {compiler_version()}:\n{told}")
        # Behind the last section, where a loader does not look: whether the file is what was written.
        made.write_bytes((code := made.read_bytes()) + hashlib.sha256(code).digest())
        try:
            prove(made)
        except RuntimeError as error:  # DALI's words
            raise DataError(f"the color operator compiles, and DALI cannot run it: {error}") from error
        os.replace(made, target)
    return target


def kept(device: str = "cpu") -> Path | None:
    """The plug-in that was built for this very DALI, compiler and processor; None where there is none."""
    return target if unavailable(device) is None and whole(target := place(device)) else None


def whole(path: Path) -> bool:
    """Whether `path` is there and holds what was written: a full disk leaves half a library, which might load."""
    try:
        held = path.read_bytes()
    except OSError:
        return False
    return len(held) > DIGEST and hashlib.sha256(held[:-DIGEST]).digest() == held[-DIGEST:]


def unavailable(device: str = "cpu") -> str | None:
    """Why nothing can be built here for a device, or None. Whether the device is here is for the proof to find."""
    if (problem := dali_problem()) is not None:
        return f"DALI cannot be used ({problem})"
    if not compiler():
        named = f"$CXX ({os.environ['CXX']})" if os.environ.get("CXX") else f"one of {', '.join(COMPILERS)}"
        return f"no C++ compiler: {named} was not found"
    if compiler_version() is None:
        return f"{shlex.join(compiler())} does not tell its version"
    missing = [name for name in NEEDED if header_folder(name) is None]
    if missing:
        return (
            f"no {' and no '.join(missing)} of CUDA's headers: they come with torch's CUDA wheels for Linux, or set "
            "CUDA_HOME"
        )
    if header_folder(NEEDED_OF_DALI) is None:
        return f"no {NEEDED_OF_DALI}: DALI's wheel has it, and what was packed of a wheel may not"
    if (problem := _unkept()) is not None:
        return f"{problem}; set FASTSUNCET_CACHE to another folder"
    return ptx.unavailable() if device == "gpu" else None


def place(device: str = "cpu") -> Path:
    """Where this machine's plug-in for a device is kept, or would be."""
    import nvidia.dali
    from nvidia.dali import sysconfig

    # Of DALI's flags not the paths: they decide nothing.
    flags = [flag for flag in sysconfig.get_compile_flags() if not flag.startswith("-I")]
    versions = [str(compiler_version()), nvidia.dali.__version__, str(nvidia.dali.__cuda_version__)]
    decides = [*compiler()[1:], *FLAGS, *flags, *ptx.OPTIONS, *versions, platform.machine()]
    decides += [f"{path.name}\n{path.read_text()}" for path in sources()]
    key = hashlib.sha256("\0".join(decides).encode()).hexdigest()[:32]
    return folder() / f"{NAMES[device]}-{key}.so"


def folder() -> Path:
    """Where plug-ins are kept."""
    return cache.folder("plugin")


def _unkept() -> str | None:
    """Why no library can be kept, or trusted, in the folder; None where it can, or where there is no folder yet."""
    try:
        status = folder().stat()
    except RuntimeError as error:
        return f"there is no folder to keep it in ({error})"
    except OSError:
        return None
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        return f"others than you may write to {folder()}, and what is kept there is code that runs"
    return None


def sources() -> list[Path]:
    """Everything that is compiled of our own."""
    return sorted(path for ending in ("cc", "cu", "h") for path in SOURCES.glob(f"*.{ending}"))


def command(device: str = "cpu") -> list[str]:
    """The compiler's command line, less the name of what it makes."""
    from nvidia.dali import sysconfig

    headers = dict.fromkeys(str(header_folder(name)) for name in NEEDED)
    return [
        *compiler(),
        *FLAGS,
        "-w",  # DALI's headers warn, and nobody here can mend them
        *sysconfig.get_compile_flags(),
        *[f"-I{path}" for path in headers],
        str(SOURCES / f"{NAMES[device]}.cc"),
        *sysconfig.get_link_flags(),
        "-ldali_core",
    ]


def compiler() -> list[str]:
    """$CXX, or the first of COMPILERS there is, as the start of a command line; empty if there is none."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quotation mark without its other half: no command
        return []
    if named:
        return named if shutil.which(named[0]) else []
    return next(([found] for name in COMPILERS if (found := shutil.which(name))), [])


def compiler_version() -> str | None:
    """What the compiler calls itself; None where it does not say."""
    return _version(tuple(compiler()))


@functools.cache
def _version(start: tuple[str, ...]) -> str | None:
    try:
        line = [*start, "--version"]
        told = subprocess.run(line, capture_output=True, text=True, check=True, timeout=ANSWER).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return told.partition("\n")[0].strip() or None


def header_folder(name: str) -> Path | None:
    """The folder below which a header of CUDA's is to be found; the wheels in this environment come first."""
    wheels = [Path(place) for place in _places("nvidia")]
    folders = [each / "include" for wheel in wheels for each in sorted(wheel.glob("*"))]
    folders += [Path(place) / "backends" / "nvidia" / "include" for place in _places("triton")]
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders += [Path(home) / "include" for home in homes if home]
    tried = [folder for each in folders for folder in (each, each / "cccl")]
    return next((folder for folder in tried if (folder / name).is_file()), None)


def _places(package: str) -> list[str]:
    found = importlib.util.find_spec(package)
    return list(found.submodule_search_locations or ()) if found else []
