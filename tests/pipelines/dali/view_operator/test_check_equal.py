"""The view operator makes DALI's values to the bit, alone and in a loader, and its check sees what it must see.

Both sides run on the same processor, and DALI's own operators are compiled for one instruction set, so these
comparisons are exact on any CPU.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

pytest.importorskip("nvidia.dali", reason="DALI is not installed")

from pipelines.dali.view_operator import check_equal
from pipelines.data_errors import DataError

pytestmark = pytest.mark.usefixtures("view_operator")

# Times 1 and plus a half it makes 1, but it must be rounded to 0.
BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))
NEUTRAL = dict(zip(check_equal.INPUTS, (1, 1, 1, 0, 0xE4, 0, 0, 0), strict=True))
PLAIN = replace(check_equal.EXACT, mean=(0, 0, 0), std=(1 / 255,) * 3)  # values are levels


def inputs(count: int, **factors) -> dict[str, np.ndarray]:
    """Numbers of `count` views, neutral but for those given: one for all, or one each."""
    given = {name: np.broadcast_to(value, count) for name, value in (NEUTRAL | factors).items()}
    kinds = {"order": np.int32, "gray": np.int32, "flip": np.int32}
    return {name: values.astype(kinds.get(name, np.float32)) for name, values in given.items()}


def cube(step: int, first: int) -> np.ndarray:
    """All colors whose levels are first, first + step, ... and 0 and 255: (n, n * n, 3)."""
    levels = np.unique(np.append(np.arange(first, 256, step), [0, 255])).astype(np.uint8)
    return np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), 3).reshape(len(levels), -1, 3)


def blurred(window: int | str) -> tuple:
    """Images around multiples of the 64 floats that are summed at once, and just wide enough for the window."""
    rng = np.random.default_rng(0)
    sigmas = [*np.geomspace(0.01, 2, 40), 1 / 3, 2 / 3, 1, 4 / 3]
    shapes = [(14, 13), (13, 14), (22, 43), (16, 64), (40, 21)]
    images = [rng.integers(0, 256, (*shapes[i % 5], 3), np.uint8) for i in range(len(sigmas))]
    given = inputs(len(images), sigma=sigmas, flip=np.arange(len(images)) % 2)
    return images, given, replace(PLAIN, blur_window=window)


def every_seventh_level() -> tuple:
    values = {
        "brightness": (0, BELOW_HALF, 0.2, 1.001, 1.8, 1e6),
        "contrast": (0, 0.2, 0.999, 1.001, 1.8, 1e6),
        "saturation": (0, 0.2, 0.5, 0.999, 1.8, 3),
        "hue": (-0.5, -0.2, 1e-6, 1 / 6, 1 / 3, 0.5),
        "gray": (1,),
    }
    cases = [(name, value) for name, each in values.items() for value in each]
    given = inputs(len(cases))
    for row, (name, value) in enumerate(cases):
        given[name][row] = value
    return [cube(7, row % 7) for row in range(len(cases))], given


def every_size() -> tuple:
    """The operator works in pieces of 256 pixels and vectors of 4 or 8: sizes around their multiples, in one batch."""
    shapes = [(1, 1), (1, 2), (255, 1), (1, 256), (1, 257), (16, 16), (13, 79), (511, 3), (224, 224)]
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*shape, 3), np.uint8) for shape in shapes * 2]
    gray = np.arange(len(images)) >= len(shapes)
    return images, inputs(len(images), brightness=1.3, contrast=0.6, saturation=1.4, hue=-0.15, gray=gray)


BATCHES = {
    "any images and numbers": lambda: check_equal.random_batch(1),
    **{f"blur, window {window}": partial(blurred, window) for window in ("auto", 1, 3, 23)},
    "every seventh level": every_seventh_level,
    "every size": every_size,
}


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
def test_view_operator_has_dalis_bits(batch):
    expected, made = check_equal.both(*BATCHES[batch]())
    for ours, theirs in zip(made, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == np.float32
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_require_equal_sees_one_wrong_bit(view_operator, monkeypatch):
    def off_by_one(images, given, **options):
        graph, ours = real(images, given, **options)
        ours[3] = ours[3].copy()
        ours[3][0, 0, 0] = np.nextafter(ours[3][0, 0, 0], np.float32(9))
        return graph, ours

    real = check_equal.both
    monkeypatch.setattr(check_equal, "both", off_by_one)
    said = r"differs from DALI's own in 1 of .* on this machine: it is not used"
    with pytest.raises(DataError, match=said):
        check_equal.require_equal()
