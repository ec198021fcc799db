"""The GPU's color operator as far as it can be tried without a GPU: its kernels on a CPU, its library in DALI."""

import ctypes
import hashlib

import numpy as np
import pytest
import torch

from pipelines import cuda_compiler
from pipelines.dali.plugin import build, use
from pipelines.dali.plugin.__main__ import main
from pipelines.data_errors import DataError
from pipelines.sampling.augmentation import Augmentation
from tests.support import host_kernels

MISSING, NO_NVRTC = build.unavailable("gpu"), cuda_compiler.unavailable()
needs_nvrtc = pytest.mark.skipif(NO_NVRTC is not None, reason=f"no NVRTC: {NO_NVRTC}")
needs_plugin = pytest.mark.skipif(MISSING is not None, reason=f"the plug-in cannot be built: {MISSING}")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the last test runs on it")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SHAPES = [(1, 1), (3, 5), (16, 16), (16, 17), (40, 31), (1, 7), (25, 41)]


class Job(ctypes.Structure):
    """color_jitter::Job, from pipelines/dali/plugin/pixel.h."""

    _fields_ = [
        ("read", ctypes.c_void_p),
        ("written", ctypes.c_void_p),
        ("pixels", ctypes.c_longlong),
        *[(name, ctypes.c_float) for name in ("brightness", "contrast", "saturation", "hue")],
        ("gray", ctypes.c_int),
        ("matrix", ctypes.c_float * 9),
    ]


def batch(seed: int) -> tuple[list[np.ndarray], list[dict]]:
    """Images, and factors of each, some of them neutral."""
    rng = np.random.default_rng(seed)
    images = [rng.integers(0, 256, (*shape, 3), np.uint8) for shape in SHAPES]
    draws = [
        {
            **{name: rng.choice([1, rng.uniform(0, 2)]) for name in ("brightness", "contrast", "saturation")},
            "hue": rng.choice([0, rng.uniform(-0.5, 0.5)]),
            "gray": int(rng.integers(2)),
            "matrix": (ctypes.c_float * 9)(*(np.eye(3) + rng.normal(0, 0.3, (3, 3))).ravel()),
        }
        for _ in images
    ]
    return images, draws


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "threads"), [(1, 8), (3, 8), (2, 16)])
def test_kernels_make_the_pixels_of_the_cpus_loops(blocks, threads):
    texts = "\0".join(path.read_text() for path in build.sources())
    flags = ("-O1", "-shared", "-fPIC", "-ffp-contract=off", f"-I{build.SOURCES}")
    changed = f"-DSOURCES={hashlib.sha256(texts.encode()).hexdigest()[:16]}"
    library = ctypes.CDLL(str(host_kernels.built("color_jitter.cpp", *flags, changed)))
    images, draws = batch(blocks)
    written = {}
    for of_kernels in (False, True):
        written[of_kernels] = [np.full_like(image, 99) for image in images]
        jobs = (Job * len(images))(
            *(
                Job(read=image.ctypes.data, written=out.ctypes.data, pixels=image.size // 3, **draw)
                for image, out, draw in zip(images, written[of_kernels], draws)
            )
        )
        if of_kernels:
            sums = (ctypes.c_ulonglong * len(jobs))()
            library.by_kernels(jobs, sums, len(jobs), blocks, threads)
            assert 0 < sum(draw["contrast"] != 1 for draw in draws) == np.count_nonzero(sums)
        else:
            library.by_loops(jobs, len(jobs))
    for ours, theirs in zip(written[True], written[False]):
        np.testing.assert_array_equal(ours, theirs)
    assert any(not np.array_equal(ours, image) for ours, image in zip(written[True], images))


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100"])
def test_kernels_compile_for_every_card_that_torch_supports(arch):
    code = build.ptx(arch)
    assert code.startswith(b"\x7fELF") and b"gray_sums" in code and b"jitter_pixels" in code


@needs_nvrtc
def test_ptx_contracts_no_product_divides_exactly_and_fits_its_literal():
    text = build.ptx().rstrip(b"\0").decode()
    assert "fma." not in text and "div.rn.f32" in text
    assert not [kind for kind in ("div.approx", "div.full", "rcp.approx") if kind in text]
    pieces = [
        piece.removeprefix('R"ptx(').removesuffix(')ptx"') for piece in build.ptx_literal().split('\nR"ptx(')
    ]
    assert "".join(pieces) == text and len(pieces) > 1


@needs_nvrtc
def test_ptx_shows_a_mistake_in_the_kernels(monkeypatch, tmp_path):
    for path in build.sources():
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "color_jitter.cu").write_text('#include "pixel.h"\nint missing = nothing;\n')
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(DataError, match=r"does not compile for compute_75:(.|\n)*nothing"):
        build.ptx()


@needs_plugin
@no_gpu
def test_dali_accepts_the_library_and_its_operator_up_to_the_driver(monkeypatch):
    from pipelines.dali import graphs

    # Kept, without proof, where no run looks, and compiled in the quickest way.
    monkeypatch.setenv("FASTSUNCET_CACHE", str(host_kernels.CACHE))
    monkeypatch.setattr(build, "FLAGS", [flag.replace("-O3", "-O0") for flag in build.FLAGS])
    build.build(lambda path: use.load(path, "gpu"), "gpu")
    assert use.choose("plugin", "gpu")
    operators, calls = graphs.fn.fastsuncet, []
    real = operators.color_jitter_gpu
    monkeypatch.setattr(
        operators, "color_jitter_gpu", lambda image, **k: calls.append((image.device, k)) or real(image, **k)
    )
    options = {"decode": "mixed", "stored": "files", "plugin": True, "dtype": "float16"}
    build_options = {"batch_size": 2, "num_threads": 1, "device_id": None}
    pipeline = graphs.views(lambda _: None, lambda _: None, (Augmentation(),), **options, **build_options)
    with pytest.raises(RuntimeError, match="CUDA-capable GPU"):
        pipeline.build()
    ((image, given),) = calls
    assert image == "gpu" and given.keys() == {"brightness", "contrast", "saturation", "hue", "gray"}


@needs_plugin
@no_gpu
def test_command_builds_nothing_where_no_gpu_can_prove_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    assert main(["--gpu"]) == 1
    assert "no NVIDIA GPU with a working driver is visible" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@gpu
@needs_plugin
def test_plugin_on_a_gpu_makes_dalis_cpu_pixels_to_the_bit():
    from pipelines.dali.plugin.check_equal import both, random_batch, require_equal

    use.load(build.build(lambda path: require_equal(path, "gpu"), "gpu"), "gpu")
    for seed in range(1, 4):
        images, given = random_batch(seed, count=64)
        graph, ours = both(images, given, device="gpu")
        assert all(np.array_equal(one, other) for one, other in zip(graph, ours))
