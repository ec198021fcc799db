"""The GPU's view operator as far as it can be tried without a GPU: its kernels on a CPU, its operator in DALI."""

import ctypes
import hashlib

import numpy as np
import pytest
import torch

from pipelines import cuda_compiler
from pipelines.dali.view_operator import build
from pipelines.data_errors import DataError
from pipelines.sampling.augmentation import Augmentation
from tests.support import host_kernels

NO_NVRTC = cuda_compiler.unavailable()
needs_nvrtc = pytest.mark.skipif(NO_NVRTC is not None, reason=f"no NVRTC: {NO_NVRTC}")

# Below and above a square of the kernels (32), and above two; the radii fit them.
SHAPES = [(1, 1), (3, 5), (32, 32), (33, 31), (70, 40), (5, 66), (41, 65)]
ORDERS = (0xE4, 0x1B, 0x2D, 0x93)  # the fixed order, its reverse, and two more


class View(ctypes.Structure):
    """view::View, from pipelines/dali/view_operator/pixel.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("read", "written", "weights")],
        *[(name, ctypes.c_int) for name in ("height", "width", "radius", "flip")],
        *[(name, ctypes.c_float) for name in ("brightness", "contrast", "saturation", "hue")],
        *[(name, ctypes.c_int) for name in ("gray", "order")],
        ("matrix", ctypes.c_float * 9),
    ]


@pytest.fixture(scope="module", params=["", "-DWIDEST="], ids=["widest vectors", "SSE"])
def library(request) -> ctypes.CDLL:
    """The loops in the widest vectors of this processor, and in those of every processor: the kernels are the same."""
    texts = "\0".join(path.read_text() for path in (*build.sources(), build.SOURCES / "view.cu"))
    changed = f"-DSOURCES={hashlib.sha256(texts.encode()).hexdigest()[:16]}"
    # The flags of the library: a contracted product would give the loops and the kernels other bits.
    flags = ("-O2", "-shared", "-fPIC", "-ffp-contract=off", f"-I{build.SOURCES}", changed)
    flags += (request.param,) if request.param else ()
    return ctypes.CDLL(str(host_kernels.built("view.cpp", *flags)))


def batch(seed: int) -> tuple[list[np.ndarray], list[np.ndarray], list[dict]]:
    """Images, weights of their blurs, and the other numbers of their views, some of them neutral."""
    rng = np.random.default_rng(seed)
    images = [rng.integers(0, 256, (*shape, 3), np.uint8) for shape in SHAPES]
    radii = [int(rng.integers(min(shape))) * (i % 3 > 0) for i, shape in enumerate(SHAPES)]
    weights = [rng.dirichlet(np.ones(2 * radius + 1)).astype(np.float32) for radius in radii]
    draws = [
        {
            **{name: rng.choice([1, rng.uniform(0, 2)]) for name in ("brightness", "contrast", "saturation")},
            "hue": rng.choice([0, rng.uniform(-0.5, 0.5)]),
            "gray": int(rng.integers(2)),
            "flip": int(rng.integers(2)),
            "order": int(rng.choice(ORDERS)),
            "radius": radius,
            "matrix": (ctypes.c_float * 9)(*(np.eye(3) + rng.normal(0, 0.3, (3, 3))).ravel()),
        }
        for radius in radii
    ]
    return images, weights, draws


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "threads"), [(1, 8), (3, 8), (2, 16)])
def test_kernels_make_the_values_of_the_cpus_loops(library, blocks, threads):
    assert library.size_of_view() == ctypes.sizeof(View) and library.widest_blur() == build.WIDEST_BLUR
    images, weights, draws = batch(blocks)
    table = np.random.default_rng(0).permutation(256 * 3).astype(np.float32)
    levels, made = table.ctypes.data_as(ctypes.c_void_p), {}
    for of_kernels in (False, True):
        made[of_kernels] = [np.full(image.shape, 999, np.float32) for image in images]
        views = (View * len(images))(
            *(
                View(image.ctypes.data, out.ctypes.data, each.ctypes.data, *image.shape[:2], **draw)
                for image, out, each, draw in zip(images, made[of_kernels], weights, draws)
            )
        )
        if of_kernels:
            sums = (ctypes.c_ulonglong * len(views))()
            library.by_kernels(views, sums, len(views), levels, blocks, threads)
            assert 0 < sum(draw["contrast"] != 1 for draw in draws) == np.count_nonzero(sums)
        else:
            library.by_loops(views, len(views), levels)
    for ours, theirs in zip(made[True], made[False]):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@needs_nvrtc
def test_kernels_are_machine_code_and_contract_no_product(monkeypatch):
    """A driver older than NVRTC refuses its PTX (cudaErrorUnsupportedPtxVersion), but not machine code."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device_id: (9, 0))
    code = build.kernels(23, 0)
    assert code.startswith(b"\x7fELF") and all(name in code for name in (b"gray_sums", b"make_views"))
    # The oldest card's portable code can be read.
    code = cuda_compiler.compiled(build.SOURCES / "view.cu", "compute_75", build.NVRTC_OPTIONS).decode()
    assert "fma." not in code and "div.rn.f32" in code
    assert not [kind for kind in ("div.approx", "div.full", "rcp.approx") if kind in code]


def test_kernels_of_a_blur_that_is_too_wide_name_the_setting():
    said = r"up to 65 pixels wide.*asks for 67. Set data.view_operator to auto or false"
    with pytest.raises(DataError, match=said):
        build.kernels(67, 0)


@pytest.mark.gpu
def test_view_operator_on_a_gpu_makes_dalis_cpu_values_to_the_bit(view_operator):
    from pipelines.dali.view_operator.check_equal import both, random_batch, require_equal

    require_equal("gpu")
    for seed in range(1, 4):
        graph, ours = both(*random_batch(seed, count=64), device="gpu")
        assert all(np.array_equal(one, other) for one, other in zip(graph, ours))


@pytest.mark.gpu
def test_view_operator_on_a_gpu_sums_more_pixels_than_a_float_counts(view_operator):
    """Above 65,536 pixels the CPU's sum of the gray levels is rounded on the way: one level, where a mean is close."""
    from pipelines.dali.view_operator.check_equal import both, random_batch

    rng = np.random.default_rng(0)
    _, inputs = random_batch(0, count=4)
    plain = Augmentation()  # without normalization: values are levels / 255
    graph, ours = both(list(rng.integers(0, 256, (4, 512, 640, 3), np.uint8)), inputs, plain, device="gpu")
    assert all(abs(one - other).max() < 1.01 / 255 for one, other in zip(graph, ours))
