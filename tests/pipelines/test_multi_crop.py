"""SwAV's crops through the loader: two large and six small ones of each image, by DALI and by torchvision."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from fastsuncet.config import load_config
from fastsuncet.data.paired_stream import views
from pipelines.datasets.index import ImageIndex
from pipelines.sampling.augmentation import Augmentation
from tests.support.pictures import write_pictures
from tests.support.streams import BACKENDS, assert_same, needs_dali, opened, unlabeled

LARGE = Augmentation(size=28, crop_scale=(0.14, 1.0))
SMALL = replace(LARGE, size=12, crop_scale=(0.05, 0.14), blur_sigma=(0.1, 1.0))
CROPS = (LARGE, LARGE, *(SMALL,) * 6)
IMAGES = 4

readers = pytest.mark.parametrize("reader", BACKENDS)


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> ImageIndex:
    return write_pictures(tmp_path_factory.mktemp("pictures"), count=16, side=64)


def loader_of(index: ImageIndex, reader: str, crops=CROPS, world_size=1, rank=0):
    plan = unlabeled(index, IMAGES, world_size, rank, augmentations=crops)
    return opened(plan, reader, prefetch=2)


@readers
def test_loader_shows_two_large_and_six_small_crops_all_different(index, reader):
    shown = loader_of(index, reader)(0)
    assert [tuple(view.shape) for view in shown] == [(IMAGES, 3, 28, 28)] * 2 + [(IMAGES, 3, 12, 12)] * 6
    assert all(view.is_contiguous(memory_format=torch.channels_last) for view in shown)
    for one, other in combinations(shown, 2):
        assert one.shape != other.shape or (one - other).abs().flatten(1).mean(dim=1).min() > 1e-3


@needs_dali
def test_dali_and_torchvision_show_the_same_crops(index):
    dali, torchvision = loader_of(index, "dali"), loader_of(index, "torchvision")
    for step in range(3):
        for ours, theirs in zip(dali(step), torchvision(step), strict=True):
            assert 255 * (ours - theirs).abs().mean() < 2  # gray levels, as for SimCLR's views


@readers
def test_crop_areas_are_those_of_their_scales(index, reader):
    loader, areas = loader_of(index, reader), []
    for step in range(8):
        loader(step)
        draws = loader.draws(step)
        whole = index.sizes[draws.indices].prod(axis=1)
        areas.append([view.box[:, 2] * view.box[:, 3] / whole for view in draws.views])
    areas = np.stack(areas)  # (steps, crops, images)
    large, small = areas[:, :2], areas[:, 2:]
    # A side is a whole number of pixels, 14 or more, so an area is off by a fourteenth at most.
    assert large.min() > 0.13 and large.max() > 0.7
    assert 0.045 < small.min() < 0.07 and 0.12 < small.max() < 0.15


@pytest.mark.slow
@readers
def test_crops_are_the_same_from_any_step_on_ranks_and_without_small_ones(index, reader):
    loader, resumed = loader_of(index, reader), loader_of(index, reader)
    ranks = [loader_of(index, reader, CROPS, 2, rank) for rank in range(2)]
    large = loader_of(index, reader, (LARGE, LARGE))
    for step in range(5):
        shown = [view.clone() for view in loader(step)]
        if step >= 3:
            assert_same(resumed(step), shown)
            assert_same([torch.cat(parts) for parts in zip(*(rank(step) for rank in ranks))], shown)
            assert_same(large(step), shown[:2])


def test_views_of_a_swav_config_are_these_crops(tmp_path):
    path = tmp_path / "swav.yaml"
    path.write_text(
        "data: {kind: digits, augmentation: {size: 28, crop_scale: [0.14, 1.0], blur: 0}}\n"
        "criterion: {instance: swav, temperature: 0.1, unsupervised_batch_size: 8}\n"
        "swav: {prototypes: 10, small_size: 12, small_crops: 6}\n"
        "optimization: {lr: 1.0, steps: 10}\n"
    )
    large, other, *small = views(load_config(path))
    assert large == other and (large.size, large.crop_scale) == (28, (0.14, 1.0))
    assert small == [replace(large, size=12, crop_scale=(0.05, 0.14))] * 6
