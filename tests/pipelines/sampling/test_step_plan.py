"""Plans: which images and draws a step has, and which image stands in for a bad one. No pixel is read."""

import numpy as np
import pytest
import torch

from pipelines.data_errors import BadImage
from pipelines.datasets.index import ImageIndex
from pipelines.loader import open_evaluation_loader
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.step_plan import EvaluationPlan
from tests.support.pictures import write_pictures
from tests.support.streams import BACKENDS, assert_same, labeled, unlabeled

CROP = Augmentation(size=32, jitter=0.0, grey=0.0, blur=0.0)
WANTED = np.array([7, 0, 11, 3, 3, 5, 1])  # an image can be asked for twice


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> ImageIndex:
    return write_pictures(tmp_path_factory.mktemp("pictures"), count=24, side=40)


def test_plan_streams_of_other_roles_seeds_views_and_steps_differ(index):
    plans = [unlabeled(index), unlabeled(index, seed=1), unlabeled(index, role="other")]
    boxes = [plan(0).views[0].box for plan in plans]
    boxes += [plans[0](0).views[1].box, plans[0](1).views[0].box]
    for i, box in enumerate(boxes):
        assert not any((box == other).all(1).any() for other in boxes[i + 1 :])


def test_plan_refuses_a_rank_beyond_the_samplers(index):
    with pytest.raises(ValueError, match="rank 2 is not one of"):
        unlabeled(index, world_size=2, rank=2)


def test_plan_stand_in_of_another_class_has_its_own_label_and_size(index):
    plan = labeled(index, np.arange(24))
    bad = int(plan(0).indices[0])
    other = int(np.flatnonzero(index.labels != index.labels[bad])[0])
    draws = plan(0, {bad: other})
    assert draws.indices[0] == other and draws.labels[0] == index.labels[other]
    top, left, height, width = draws.views[0].box[0]
    assert top + height <= index.sizes[other, 0] and left + width <= index.sizes[other, 1]


def test_plan_stand_ins_come_from_the_class_first_and_then_from_the_stream(index):
    few = np.arange(0, 24, 2)
    plan, bad = labeled(index, few), int(few[0])
    early = {plan.stand_in(bad, attempt) for attempt in range(16)}
    late = {plan.stand_in(bad, attempt) for attempt in range(16, 200)}
    assert (index.labels[list(early)] == index.labels[bad]).all() and len(early) > 1
    assert late == set(few.tolist())
    assert {unlabeled(index).stand_in(bad, attempt) for attempt in range(400)} == set(range(24))
    assert len({unlabeled(index).stand_in(image, 0) for image in range(24)}) > 8  # not one for all


# -- one pass


def one_pass(index, indices=WANTED, batch=3, views=2, **options) -> EvaluationPlan:
    return EvaluationPlan(
        index, indices, batch, (CROP,) * views, **{"seed": 5, "role": "supports", **options}
    )


def boxes(plan: EvaluationPlan, view: int = 0) -> np.ndarray:
    return np.concatenate([plan(step).views[view].box for step in range(len(plan))])


def test_evaluation_plan_shows_every_image_once_in_order(index):
    steps = [one_pass(index)(step) for step in range(3)]
    assert np.concatenate([draws.indices for draws in steps]).tolist() == WANTED.tolist()
    assert [len(draws.indices) for draws in steps] == [3, 3, 1]
    with pytest.raises(StopIteration):
        one_pass(index)(3)
    with pytest.raises(ValueError, match="stand in"):
        one_pass(index).stand_in(7, 0)


def test_evaluation_plan_view_depends_on_its_position_alone(index):
    """Not on batches, ranks or the number of views."""
    whole = boxes(one_pass(index, batch=7, views=1))
    assert np.array_equal(boxes(one_pass(index)), whole)
    shares = [one_pass(index, WANTED[:4], first=0), one_pass(index, WANTED[4:], batch=2, first=4)]
    assert np.array_equal(np.concatenate([boxes(share) for share in shares]), whole)
    assert not np.array_equal(whole[3], whole[4])  # the same image in two positions
    assert not np.array_equal(boxes(one_pass(index), view=1), whole)
    assert not np.array_equal(boxes(one_pass(index, seed=6)), whole)
    assert not np.array_equal(boxes(one_pass(index, role="else")), whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_loader_shows_the_plans_random_views_again_and_again(index, backend):
    loader = open_evaluation_loader(index, one_pass(index), backend=backend, threads=1)
    passes = [list(loader) for _ in range(2)]
    assert torch.cat([numbers for _, _, numbers in passes[0]]).tolist() == WANTED.tolist()
    assert torch.cat([labels for _, labels, _ in passes[0]]).tolist() == index.labels[WANTED].tolist()
    twin = list(open_evaluation_loader(index, one_pass(index), backend="torchvision", threads=1))
    for (first, _, _), (again, _, _), (theirs, _, _) in zip(*passes, twin):
        assert_same(first, again)
        assert all((a - b).abs().mean() < 0.01 for a, b in zip(first, theirs, strict=True))


def test_evaluation_loader_names_a_bad_image_only_where_it_is_asked_for(tmp_path):
    index = write_pictures(tmp_path, count=4, side=40)
    path = index.path(2)
    path.write_bytes(path.read_bytes()[:300])
    index = index.refreshed()
    assert list(index.bad) == [2]
    assert len(list(open_evaluation_loader(index, one_pass(index, np.array([0, 1, 3])), threads=1))) == 1
    with pytest.raises(BadImage) as caught:
        open_evaluation_loader(index, one_pass(index, np.array([1, 2])), threads=1)
    assert [name for name, _ in caught.value.files] == [str(path)]
