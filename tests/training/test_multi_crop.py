"""SwAV's crops through the loader: two large and six small ones of each image, by DALI and by its torchvision twin."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fastsuncet.config import load_config
from fastsuncet.data import paired_stream as data
from pipelines import backend
from pipelines.datasets.index import ImageIndex
from pipelines.loader import Loader, open_loader
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.samplers import UnlabeledSampler
from pipelines.sampling.step_plan import Plan
from tests.support.pictures import write_pictures

LARGE = Augmentation(size=28, crop_scale=(0.14, 1.0))
SMALL = replace(LARGE, size=12, crop_scale=(0.05, 0.14), blur_sigma=(0.1, 1.0))
CROPS = (LARGE, LARGE, *(SMALL,) * 6)
IMAGES = 4

needs_dali = pytest.mark.skipif(backend.dali_problem() is not None, reason="DALI is not installed")
readers = pytest.mark.parametrize("reader", [pytest.param("dali", marks=needs_dali), "torchvision"])


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> ImageIndex:
    return write_pictures(tmp_path_factory.mktemp("pictures"), count=16, side=64)


def _opened(index: ImageIndex, reader: str, crops=CROPS, world_size=1, rank=0) -> Loader:
    sampler = UnlabeledSampler(len(index), IMAGES, world_size, 0)
    plan = Plan(index, sampler, crops, seed=0, role="unlabeled", rank=rank)
    return open_loader(index, plan, threads=1, prefetch=2, backend=reader)


def _kept(views: list[torch.Tensor]) -> list[torch.Tensor]:
    return [view.clone() for view in views]


def _same(views: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(views) == len(others) and all(map(torch.equal, views, others))


@readers
def test_an_image_is_shown_as_two_large_and_six_small_crops_all_different(index, reader):
    views = _kept(_opened(index, reader)(0))
    assert [tuple(view.shape) for view in views] == [(IMAGES, 3, 28, 28)] * 2 + [(IMAGES, 3, 12, 12)] * 6
    for view in views:
        assert view.dtype == torch.float32 and view.is_contiguous(memory_format=torch.channels_last)
        assert view.min() >= 0 and view.max() <= 1
    for i, one in enumerate(views):
        for other in views[i + 1 :]:
            assert one.shape != other.shape or (one - other).abs().flatten(1).mean(dim=1).min() > 1e-3


@needs_dali
def test_dali_and_its_twin_show_the_same_crops(index):
    dali, twin = _opened(index, "dali"), _opened(index, "torchvision")
    for step in range(3):
        for ours, theirs in zip(dali(step), twin(step), strict=True):
            assert 255 * (ours - theirs).abs().mean() < 2  # grey levels, as for drawn views of SimCLR


@readers
def test_large_crops_show_up_to_everything_and_small_ones_a_twentieth_to_a_seventh(index, reader):
    loader = _opened(index, reader)
    areas = []
    for step in range(8):
        loader(step)
        visit = loader.visit(step)
        whole = index.sizes[visit.indices].prod(axis=1)
        areas.append([view.box[:, 2] * view.box[:, 3] / whole for view in visit.views])
    areas = np.stack(areas)  # (steps, crops, images)
    large, small = areas[:, :2], areas[:, 2:]
    # A side is a whole number of pixels: of some 14 and more, so an area is off by a fourteenth at most.
    assert large.min() > 0.13 and large.max() > 0.7
    assert 0.045 < small.min() < 0.07 and 0.12 < small.max() < 0.15


@readers
def test_any_step_starts_with_the_bits_of_a_run_that_came_there(index, reader):
    loader = _opened(index, reader)
    run = [_kept(loader(step)) for step in range(5)]
    for start in (1, 4):
        resumed = _opened(index, reader)
        for step in range(start, 5):
            assert _same(resumed(step), run[step])


@readers
def test_two_ranks_rows_are_those_of_one_process_in_every_crop(index, reader):
    one, ranks = _opened(index, reader), [_opened(index, reader, CROPS, 2, rank) for rank in range(2)]
    for step in (0, 5):
        assert _same(one(step), [torch.cat(parts) for parts in zip(*(loader(step) for loader in ranks))])


@readers
def test_small_crops_beside_them_move_no_bit_of_the_large_ones(index, reader):
    assert _same(_opened(index, reader)(2)[:2], _opened(index, reader, (LARGE, LARGE))(2))
    assert _same(_opened(index, reader)(2)[:4], _opened(index, reader, CROPS[:4])(2))


def test_the_swav_section_of_a_config_names_these_crops(tmp_path):
    path = tmp_path / "swav.yaml"
    path.write_text(
        "data: {kind: digits, augmentation: {size: 28, crop_scale: [0.14, 1.0], blur: 0}}\n"
        "criterion: {instance: swav, temperature: 0.1, unsupervised_batch_size: 8}\n"
        "swav: {prototypes: 10, small_size: 12, small_crops: 6}\n"
        "optimization: {lr: 1.0, steps: 10}\n"
    )
    large, other, *small = data.views(load_config(path))
    assert large == other and (large.size, large.crop_scale) == (28, (0.14, 1.0))
    assert small == [replace(large, size=12, crop_scale=(0.05, 0.14))] * 6
