"""The GPU's colour operator, as far as it can be tried without a GPU: its kernels on a CPU, its library in DALI."""

import ctypes
import hashlib

import numpy as np
import pytest
import torch

from pipelines.dali.plugin import build, ptx, use
from pipelines.dali.plugin.__main__ import main
from pipelines.data_errors import DataError
from pipelines.sampling.augmentation import Augmentation
from tests.support import host_kernels

NEEDS = build.unavailable("gpu")
needs_nvrtc = pytest.mark.skipif(ptx.unavailable() is not None, reason=f"{ptx.unavailable()}")
needs_plugin = pytest.mark.skipif(NEEDS is not None, reason=f"nothing to build the plug-in with: {NEEDS}")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it is proved on it below")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class Job(ctypes.Structure):
    """color_jitter::Job, from pipelines/dali/plugin/job.h."""

    _fields_ = [
        ("read", ctypes.c_void_p),
        ("written", ctypes.c_void_p),
        ("pixels", ctypes.c_longlong),
        *[(name, ctypes.c_float) for name in ("brightness", "contrast", "saturation", "hue")],
        ("grey", ctypes.c_int),
        ("matrix", ctypes.c_float * 9),
    ]


@pytest.fixture(scope="module")
def library():
    texts = "\0".join(path.read_text() for path in build.sources())
    flags = ("-O1", "-shared", "-fPIC", "-ffp-contract=off", f"-I{build.SOURCES}")
    changed = f"-DSOURCES={hashlib.sha256(texts.encode()).hexdigest()[:16]}"
    return ctypes.CDLL(str(host_kernels.built("color_jitter.cpp", *flags, changed)))


def batch(seed: int, shapes) -> tuple[list[np.ndarray], list[dict]]:
    rng = np.random.default_rng(seed)
    images = [rng.integers(0, 256, (*shape, 3), np.uint8) for shape in shapes]
    draws = [
        {
            "brightness": rng.choice([1, rng.uniform(0, 2)]),
            "contrast": rng.choice([1, rng.uniform(0, 2)]),
            "saturation": rng.choice([1, rng.uniform(0, 2)]),
            "hue": rng.choice([0, rng.uniform(-0.5, 0.5)]),
            "grey": int(rng.integers(2)),
            "matrix": (ctypes.c_float * 9)(*(np.eye(3) + rng.normal(0, 0.3, (3, 3))).ravel()),
        }
        for _ in images
    ]
    return images, draws


def jobs_of(images, draws):
    """The jobs of a batch, and where they write."""
    written = [np.full_like(image, 99) for image in images]
    jobs = [
        Job(read=i.ctypes.data, written=o.ctypes.data, pixels=i.size // 3, **draw)
        for i, o, draw in zip(images, written, draws)
    ]
    return (Job * len(jobs))(*jobs), written


@pytest.mark.parametrize(("blocks", "threads"), [(1, 8), (3, 8), (2, 16)])
def test_the_kernels_make_the_pixels_of_the_cpus_loops(library, blocks, threads):
    shapes = [(1, 1), (3, 5), (16, 16), (16, 17), (40, 31), (1, 7), (25, 41)]
    images, draws = batch(blocks, shapes)
    for of_kernels in (False, True):
        jobs, written = jobs_of(images, draws)
        if of_kernels:
            sums = (ctypes.c_ulonglong * len(jobs))()
            library.by_kernels(jobs, sums, len(jobs), blocks, threads)
            greys = sum(draw["contrast"] != 1 for draw in draws)
            assert 0 < greys == np.count_nonzero(sums)
        else:
            library.by_loops(jobs, len(jobs))
            expected = written
    for ours, theirs in zip(written, expected):
        np.testing.assert_array_equal(ours, theirs)
    assert any(not np.array_equal(ours, image) for ours, image in zip(written, images))


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100"])
def test_the_kernels_compile_for_every_card_that_torch_knows(arch):
    code = ptx.compiled(arch)
    assert code.startswith(b"\x7fELF") and b"grey_sums" in code and b"jitter_pixels" in code


@needs_nvrtc
def test_no_product_is_contracted_and_no_division_approximate():
    text = ptx.compiled().decode()
    assert "fma." not in text and "div.rn.f32" in text
    assert not [kind for kind in ("div.approx", "div.full", "rcp.approx") if kind in text]


@needs_nvrtc
def test_the_literal_holds_the_code():
    pieces = [piece.removeprefix('R"ptx(').removesuffix(')ptx"') for piece in ptx.literal().split('\nR"ptx(')]
    assert "".join(pieces) == ptx.compiled().rstrip(b"\0").decode() and len(pieces) > 1


@needs_nvrtc
def test_a_mistake_in_the_kernels_is_shown(monkeypatch, tmp_path):
    for path in build.sources():
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "color_jitter.cu").write_text('#include "job.h"\nint missing = nothing;\n')
    monkeypatch.setattr(ptx, "SOURCES", tmp_path)
    with pytest.raises(DataError, match=r"does not compile for compute_75:(.|\n)*nothing"):
        ptx.compiled()


@needs_plugin
@no_gpu
def test_dali_takes_the_library_and_its_operator_up_to_the_driver(monkeypatch):
    from pipelines.dali import graphs

    # Kept, and unproved, in a folder that no run looks into, and by the compiler's quickest way.
    monkeypatch.setenv("FASTSUNCET_CACHE", str(host_kernels.CACHE))
    monkeypatch.setattr(build, "FLAGS", [flag.replace("-O3", "-O0") for flag in build.FLAGS])
    build.build(lambda path: use.load(path, "gpu"), "gpu")
    assert use.choose("plugin", "gpu")
    operators, calls = graphs.fn.fastsuncet, []
    real = operators.color_jitter_gpu
    monkeypatch.setattr(
        operators,
        "color_jitter_gpu",
        lambda image, **k: (calls.append((image.device, k)), real(image, **k))[1],
    )
    pipeline = graphs.views(
        lambda _: None,
        lambda _: None,
        (Augmentation(),),
        decode="mixed",
        resident=False,
        plugin=True,
        dtype="float16",
        batch_size=2,
        num_threads=1,
        device_id=None,
    )
    with pytest.raises(RuntimeError, match="CUDA-capable GPU"):
        pipeline.build()
    ((image, given),) = calls
    assert image == "gpu" and given.keys() == {"brightness", "contrast", "saturation", "hue", "grey"}


def test_auto_on_a_gpu_is_dalis_own_until_ours_has_been_timed():
    assert not use.choose("auto", "gpu") and not use.choose("graph", "gpu")


@needs_plugin
def test_asking_for_it_without_having_built_it_is_an_error_that_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    with pytest.raises(
        DataError, match=r"this machine's GPU: build it with: python -m pipelines\.dali\.plugin --gpu"
    ):
        use.choose("plugin", "gpu")


@needs_plugin
@no_gpu
def test_it_is_not_built_where_no_gpu_can_prove_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    assert main(["--gpu"]) == 1
    assert "no NVIDIA GPU with a working driver is visible" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@gpu
@needs_plugin
def test_on_a_gpu_it_makes_dalis_cpu_pixels_to_the_bit():
    from functools import partial

    from pipelines.dali.plugin.check_equal import both, examples, prove

    use.load(build.build(partial(prove, device="gpu"), "gpu"), "gpu")
    for seed in range(1, 4):
        images, given = examples(seed, count=64)
        graph, ours = both(images, given, device="gpu")
        assert all(np.array_equal(one, other) for one, other in zip(graph, ours))
