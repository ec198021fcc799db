"""Our own colour operator makes DALI's pixels to the bit, is built by hand and once, and is missed by nobody."""

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.backend import dali_problem
from pipelines.dali.plugin import build, use
from pipelines.dali.plugin.__main__ import main
from pipelines.data_errors import DataError
from pipelines.loader import open_loader
from pipelines.sampling.augmentation import Augmentation, draw_view
from tests.pipelines.dali.test_closeness import GivenViews
from tests.support.pictures import write_pictures

NEEDS = build.unavailable()
needs_plugin = pytest.mark.skipif(NEEDS is not None, reason=f"nothing to build the plug-in with: {NEEDS}")
needs_dali = pytest.mark.skipif(dali_problem() is not None, reason="DALI is not installed")
BELOW_HALF = np.nextafter(
    np.float32(0.5), np.float32(0)
)  # times 1: a half added to it makes 1, rounding makes 0
NEUTRAL = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0, "grey": False}


@pytest.fixture(scope="module")
def plugin() -> Path:
    """The plug-in of these sources, in DALI. Built here where nobody has: that takes a compiler some ten seconds."""
    from pipelines.dali.plugin.check_equal import prove

    path = build.build(prove)
    use.load(path)
    return path


def numbers(count: int, **factors) -> dict[str, np.ndarray]:
    """Factors of `count` images, neutral but for those given: one for all, or one each."""
    found = {name: np.full(count, value) for name, value in NEUTRAL.items()}
    found |= {name: np.broadcast_to(value, count) for name, value in factors.items()}
    found = {name: v.astype(bool if name == "grey" else np.float32) for name, v in found.items()}
    return {**found, "rotated": found["hue"] != 0}


def assert_equal(images, **factors):
    from pipelines.dali.plugin.check_equal import both

    graph, plugin = both(images, numbers(len(images), **factors))
    for ours, theirs in zip(plugin, graph):
        assert ours.shape == theirs.shape and ours.dtype == np.uint8
        np.testing.assert_array_equal(ours, theirs)
    return plugin


def cube(step: int, first: int = 0) -> np.ndarray:
    """All colours whose levels are first, first + step, ... and 255: (n, n * n, 3)."""
    levels = np.unique(np.append(np.arange(first, 256, step), [0, 255])).astype(np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), 3)
    return grid.reshape(len(levels), -1, 3)


# -- the bits


@needs_plugin
@pytest.mark.parametrize("seed", range(4))
def test_any_image_with_any_factors_is_dalis_to_the_bit(plugin, seed):
    from pipelines.dali.plugin.check_equal import both, examples

    images, given = examples(seed + 1)
    graph, ours = both(images, given)
    assert all(np.array_equal(one, other) for one, other in zip(graph, ours))
    assert not all(np.array_equal(one, image) for one, image in zip(graph, images))


@needs_plugin
@pytest.mark.parametrize(
    ("factor", "values"),
    [
        ("brightness", (0, BELOW_HALF, 0.2, 1.001, 1.8, 1e6)),
        ("contrast", (0, 0.2, 0.999, 1.001, 1.8, 1e6)),
        ("saturation", (0, 0.2, 0.5, 0.999, 1.8, 3)),
        ("hue", (-0.5, -0.2, 1e-6, 1 / 6, 1 / 3, 0.5)),
        ("grey", (True,) * 6),
    ],
)
def test_every_fifth_level_of_each_channel_comes_out_of_each_factor_as_dalis(plugin, factor, values):
    assert_equal([cube(5, first) for first in range(len(values))], **{factor: values})


@needs_plugin
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 2), (255, 1), (1, 256), (1, 257), (16, 16), (13, 79), (511, 3), (224, 224)]
)
def test_no_size_of_image_is_a_special_one(plugin, shape):
    # A piece is 256 pixels, and its vectors are 4 or 8 wide: sizes about their multiples.
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    assert_equal([image], brightness=1.3, contrast=0.6, saturation=1.4, hue=-0.15)
    assert_equal([image], grey=True)


@needs_plugin
def test_images_of_many_sizes_share_a_batch(plugin):
    rng = np.random.default_rng(1)
    images = [rng.integers(0, 256, (*rng.integers(1, 60, 2), 3), np.uint8) for _ in range(40)]
    drawn = {"brightness": rng.uniform(0.2, 1.8, 40), "contrast": rng.uniform(0.2, 1.8, 40)}
    assert_equal(images, hue=rng.uniform(-0.2, 0.2, 40), grey=rng.random(40) < 0.5, **drawn)


@needs_plugin
def test_the_mean_of_an_image_too_large_for_a_float_is_summed_up_as_dali_does(plugin):
    # From 65,793 white pixels on the sum of the greys is above 2^24, and the order of its parts is seen: in the last
    # bit of the mean, which a contrast of 30,000 about a mean near the level of all pixels makes half a level.
    rng = np.random.default_rng(2)
    images = [rng.integers(199, 202, (*rng.integers(400, 700, 2), 3), np.uint8) for _ in range(12)]
    for ours, image in zip(assert_equal(images, contrast=30_000), images):
        assert 0 < ours[image.min(2) == image.max(2)].mean() < 255


@needs_plugin
def test_neutral_numbers_leave_every_pixel_as_it_is(plugin):
    images = [cube(15), cube(17, 3)]
    for ours, image in zip(assert_equal(images), images):
        np.testing.assert_array_equal(ours, image)


@needs_plugin
@pytest.mark.parametrize("without", ["brightness", "contrast", "saturation", "hue", "grey"])
def test_a_factor_that_the_augmentation_never_draws_is_left_out(plugin, without):
    from pipelines.dali.plugin.check_equal import both, examples

    images, given = examples(7, count=6)
    if without == "grey":
        given["grey"] = np.zeros(6, bool)
    graph, ours = both(images, given, replace(Augmentation(), **{without: 0}))
    assert all(np.array_equal(one, other) for one, other in zip(graph, ours))


@needs_plugin
def test_the_proof_sees_one_wrong_level(plugin, monkeypatch):
    from pipelines.dali.plugin import check_equal as prove

    def off_by_one(images, given, device):  # in each of the proof's two batches
        graph, ours = map(list, prove_both(images, given, device=device))
        ours[3] = ours[3].copy()
        ours[3][0, 0, 0] ^= 1
        return graph, ours

    prove_both = prove.both
    monkeypatch.setattr(prove, "both", off_by_one)
    with pytest.raises(
        DataError, match=r"differs from DALI's own in 2 of .* values on this machine: it is not kept"
    ):
        prove.prove(plugin)


# -- in the loader


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"), count=12, side=90)


def given(index, augmentation):
    view = draw_view(augmentation, index.sizes, seed=3, step=0, role="", first_row=0)
    return GivenViews(index, [augmentation], [view])


@needs_plugin
@pytest.mark.parametrize(
    "extra", [{}, {"grey": 0}, {"jitter": 0}, {"color": "fast"}, {"hue": 0, "contrast": 0}]
)
def test_views_are_the_same_bits_with_and_without_it(plugin, index, extra):
    plan = given(index, replace(Augmentation(size=64, blur_sigma=(0.1, 1.0)), **extra))
    views = {}
    for operator in ("graph", "plugin", "auto"):
        loader = open_loader(
            index, plan, plan.augmentations, threads=1, backend="dali", color_operator=operator
        )
        (views[operator],) = loader(0)
        assert loader.own_color == (operator != "graph" and extra not in ({"jitter": 0}, {"color": "fast"}))
    assert torch.equal(views["graph"], views["plugin"]) and torch.equal(views["graph"], views["auto"])


@needs_plugin
@pytest.mark.filterwarnings("error:The external source node")
def test_it_takes_the_place_of_dalis_operators_in_the_graph(plugin, index, monkeypatch):
    from pipelines.dali import color

    used = []
    for name in ("jitter", "one_operator"):
        real = getattr(color, name)
        monkeypatch.setattr(color, name, lambda *a, name=name, real=real: (used.append(name), real(*a))[1])
    plan = given(index, Augmentation(size=32, blur=0))
    for operator in ("graph", "plugin", "auto"):
        open_loader(index, plan, plan.augmentations, threads=1, backend="dali", color_operator=operator)(0)
    assert used == ["jitter", "one_operator", "one_operator"]


@needs_dali
def test_auto_without_a_built_one_is_dalis_own_and_builds_nothing(index, monkeypatch, tmp_path):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    assert not use.choose("auto", "cpu")
    assert list(tmp_path.iterdir()) == []


@needs_plugin
def test_plugin_without_a_built_one_is_an_error_that_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path))
    with pytest.raises(
        DataError, match=r"there is none for this machine's CPU: build it with: python -m pipelines\.dali\.plugin\."
    ):
        use.choose("plugin", "cpu")


@needs_dali
def test_plugin_without_a_compiler_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        DataError, match=r"cannot be built here: no C\+\+ compiler: \$CXX \(no-such-compiler\)"
    ):
        use.choose("plugin", "cpu")
    assert not use.choose("auto", "cpu")


@needs_dali
def test_a_dali_without_its_headers_is_said_and_does_without(monkeypatch):
    real = build.header_folder
    monkeypatch.setattr(build, "header_folder", lambda name: None if name.startswith("dali") else real(name))
    if NEEDS is None:
        assert build.unavailable().startswith("no dali/core/geom/mat.h")
    assert not use.choose("auto", "cpu")


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="one of auto, graph, plugin, not 'fused'"):
        use.choose("fused", "cpu")


@needs_dali
def test_one_that_cannot_be_loaded_is_said_and_replaced_unless_it_was_asked_for(
    monkeypatch, tmp_path, capsys
):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(use, "kept", lambda device: broken)
    monkeypatch.setattr(use, "_loaded", {})
    assert not use.choose("auto", "cpu")
    assert "the color operator cannot be loaded (" in capsys.readouterr().out
    with pytest.raises(DataError, match="cannot be loaded"):
        use.choose("plugin", "cpu")


# -- how it is built and kept


def tiny_compiler(folder: Path, body: str = 'echo code > "$out"') -> Path:
    """A compiler that tells its version and writes what it is told to, where it is told to."""
    path = folder / "cc"
    script = f'#!/bin/sh\n[ "$1" = --version ] && echo tiny 1.0 && exit\nfor out; do :; done\n{body}\n'
    path.write_text(script)
    path.chmod(0o755)
    return path


@pytest.fixture
def tiny(monkeypatch, tmp_path) -> Path:
    """A cache of its own, and that compiler."""
    if NEEDS is not None and "compiler" not in NEEDS:
        pytest.skip(f"nothing to build the plug-in with: {NEEDS}")
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(tiny_compiler(tmp_path)))
    return tmp_path / "cache" / "plugin"


def test_what_was_built_is_kept_in_a_private_folder_and_built_no_more(tiny):
    proved = []
    assert build.kept() is None
    path = build.build(proved.append)
    assert build.kept() == path == build.build(proved.append) and len(proved) == 1
    assert list(tiny.iterdir()) == [path] and tiny.stat().st_mode & 0o777 == 0o700


def test_what_fails_its_proof_is_not_kept(tiny):
    def refuse(path):
        assert path.exists()
        raise DataError("another pixel")

    with pytest.raises(DataError, match="another pixel"):
        build.build(refuse)
    assert build.kept() is None and list(tiny.iterdir()) == []


def test_half_a_library_does_not_count(tiny):
    path = build.build(lambda _: None)
    path.write_bytes(path.read_bytes()[:-1])
    assert build.kept() is None
    assert build.build(lambda _: None) == path == build.kept()


def test_a_compilers_complaint_is_shown(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tiny_compiler(tmp_path, "echo it is a nuisance >&2; exit 1")))
    with pytest.raises(DataError, match=r"does not compile with tiny 1\.0:\nit is a nuisance"):
        build.build(lambda _: None)
    assert list(tiny.iterdir()) == []


@pytest.mark.parametrize("what", ["sources", "flags", "compiler", "DALI", "processor"])
def test_everything_that_decides_the_library_decides_where_it_is_kept(tiny, monkeypatch, tmp_path, what):
    before = build.place()
    if what == "sources":
        for path in build.sources():
            (tmp_path / path.name).write_text(path.read_text() + "\n")
        monkeypatch.setattr(build, "SOURCES", tmp_path)
    elif what == "flags":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    elif what == "compiler":
        monkeypatch.setattr(build, "compiler_version", lambda: "tiny 1.1")
    elif what == "DALI":
        monkeypatch.setattr("nvidia.dali.__version__", "2.99.0")
    else:
        monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert build.place() != before and build.place().parent == before.parent


def test_the_command_says_what_is_missing_and_what_is_lost(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main([]) == 1
    told = capsys.readouterr().err
    assert "cannot be built here" in told and "DALI's own operators do it" in told


@needs_plugin
def test_the_command_builds_once(plugin, capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == f"the color operator is there already: {plugin}\n"


def test_importing_the_loader_and_the_choice_imports_no_dali():
    for module in ("__init__", "build", "use", "__main__"):
        tree = ast.parse((build.SOURCES / f"{module}.py").read_text())
        names = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert not [name for name in names if "dali" in ast.unparse(name).replace("dali_problem", "")], module
