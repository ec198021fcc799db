"""One pass of random views: each image once, and its views a function of its place alone."""

import numpy as np
import pytest
import torch

from pipelines.data_errors import BadImage
from pipelines.loader import open_pass_loader
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.step_plan import PassPlan
from tests.support.pictures import write_pictures

CROP = Augmentation(size=32, jitter=0.0, grey=0.0, blur=0.0)
WANTED = np.array([7, 0, 11, 3, 3, 5, 1])  # an image may be asked for twice


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pass"), side=40)


def plan(index, indices=WANTED, batch=3, views=2, **options) -> PassPlan:
    return PassPlan(index, indices, batch, (CROP,) * views, **{"seed": 5, "role": "supports", **options})


def boxes(plan: PassPlan, view: int = 0) -> np.ndarray:
    return np.concatenate([plan(step).views[view].box for step in range(len(plan))])


def test_every_image_comes_once_in_order_and_then_it_is_over(index):
    visits = [plan(index)(step) for step in range(3)]
    assert np.concatenate([visit.indices for visit in visits]).tolist() == WANTED.tolist()
    assert [len(visit.indices) for visit in visits] == [3, 3, 1]
    with pytest.raises(StopIteration):
        plan(index)(3)
    with pytest.raises(ValueError, match="stand in"):
        plan(index)(0, {7: 1})


def test_a_view_depends_on_its_place_and_not_on_batches_ranks_or_other_views(index):
    whole = boxes(plan(index, batch=7, views=1))
    assert np.array_equal(boxes(plan(index)), whole)
    shares = [plan(index, WANTED[:4], first=0), plan(index, WANTED[4:], batch=2, first=4)]
    assert np.array_equal(np.concatenate([boxes(share) for share in shares]), whole)
    assert not np.array_equal(whole[3], whole[4])  # the same image in two places
    assert not np.array_equal(boxes(plan(index), view=1), whole)
    assert not np.array_equal(boxes(plan(index, seed=6)), whole)
    assert not np.array_equal(boxes(plan(index, role="else")), whole)


@pytest.mark.parametrize("backend", ["dali", "torchvision"])
def test_both_back_ends_show_the_plans_views_and_may_be_asked_again(index, backend):
    loader = open_pass_loader(index, plan(index), backend=backend, threads=1)
    passes = [list(loader) for _ in range(2)]
    assert [len(views) for views, _, _ in passes[0]] == [2, 2, 2]
    assert torch.cat([numbers for _, _, numbers in passes[0]]).tolist() == WANTED.tolist()
    assert torch.cat([labels for _, labels, _ in passes[0]]).tolist() == index.labels[WANTED].tolist()
    for (first, _, _), (again, _, _) in zip(*passes):
        assert all(torch.equal(a, b) for a, b in zip(first, again))
    twin = list(open_pass_loader(index, plan(index), backend="torchvision", threads=1))
    for (ours, _, _), (theirs, _, _) in zip(passes[0], twin):
        assert all((a - b).abs().mean() < 0.01 for a, b in zip(ours, theirs))


def test_a_bad_image_is_named_only_where_it_is_asked_for(tmp_path):
    index = write_pictures(tmp_path, count=4, side=40)
    path = index.path(2)
    path.write_bytes(path.read_bytes()[:300])
    index = index.refreshed()
    assert list(index.bad) == [2]
    assert len(list(open_pass_loader(index, plan(index, np.array([0, 1, 3])), threads=1))) == 1
    with pytest.raises(BadImage) as caught:
        open_pass_loader(index, plan(index, np.array([1, 2])), threads=1)
    assert [name for name, _ in caught.value.files] == [str(path)]
