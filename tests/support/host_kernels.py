"""Build the kernels' sources by g++ (tests/support/host_shim) and launch them on CPU tensors from their callers."""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from fastsuncet.kernels import launcher

SHIM = Path(__file__).parent / "host_shim"
SOURCES = Path(launcher.__file__).parent
CACHE = Path(__file__).parents[2] / ".pytest_cache" / "host_kernels"  # some users have no home folder
# A small block, and warps of 4: barriers and exchanges are of the same kind, and each thread is a real one.
SIZES = {"THREADS": 8, "CHUNK": 32, "TENSORS": 6, "FLAGS": 64}


@functools.cache
def built(name: str, *flags: str) -> Path:
    """Compile a file of host_shim with `flags`, or skip the test with the reason.

    The result is kept for the ranks of a test and for the next run.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the kernels for the CPU")
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
    command = [compiler, "-std=c++20", *warnings, "-pthread", *flags]
    command += [f"-D{key}={value}" for key, value in SIZES.items()]
    command += [f"-I{SOURCES}", "-include", str(SHIM / "shim.h"), str(SHIM / name), "-o"]
    texts = [path.read_text() for folder in (SHIM, SOURCES) for path in sorted(folder.glob("*.[ch]*"))]
    path = CACHE / hashlib.sha256("\0".join([*command, *texts]).encode()).hexdigest()[:32]
    if path.exists():
        return path
    CACHE.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        done = subprocess.run([*command, f"{folder}/built"], capture_output=True, text=True)
        if "sanitize" in " ".join(flags) and "cannot find" in done.stderr:
            pytest.skip(f"this g++ has no thread sanitizer: {done.stderr.splitlines()[0]}")
        assert done.returncode == 0, done.stderr
        os.replace(f"{folder}/built", path)
    return path


def library() -> Path:
    """Build every kernel's launcher, and a driver that knows them, for all tests: about ten seconds."""
    return built("libcuda.cpp", "-O1", "-shared", "-fPIC")


class HostModule:
    """The counterpart of `launcher.Module` on the host."""

    def __init__(self, launched: list[str], source: str, options: tuple[str, ...]):
        self.library = ctypes.CDLL(str(library()))
        self.launched = launched
        element = [option.removeprefix("-DELEMENT=") for option in options if "ELEMENT" in option]
        self.space = element[0] if element else source.removesuffix(".cu")

    def launch(self, kernel, grid, block, *values, shared=0):
        if 0 in grid:
            return
        self.launched.append(kernel)
        held = [value if kind is None else kind(value) for value, kind in zip(*launcher.arguments(*values))]
        addresses = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        call = getattr(self.library, f"launch_{self.space}_{kernel}")
        takes = call(addresses, len(held), *grid, block, shared)
        assert takes == 0, f"{kernel} takes {takes} arguments, its caller gave {len(held)}"


@contextlib.contextmanager
def on_the_host(*callers):
    """Run kernels on CPU tensors; yields a growing list of the names of launched kernels.

    `callers`: modules whose THREADS, CHUNK and TENSORS become those of the host's build.
    """
    launched: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            launcher, "load", lambda source, device, options=(): HostModule(launched, source, options)
        )
        for caller in callers:
            for key, value in SIZES.items():
                if hasattr(caller, key):
                    patch.setattr(caller, key, value)
        yield launched
