"""The kernels' own sources built by g++ (tests/host_shim) and launched on CPU tensors through the callers' own code."""

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

from fastsuncet.kernels import launcher as launch
from fastsuncet.kernels import nvrtc

SHIM = Path(__file__).parent / "host_shim"
SOURCES = Path(launch.__file__).parent
CACHE = nvrtc.folder().parent / "host_kernels"
# A small block, and warps of 4: the barriers and exchanges are the same in kind, and a thread is a real one here.
SIZES = {"THREADS": 8, "CHUNK": 32, "TENSORS": 6}


@functools.cache
def built(name: str, *flags: str) -> Path:
    """A file of tests/host_shim compiled with `flags`; the test is skipped, with the reason, where that cannot be.

    Kept beside the compiled kernels, by all it was made from: the ranks of a test, and the next run, find it there.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here to build the kernels for the CPU with")
    command = [
        compiler,
        "-std=c++20",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-pthread",
        *flags,
    ]
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
    """Every kernel's launcher, and a driver that knows them: one build, of some ten seconds, for all tests."""
    return built("libcuda.cpp", "-O1", "-shared", "-fPIC")


class HostModule:
    """What `launch.Module` is on a device."""

    def __init__(self, launched: list[str], source: str, options: tuple[str, ...]):
        self.library = ctypes.CDLL(str(library()))
        self.launched = launched
        element = [option.removeprefix("-DELEMENT=") for option in options if "ELEMENT" in option]
        self.space = element[0] if element else source.removesuffix(".cu")

    def launch(self, kernel, grid, block, arguments, *, shared=0):
        if 0 in grid:
            return
        self.launched.append(kernel)
        count = len(arguments.values)
        call = getattr(self.library, f"launch_{self.space}_{kernel}")
        takes = call(ctypes.c_void_p(arguments.address), count, *grid, block, shared)
        assert takes == 0, f"{kernel} takes {takes} arguments, its caller gave {count}"


@contextlib.contextmanager
def on_the_host(*callers):
    """Kernels run on CPU tensors; yields the list of the names of what is launched.

    `callers`: modules of ours whose THREADS and the like become those of the host's build.
    """
    launched: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            launch, "load", lambda source, device, options=(): HostModule(launched, source, options)
        )
        for caller in callers:
            for key, value in SIZES.items():
                if hasattr(caller, key):
                    patch.setattr(caller, key, value)
        yield launched
