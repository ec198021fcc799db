"""The color operator makes DALI's pixels to the bit, alone and in a loader, and its check sees what it must see.

Both sides run on the same processor, and DALI's own operators are compiled for one instruction set, so these
comparisons are exact on any CPU.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("nvidia.dali", reason="DALI is not installed")

from pipelines.dali import color
from pipelines.dali.plugin import check_equal
from pipelines.data_errors import DataError
from pipelines.sampling.augmentation import Augmentation
from tests.support.pictures import write_pictures
from tests.support.plugin import needs_plugin
from tests.support.streams import opened, unlabeled

pytestmark = [needs_plugin, pytest.mark.usefixtures("plugin")]

# Times 1 and plus a half it makes 1, but it must be rounded to 0.
BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))
NEUTRAL = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0, "grey": 0}


def inputs(count: int, **factors) -> dict[str, np.ndarray]:
    """Factors of `count` images, neutral but for those given: one for all, or one each."""
    found = {name: np.broadcast_to(factors.get(name, neutral), count) for name, neutral in NEUTRAL.items()}
    return {name: v.astype(np.int32 if name == "grey" else np.float32) for name, v in found.items()}


def require_same_bits(images, given, augmentation=check_equal.EXACT) -> list[np.ndarray]:
    graph, plugin = check_equal.both(images, given, augmentation)
    for ours, theirs in zip(plugin, graph, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == np.uint8
        np.testing.assert_array_equal(ours, theirs)
    return plugin


def cube(step: int, first: int) -> np.ndarray:
    """All colors whose levels are first, first + step, ... and 0 and 255: (n, n * n, 3)."""
    levels = np.unique(np.append(np.arange(first, 256, step), [0, 255])).astype(np.uint8)
    return np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), 3).reshape(len(levels), -1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_plugin_any_image_with_any_factors_has_dalis_bits(seed):
    images, given = check_equal.random_batch(seed)
    made = require_same_bits(images, given)
    assert not all(np.array_equal(one, image) for one, image in zip(made, images))


def test_plugin_every_seventh_level_has_dalis_bits_in_each_factor():
    values = {
        "brightness": (0, BELOW_HALF, 0.2, 1.001, 1.8, 1e6),
        "contrast": (0, 0.2, 0.999, 1.001, 1.8, 1e6),
        "saturation": (0, 0.2, 0.5, 0.999, 1.8, 3),
        "hue": (-0.5, -0.2, 1e-6, 1 / 6, 1 / 3, 0.5),
        "grey": (1,),
    }
    cases = [(name, value) for name, each in values.items() for value in each]
    given = inputs(len(cases))
    for row, (name, value) in enumerate(cases):
        given[name][row] = value
    require_same_bits([cube(7, row % 7) for row in range(len(cases))], given)


def test_plugin_every_size_of_image_has_dalis_bits():
    """The plug-in works in pieces of 256 pixels and vectors of 4 or 8: sizes around their multiples, in one batch."""
    shapes = [(1, 1), (1, 2), (255, 1), (1, 256), (1, 257), (16, 16), (13, 79), (511, 3), (224, 224)]
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*shape, 3), np.uint8) for shape in shapes * 2]
    gray = np.arange(len(images)) >= len(shapes)
    require_same_bits(
        images, inputs(len(images), brightness=1.3, contrast=0.6, saturation=1.4, hue=-0.15, grey=gray)
    )


def test_plugin_neutral_factors_change_no_pixel():
    images = [cube(15, 0), cube(17, 3)]
    for ours, image in zip(require_same_bits(images, inputs(2)), images):
        np.testing.assert_array_equal(ours, image)


def test_plugin_leaves_out_a_factor_that_the_augmentation_never_draws():
    images, given = check_equal.random_batch(7, count=6)
    for name in check_equal.FACTORS:
        require_same_bits(images, given, replace(Augmentation(), **{name: 0}))
    given["grey"] = np.zeros(6, np.int32)
    require_same_bits(images, given, replace(Augmentation(), grey=0))


# -- the check


def test_require_equal_sees_one_wrong_level(plugin, monkeypatch):
    def off_by_one(images, given, device):  # in each of the two batches
        graph, ours = real(images, given, device=device)
        ours[3] = ours[3].copy()
        ours[3][0, 0, 0] ^= 1
        return graph, ours

    real = check_equal.both
    check_equal.require_equal(plugin)
    monkeypatch.setattr(check_equal, "both", off_by_one)
    with pytest.raises(
        DataError, match=r"differs from DALI's own in 2 of .* on this machine: it is not kept"
    ):
        check_equal.require_equal(plugin)


def test_rounding_batch_shows_another_way_to_sum_divide_and_round():
    def halves(grays):  # as DALI sums them
        if len(grays) <= 65_536:
            return np.float32(grays.sum())
        middle = len(grays) // 2
        return halves(grays[:middle]) + halves(grays[middle:])

    images, given = check_equal.rounding_batch()
    grays = [(image.reshape(-1, 3) @ np.array([9798, 19235, 3735]) + 16384) >> 15 for image in images[:-1]]
    sums, counts = [halves(each) for each in grays], [np.float32(len(each)) for each in grays]
    assert any(total != np.float32(each.sum()) for total, each in zip(sums, grays))
    assert any(total * np.float32(1 / n) != total / n for total, n in zip(sums, counts))
    assert (images[-1] == 1).any()
    assert given["brightness"][-1] < 0.5 and given["brightness"][-1] + np.float32(0.5) == 1


# -- in a loader


@pytest.mark.slow
@pytest.mark.filterwarnings("error:The external source node")
@pytest.mark.parametrize(
    ("extra", "used"), [({}, True), ({"grey": 0}, True), ({"jitter": 0}, False), ({"color": "fast"}, False)]
)
def test_loader_gives_the_same_bits_with_and_without_the_plugin(tmp_path, monkeypatch, extra, used):
    index = write_pictures(tmp_path, count=6, side=70)
    plan = unlabeled(index, augmentations=(replace(Augmentation(size=48, blur=0), **extra),))
    real, calls, views = color.plugin_jitter, [], {}
    monkeypatch.setattr(color, "plugin_jitter", lambda *a: calls.append(a) or real(*a))
    for operator in ("graph", "plugin", "auto"):
        loader = opened(plan, "dali", color_operator=operator)
        (views[operator],) = loader(0)
        assert loader.uses_plugin == (used and operator != "graph")
    assert len(calls) == 2 * used
    assert torch.equal(views["graph"], views["plugin"]) and torch.equal(views["graph"], views["auto"])
