"""Compiling, caching and launching CUDA sources: every kernel for every architecture, and every failure."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastsuncet.kernels import launcher
from fastsuncet.losses import contrast_kernel
from fastsuncet.models import norm_kernel
from fastsuncet.optim import lars_kernel
from pipelines import cuda_compiler
from pipelines.cuda_compiler import KernelError
from tests.support.host_kernels import library

OPTIONS = {
    "lars.cu": [lars_kernel.options()],
    "contrast.cu": [contrast_kernel.options()],
    "norm.cu": [norm_kernel.options(dtype) for dtype in norm_kernel.ELEMENTS],
}
LARS = OPTIONS["lars.cu"][0]
CARDS = ((7, 5), (8, 0), (9, 0), (10, 0))  # one of each generation
MISSING = cuda_compiler.unavailable()
needs_nvrtc = pytest.mark.skipif(MISSING is not None, reason=f"no NVRTC: {MISSING}")


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    cuda_compiler.compiled.cache_clear()
    yield tmp_path / "kernels"
    cuda_compiler.compiled.cache_clear()


@pytest.fixture
def fresh_bindings():
    """Forget which bindings and compiler were found, before and after."""
    found = (cuda_compiler.bindings, cuda_compiler.version)
    for function in found:
        function.cache_clear()
    yield
    for function in found:
        function.cache_clear()


def test_launcher_tests_list_every_source():
    assert sorted(OPTIONS) == sorted(path.name for path in launcher.SOURCES.glob("*.cu"))


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("source", OPTIONS)
def test_compiled_takes_every_kernel_for_every_generation(source, card):
    """Takes half a minute the first time."""
    arch = cuda_compiler.architecture(*card)  # portable where the compiler is older than the card
    start, entry = (b"\x7fELF", b".text.") if arch.startswith("sm_") else (b"//", b".entry ")
    declared = (launcher.SOURCES / source).read_text().count("\nKERNEL(")
    for options in OPTIONS[source]:
        code = launcher.compiled(source, arch, options)
        assert code.lstrip().startswith(start) and code.count(entry) >= declared > 0


@needs_nvrtc
def test_architecture_of_a_newer_gpu_is_portable_code(empty_cache):
    assert cuda_compiler.architecture(9, 0) == "sm_90"
    newest = cuda_compiler.architecture(99, 0)
    assert newest.startswith("compute_")
    assert b".target sm_" in launcher.compiled("lars.cu", newest, LARS)
    with pytest.raises(KernelError, match=r"sm_35.*oldest is sm_"):
        cuda_compiler.architecture(3, 5)


@needs_nvrtc
def test_compiled_reports_the_compilers_log(empty_cache):
    with pytest.raises(KernelError, match=r"lars.cu does not compile for sm_90(.|\n)*CHUNK"):
        launcher.compiled("lars.cu", "sm_90", ("-DTHREADS=256",))
    assert not empty_cache.exists()


@needs_nvrtc
def test_compiled_caches_by_architecture_and_options_and_repairs(empty_cache, monkeypatch):
    calls = []  # of a compiler that takes no time
    monkeypatch.setattr(cuda_compiler, "compile_cuda", lambda *a: calls.append(a) or repr(a).encode())

    def compiled(*arguments):
        cuda_compiler.compiled.cache_clear()  # as in another process
        return launcher.compiled(*arguments)

    code = compiled("lars.cu", "sm_90", LARS)
    assert compiled("lars.cu", "sm_90", LARS) == code and len(calls) == 1
    (cached,) = empty_cache.iterdir()
    compiled("lars.cu", "sm_80", LARS)
    compiled("lars.cu", "sm_90", (*LARS, "-DUNUSED=1"))
    assert len(calls) == 3
    assert cached.read_bytes()[-32:] == hashlib.sha256(code).digest()
    cached.write_bytes(cached.read_bytes()[:-100])
    assert compiled("lars.cu", "sm_90", LARS) == code and len(calls) == 4
    assert not [path for path in empty_cache.iterdir() if path.name.startswith(".tmp")]


@needs_nvrtc
@pytest.mark.parametrize("homeless", [False, True])
def test_compiled_works_without_a_writable_folder(tmp_path, monkeypatch, empty_cache, homeless):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path / "file"))
    if homeless:
        for name in ("FASTSUNCET_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os, "getuid", lambda: 2**31)  # of no user
    assert launcher.compiled("lars.cu", "sm_90", LARS).startswith(b"\x7fELF")


@pytest.mark.slow
@needs_nvrtc
def test_launch_runs_every_kernel_through_nvidias_bindings(tmp_path):
    """With a driver without a GPU."""
    (tmp_path / "libcuda.so.1").symlink_to(library())
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.host_driver"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # On another stream than torch's the driver refuses, and the error names the kernel.
    expected = "lars_norms of lars.cu, grid (7, 1), block 8: CUDA_ERROR_INVALID_VALUE"
    assert done.stdout.startswith(expected), done.stdout


def test_unavailable_without_bindings_names_the_package(monkeypatch, fresh_bindings):
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(cuda_compiler.importlib, "import_module", absent)
    reason = cuda_compiler.unavailable()
    assert "pip install 'cuda-bindings>=12.9.1'" in reason and "cuda.bindings.nvrtc" in reason


def test_unavailable_without_the_library_gives_the_bindings_reason(monkeypatch, fresh_bindings):
    def not_found():
        raise RuntimeError("Failure finding libnvrtc.so")

    monkeypatch.setattr(cuda_compiler, "bindings", lambda name: SimpleNamespace(nvrtcVersion=not_found))
    assert cuda_compiler.unavailable() == "NVRTC: Failure finding libnvrtc.so"
    with pytest.raises(KernelError, match="finding libnvrtc"):
        cuda_compiler.architecture(9, 0)
