"""What is drawn for a view: against torchvision's own code on the same draws, and as distributions."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop

from pipelines.sampling import augmentation as module
from pipelines.sampling.augmentation import Augmentation, Center, Probability, ViewParams, draw_view, uniform

sides = st.integers(1, 700)
sizes_of_images = st.lists(st.tuples(sides, sides), min_size=1, max_size=20).map(np.array)


def draw(sizes, augmentation=None, *, seed=0, step=0, role="test", first_row=0) -> ViewParams:
    augmentation = augmentation or Augmentation()
    return draw_view(augmentation, sizes, seed=seed, step=step, role=role, first_row=first_row)


@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.9, 1.0), (0.05, 0.14)])
@pytest.mark.parametrize("shape", [(375, 500), (224, 224), (64, 700), (700, 64), (2, 3), (1, 1)])
def test_crop_boxes_are_those_of_torchvisions_code_on_the_same_draws(monkeypatch, shape, scale):
    augmentation = Augmentation(crop_scale=scale)
    rng, columns = np.random.default_rng(0), 2 * module.CROP_TRIES + 2
    draws = rng.random((60, columns)).astype(np.float32).astype(np.float64)
    tries, (top, left) = draws[:, :-2], draws[:, -2:].T
    boxes = module.random_resized_crop(augmentation, np.tile(shape, (len(draws), 1)), tries, top, left)
    uniforms = corners = iter(())
    # torchvision's code draws by these two; here they hand out the draws above.
    monkeypatch.setattr(
        torch.Tensor,
        "uniform_",
        lambda _, low, high: torch.tensor(float(low) + float(high - low) * float(next(uniforms))),
    )
    monkeypatch.setattr(
        torch, "randint", lambda low, high, size: torch.tensor(math.floor(next(corners) * high))
    )
    image, theirs = torch.empty(3, *shape), []
    for row in range(len(boxes)):
        uniforms, corners = iter(tries[row]), iter((top[row], left[row]))
        theirs.append(RandomResizedCrop.get_params(image, list(scale), list(augmentation.crop_ratio)))
    # torchvision computes in float32: now and then a side rounds the other way, by one pixel.
    difference = np.abs(boxes - theirs)
    assert difference.max() <= 1 and (difference > 0).mean() < 0.02


@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (0.1, 0.3), (3.0, 4.0)])
def test_crop_of_one_pixel_or_of_an_image_without_a_size_is_one_pixel(ratio):
    boxes = draw(np.array([[0, 0], [1, 1]]), Augmentation(crop_ratio=ratio)).box
    np.testing.assert_array_equal(boxes, [[0, 0, 1, 1]] * 2)


@given(sizes_of_images, st.data())
def test_draws_of_ranks_joined_are_one_processes(sizes, data):
    cut = data.draw(st.integers(0, len(sizes)))
    halves = Augmentation(**{each.name: 0.5 for each in fields(Augmentation) if each.type == Probability})
    whole, head = draw(sizes, halves, step=3), draw(sizes[:cut], halves, step=3)
    tail = draw(sizes[cut:], halves, step=3, first_row=cut)
    for field in fields(ViewParams):
        joined = np.concatenate([getattr(part, field.name) for part in (head, tail)])
        np.testing.assert_array_equal(getattr(whole, field.name), joined, field.name)


def test_draws_of_a_row_do_not_depend_on_its_image_or_on_other_strengths():
    sizes = np.array([[100, 100], [90, 120], [80, 80]])
    one, other, weaker = draw(sizes), draw(sizes[::-1]), draw(sizes, Augmentation(jitter=0, blur=0))
    np.testing.assert_array_equal(one.hue, other.hue)
    for name in ("box", "flip", "gray"):
        np.testing.assert_array_equal(getattr(one, name), getattr(weaker, name))


def test_draws_never_change():
    """A change here is a change of every run's images: a resumed run would not be the run that was stopped."""
    first = [0.7859774219623263, 0.256660008725615, 0.9873946516492769]
    assert uniform(0, "unlabeled/view 0", (0, 0, 0, 0), 3).tolist() == first
    far = [0.6078075074373607, 0.3203319251431599]
    assert uniform(2**64 - 1, "labeled/view 0", (8, 0, 0, 2**40), 2).tolist() == far
    always = Augmentation(jitter=1, blur=1)
    view = draw(np.array([[375, 500]]), always, role="unlabeled/view 0", first_row=5)
    assert view.box[0].tolist() == [148, 55, 173, 162]
    drawn = [view.brightness, view.contrast, view.saturation, view.hue, view.sigma]
    expected = [0.262372, 0.41763, 1.52812, -0.071237, 1.776744]
    np.testing.assert_allclose(np.concatenate(drawn), expected, atol=1e-6)
    view = draw(np.full((8, 2), 300), role="unlabeled/view 0")
    drawn = (view.flip, view.hue != 0, view.gray, view.sigma > 0)
    shown = " ".join("".join(".x"[int(row)] for row in rows) for rows in drawn)
    assert shown == ".x.xxxx. xx.x.xxx .xx.xxx. ..x..x.x"
    view = draw(np.full((3, 2), 300), Augmentation(color_order="random"), role="unlabeled/view 0")
    assert view.order.tolist() == [[2, 3, 0, 1], [1, 0, 2, 3], [1, 3, 0, 2]]


COUNT = 20_000
HALVED = Augmentation(strength=0.5, brightness=1.6, contrast=1.6, saturation=1.6, hue=0.4)


@pytest.fixture(scope="module")
def many() -> ViewParams:
    return draw(np.full((COUNT, 2), 300), HALVED, seed=11)


def test_draws_are_uniform_over_their_ranges_in_the_share_of_images_that_is_set(many):
    jittered = many.hue != 0
    for name, share, low, high in (
        ("flip", 0.5, 1, 1),
        ("gray", 0.2, 1, 1),
        ("brightness", 0.8, 0.2, 1.8),
        ("contrast", 0.8, 0.2, 1.8),
        ("saturation", 0.8, 0.2, 1.8),
        ("hue", 0.8, -0.2, 0.2),
        ("sigma", 0.5, 0.1, 2.0),
    ):
        drawn = getattr(many, name)
        values = drawn[jittered if share == 0.8 else drawn > 0].astype(np.float32)
        assert abs(len(values) / COUNT - share) < 4 * math.sqrt(share * (1 - share) / COUNT), name
        assert values.min() >= np.float32(low) and values.max() <= np.float32(high), name
        difference = np.abs(np.sort(values) - np.linspace(low, high, len(values))).max()
        assert difference <= 1.95 / math.sqrt(len(values)) * (high - low), name
    for name in ("brightness", "contrast", "saturation"):
        assert (getattr(many, name)[~jittered] == 1).all(), name


def test_draws_of_a_random_order_are_uniform_and_change_nothing_else(many):
    fixed = draw(np.full((COUNT, 2), 300), replace(HALVED, color_order="fixed"), seed=11)
    assert (fixed.order == [0, 1, 2, 3]).all()
    orders, counts = np.unique(many.order, axis=0, return_counts=True)
    assert len(orders) == 24 and (np.sort(orders) == [0, 1, 2, 3]).all()
    assert np.abs(counts / COUNT - 1 / 24).max() < 4.5 * math.sqrt(1 / 24 / COUNT)
    for field in fields(ViewParams):
        same = np.array_equal(getattr(fixed, field.name), getattr(many, field.name))
        assert same == (field.name != "order"), field.name


@given(sizes_of_images, st.integers(1, 300), st.data())
def test_center_view_is_where_torchvision_puts_it(sizes, resize, data):
    size = data.draw(st.integers(1, resize))
    center = module.center_view(Center(size, resize), sizes)
    for (height, width), resized, corner in zip(sizes.tolist(), center.resized, center.corner):
        short, long = min(height, width), max(height, width)
        new_long = int(resize * long / short)  # torchvision's own expressions
        expected = (resize, new_long) if height <= width else (new_long, resize)
        assert tuple(resized) == expected
        assert tuple(corner) == tuple(round((side - size) / 2.0) for side in expected)


def test_center_refuses_a_crop_that_is_larger_than_the_image():
    with pytest.raises(ValueError, match="not within the shorter side"):
        Center(size=224, resize=200)


def test_blur_windows_hold_three_standard_deviations_on_each_side():
    np.testing.assert_array_equal(module.blur_windows(np.array([0.1, 0.34, 1.0, 2.0])), [3, 5, 7, 13])
    assert Augmentation().widest_blur == 13 and Augmentation(blur_window=23).widest_blur == 23
