"""Plans: which images and draws a step has, and which image stands in for a bad one. No pixel is read."""

from dataclasses import fields
from functools import partial

import numpy as np
import pytest

from pipelines.sampling.augmentation import Augmentation, ViewParams
from pipelines.sampling.step_plan import EvaluationPlan
from tests.support.streams import labeled, unlabeled

CROP = Augmentation(size=32, jitter=0.0, gray=0.0, blur=0.0)
WANTED = np.array([7, 0, 11, 3, 3, 5, 1])  # an image can be asked for twice


def test_plan_streams_of_other_roles_seeds_views_and_steps_differ(index):
    plans = [unlabeled(index), unlabeled(index, seed=1), unlabeled(index, role="other")]
    boxes = [plan(0).views[0].box for plan in plans]
    boxes += [plans[0](0).views[1].box, plans[0](1).views[0].box]
    for i, box in enumerate(boxes):
        assert not any((box == other).all(1).any() for other in boxes[i + 1 :])


@pytest.mark.parametrize("plan", [unlabeled, partial(labeled, indices=np.arange(0, 24, 2))])
def test_plan_of_ranks_joined_is_one_processes(index, plan):
    for step in (0, 1, 7):
        one, *ranks = (plan(index, world_size=n, rank=k)(step) for n, k in ((1, 0), (2, 0), (2, 1)))
        for name in ("indices", "labels"):
            joined = np.concatenate([getattr(draws, name) for draws in ranks])
            np.testing.assert_array_equal(joined, getattr(one, name))
        for view, parts in zip(one.views, zip(*(draws.views for draws in ranks)), strict=True):
            for field in fields(ViewParams):
                joined = np.concatenate([getattr(part, field.name) for part in parts])
                np.testing.assert_array_equal(joined, getattr(view, field.name))


def test_plan_stand_ins_come_from_the_class_first_and_then_from_the_stream(index):
    few = np.arange(0, 24, 2)
    plan, bad = labeled(index, few), int(few[0])
    early = {plan.stand_in(bad, attempt) for attempt in range(16)}
    late = {plan.stand_in(bad, attempt) for attempt in range(16, 200)}
    assert (index.labels[list(early)] == index.labels[bad]).all() and len(early) > 1
    assert late == set(few.tolist())
    assert {unlabeled(index).stand_in(bad, attempt) for attempt in range(400)} == set(range(24))
    assert len({unlabeled(index).stand_in(image, 0) for image in range(24)}) > 8  # not one for all


def test_plan_stand_in_gets_its_own_crop_and_label_and_the_rows_other_draws(index):
    plan, (bad, *_) = unlabeled(index), unlabeled(index)(0).indices
    stand_in = plan.stand_in(int(bad), 0)
    assert stand_in == unlabeled(index, world_size=2, rank=1).stand_in(int(bad), 0)  # on every rank
    before, after = plan(0), plan(0, {int(bad): stand_in})
    assert after.indices[0] == stand_in and after.labels[0] == index.labels[stand_in]
    # What a run would show whose sampler had drawn the stand-in in that row.
    plan.sampler.rows = lambda step, rank: after.indices
    for field in fields(ViewParams):
        values, drawn, others = (getattr(each.views[0], field.name) for each in (after, plan(0), before))
        np.testing.assert_array_equal(values, drawn)
        first = 1 if field.name == "box" else 0
        np.testing.assert_array_equal(values[first:], others[first:])


def one_pass(index, indices=WANTED, batch=3, views=2, **options) -> EvaluationPlan:
    options = {"seed": 5, "role": "supports", **options}
    return EvaluationPlan(index, indices, batch, (CROP,) * views, **options)


def boxes(plan: EvaluationPlan, view: int = 0) -> np.ndarray:
    return np.concatenate([plan(step).views[view].box for step in range(len(plan))])


def test_evaluation_plan_shows_every_image_once_in_order(index):
    steps = [one_pass(index)(step) for step in range(3)]
    assert np.concatenate([draws.indices for draws in steps]).tolist() == WANTED.tolist()
    assert [len(draws.indices) for draws in steps] == [3, 3, 1]
    with pytest.raises(StopIteration):
        one_pass(index)(3)


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
