"""Compiling, keeping and launching CUDA sources: every kernel for every architecture, and what is said where not."""

import ctypes
import hashlib
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastsuncet.kernels import launcher as launch
from fastsuncet.kernels import nvrtc
from fastsuncet.kernels import self_test as prove
from fastsuncet.kernels.launcher import Arguments
from fastsuncet.losses import contrast_kernel
from fastsuncet.models import fused_batchnorm as norm_kernels
from fastsuncet.optim import lars_kernel
from pipelines import cuda_compiler as compiler
from pipelines.cuda_compiler import KernelError

OPTIONS = {
    "lars.cu": [lars_kernel.options()],
    "contrast.cu": [contrast_kernel.options()],
    "norm.cu": [norm_kernels.options(dtype) for dtype in norm_kernels.ELEMENTS],
}
LARS = OPTIONS["lars.cu"][0]
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100")
needs_nvrtc = pytest.mark.skipif(
    compiler.unavailable() is not None, reason=f"no NVRTC: {compiler.unavailable()}"
)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Nothing compiled yet, in memory or on the disk."""
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    nvrtc.compiled.cache_clear()
    yield tmp_path / "kernels"
    nvrtc.compiled.cache_clear()


# Compiling


def test_every_source_is_listed_here():
    assert sorted(OPTIONS) == sorted(path.name for path in nvrtc.SOURCES.glob("*.cu"))


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", OPTIONS)
def test_every_kernel_compiles_for_every_architecture(source, arch):  # half a minute the first time
    declared = (nvrtc.SOURCES / source).read_text().count("\nKERNEL(")
    for options in OPTIONS[source]:
        code = nvrtc.compiled(source, arch, options)
        assert code.startswith(b"\x7fELF")
        assert code.count(b".text.") >= declared > 0


@needs_nvrtc
def test_a_card_newer_than_the_compiler_gets_portable_code(fresh):
    assert nvrtc.architecture(9, 0) == "sm_90"
    newest = nvrtc.architecture(99, 0)
    assert newest.startswith("compute_")
    assert b".target sm_" in nvrtc.compiled("lars.cu", newest, LARS)
    with pytest.raises(KernelError, match="compiles for none as old as sm_35"):
        nvrtc.architecture(3, 5)


@needs_nvrtc
def test_what_does_not_compile_is_told_in_the_compilers_words(fresh):
    with pytest.raises(KernelError, match=r"lars.cu does not compile for sm_90(.|\n)*CHUNK"):
        nvrtc.compiled("lars.cu", "sm_90", ("-DTHREADS=256",))
    assert not fresh.exists()


@needs_nvrtc
def test_compiled_once_and_again_only_for_another_architecture_option_or_torn_file(fresh, monkeypatch):
    made = []
    compile_ = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *a: made.append(a[2:]) or compile_(*a))
    options = LARS

    def compiled(*arguments):
        nvrtc.compiled.cache_clear()  # as another process would come to it
        return nvrtc.compiled(*arguments)

    code = compiled("lars.cu", "sm_90", options)
    assert compiled("lars.cu", "sm_90", options) == code and len(made) == 1
    (kept,) = fresh.iterdir()
    compiled("lars.cu", "sm_80", options)
    compiled("lars.cu", "sm_90", (*options, "-DUNUSED=1"))
    assert len(made) == 3
    assert kept.read_bytes()[:32] == hashlib.sha256(code).digest()
    kept.write_bytes(kept.read_bytes()[:-100])
    assert compiled("lars.cu", "sm_90", options) == code and len(made) == 4
    assert not [path for path in fresh.iterdir() if path.name.startswith(".tmp")]


@needs_nvrtc
def test_a_folder_nobody_can_write_costs_only_time(tmp_path, monkeypatch, fresh):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path / "file"))
    assert nvrtc.compiled("lars.cu", "sm_90", LARS).startswith(b"\x7fELF")


def test_the_folder_is_the_users(monkeypatch):
    monkeypatch.delenv("FASTSUNCET_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(nvrtc.folder()) == "/somewhere/fastsuncet/kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert str(nvrtc.folder()).endswith("/.cache/fastsuncet/kernels")


def test_without_the_bindings_the_reason_names_both_layouts(monkeypatch):
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(compiler.importlib, "import_module", absent)
    for cached in (compiler.bindings, compiler.version):
        cached.cache_clear()
    try:
        reason = compiler.unavailable()
    finally:
        for cached in (compiler.bindings, compiler.version):
            cached.cache_clear()
    assert "pip install cuda-bindings" in reason
    assert "cuda.bindings.nvrtc" in reason and "cuda.nvrtc" in reason


def test_without_the_compilers_library_the_reason_is_the_bindings(monkeypatch):
    def not_found():
        raise RuntimeError("Failure finding libnvrtc.so")

    monkeypatch.setattr(compiler, "bindings", lambda name: SimpleNamespace(nvrtcVersion=not_found))
    compiler.version.cache_clear()
    try:
        assert compiler.unavailable() == "NVRTC: Failure finding libnvrtc.so"
        with pytest.raises(KernelError, match="finding libnvrtc"):
            nvrtc.architecture(9, 0)
    finally:
        compiler.version.cache_clear()


# Launching


def test_arguments_are_packed_as_the_convention_says():
    x = torch.zeros(3)
    array = (ctypes.c_void_p * 2)(5, None)
    arguments = Arguments(x, None, 7, True, 0.5, array)
    addresses = (ctypes.c_void_p * 6).from_address(arguments.address)
    assert ctypes.c_void_p.from_address(addresses[0]).value == x.data_ptr()
    assert ctypes.c_void_p.from_address(addresses[1]).value is None
    assert [ctypes.c_longlong.from_address(addresses[i]).value for i in (2, 3)] == [7, 1]
    assert ctypes.c_float.from_address(addresses[4]).value == 0.5
    assert ctypes.c_void_p.from_address(addresses[5]).value == 5
    with pytest.raises(TypeError, match="not str"):
        Arguments("7")


def test_a_cpu_has_no_kernels():
    with pytest.raises(KernelError, match="not on cpu"):
        launch.load("lars.cu", torch.device("cpu"))
    assert not prove.usable("lars.cu", torch.zeros(1), lambda device: None)


# Whether one may stand in


@pytest.fixture
def card(monkeypatch):
    """A CUDA device that is only talked about."""
    monkeypatch.setattr(prove, "_reasons", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return torch.device("cuda", 0)


def test_a_kernel_that_agrees_is_asked_once(card):
    asked = []
    assert prove.agrees("x.cu", card, asked.append) and prove.agrees("x.cu", card, asked.append)
    assert asked == [card]


def test_a_kernel_that_differs_stays_off_and_one_warning_says_why(card):
    def differs(device):
        prove.require_close("the loss", torch.tensor([1.0, torch.nan]), torch.ones(2), 1e-3)

    with pytest.warns(UserWarning, match="x.cu stays off on cuda:0.*the loss differs from its twin"):
        assert not prove.agrees("x.cu", card, differs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not prove.agrees("x.cu", card, differs)


def test_nothing_is_tried_during_a_capture_or_when_switched_off(card, monkeypatch):
    def untouched(device):
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(UserWarning, match="not tried before"):
        assert not prove.agrees("x.cu", card, untouched)
    monkeypatch.setenv("FASTSUNCET_KERNELS", "off")
    assert not prove.agrees("x.cu", card, untouched)


def test_tensors_without_memory_are_the_twins(card):
    asked = []
    with FakeTensorMode():
        fake = torch.empty(3, device="cuda")
    assert fake.is_cuda and not prove.usable("x.cu", fake, asked.append)
    assert asked == [] and prove.agrees("x.cu", fake.device, asked.append)


def test_a_proof_may_run_backward_wherever_it_is_asked_for(card):
    def runs_backward(device):
        x = torch.ones(2, requires_grad=True)
        (x @ x).backward()
        assert x.grad.dtype == torch.float32

    with torch.inference_mode():
        assert prove.agrees("x.cu", card, runs_backward)
