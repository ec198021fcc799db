"""Which images a step sees, by counting, with which draws, and which image stands in for a bad one."""

from collections import Counter
from dataclasses import fields
from functools import partial
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipelines.sampling.augmentation import Augmentation, ViewParams
from pipelines.sampling.samplers import ClassSampler, UnlabeledSampler, permutation
from pipelines.sampling.step_plan import EvaluationPlan
from tests.support.streams import labeled, unlabeled

CROP = Augmentation(size=32, jitter=0.0, gray=0.0, blur=0.0)
WANTED = np.array([7, 0, 11, 3, 3, 5, 1])  # an image can be asked for twice


def global_batch(sampler, step):
    return np.concatenate([sampler.rows(step, rank) for rank in range(sampler.world_size)])


def numbered(counts):
    """Indices 0, 1, ... of which `counts[c]` are of class c, shuffled as in a data set."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    return np.arange(len(labels)), labels


def test_permutation_sorts_the_raw_words_of_philox_and_never_changes():
    words = np.random.Philox(key=[7, 9], counter=[0, 0, 3, 4]).random_raw(50).tolist()
    expected = sorted(range(50), key=lambda i: words[i])
    assert permutation(50, seed=7, role=9, counter=(3, 4)).tolist() == expected
    assert permutation(8, seed=0, role=1, counter=(2, 3)).tolist() == [3, 7, 5, 0, 4, 1, 2, 6]
    top = 2**64 - 1
    assert sorted(permutation(5, seed=top, role=top, counter=(top, top)).tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda ranks: UnlabeledSampler(50, 12, ranks, seed=3),
        lambda ranks: UnlabeledSampler(50, 12, ranks, 3, np.arange(0, 100, 2)),
        lambda ranks: ClassSampler(*numbered([1, 5, 9, 60]), 3, 12, ranks, seed=3),
        lambda ranks: ClassSampler(*numbered([1, 5, 9, 60]), 3, 4, ranks, seed=3),
    ],
)
def test_samplers_batch_is_the_same_in_any_order_and_on_any_number_of_ranks(make):
    alone = make(1)
    for step in [0, 9, 3, 250, 4, 3, 0, 10**9]:
        expected = make(1).rows(step, 0).tolist()
        assert alone.rows(step, 0).tolist() == expected
        for ranks in (2, 3, 12):
            assert global_batch(make(ranks), step).tolist() == expected


@given(
    local=st.integers(1, 7),
    world_size=st.integers(1, 5),
    batches=st.integers(1, 6),
    extra=st.sampled_from([-1, 0, 1]),
    seed=st.integers(0, 2**64 - 1),
)
def test_unlabeled_epoch_uses_each_image_once_and_drops_less_than_a_batch(
    local, world_size, batches, extra, seed
):
    batch = local * world_size
    num_images = batches * batch + extra  # exactly divisible, one short, one over
    assume(num_images >= batch)
    sampler = UnlabeledSampler(num_images, batch, world_size, seed)
    assert sampler.steps_per_epoch == num_images // batch
    for epoch in range(3):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        rows = [sampler.rows(step, rank) for step in steps for rank in range(world_size)]
        assert all(row.dtype == np.int64 and row.shape == (local,) for row in rows)
        seen = np.concatenate(rows)
        assert len(np.unique(seen)) == len(seen) == sampler.steps_per_epoch * batch  # ranks disjoint too
        assert seen.min() >= 0 and seen.max() < num_images


def test_unlabeled_epochs_and_seeds_have_different_orders_and_remainders():
    orders = {tuple(UnlabeledSampler(64, 64, 1, seed).rows(step, 0)) for seed in (0, 1) for step in range(4)}
    assert len(orders) == 8
    sampler = UnlabeledSampler(11, 8, 2, seed=0)
    sampler.rows(0, 0)[:] = -1  # changes no epoch
    seen = [frozenset(global_batch(sampler, epoch).tolist()) for epoch in range(12)]
    assert frozenset.union(*seen) == set(range(11)) and len(set(seen)) > 6


def test_unlabeled_reading_ahead_across_an_epochs_edge_sorts_each_epoch_once(monkeypatch):
    drawn = mock.Mock(wraps=permutation)
    monkeypatch.setattr("pipelines.sampling.samplers.permutation", drawn)
    sampler = UnlabeledSampler(20, 5, 1, seed=0)
    for step in [2, 3, 4, 3, 5, 3, 4, 8, 7]:  # steps 0-3 are epoch 0, 4-7 epoch 1, 8-11 epoch 2
        sampler.rows(step, 0)
    assert [call.kwargs["counter"] for call in drawn.call_args_list] == [(0, 0), (0, 1), (0, 2)]


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    chosen=st.integers(1, 9),
    n=st.integers(1, 5),
    world_size=st.integers(1, 4),
    step=st.integers(0, 500),
    seed=st.integers(0, 2**64 - 1),
)
def test_class_rows_are_interleaved_shared_and_distinct_where_possible(
    counts, chosen, n, world_size, step, seed
):
    C = min(chosen, len(counts))
    indices, labels = numbered(counts)
    sampler = ClassSampler(indices + 1000, labels, C, n * world_size, world_size, seed)
    classes = sampler.classes(step).tolist()
    assert len(set(classes)) == C
    everywhere = {label: Counter() for label in classes}
    for rank in range(world_size):
        rows = sampler.rows(step, rank)
        assert rows.dtype == np.int64 and rows.shape == (sampler.local_batch,) == (C * n,)
        assert labels[rows - 1000].tolist() == classes * n
        for column, label in enumerate(classes):
            mine = rows[column::C].tolist()
            assert len(set(mine)) == min(n, counts[label])
            everywhere[label].update(mine)
    for label, uses in everywhere.items():
        assert len(uses) == min(n * world_size, counts[label])
        assert max(uses.values()) - min(uses.values()) <= 1


@given(
    counts=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    chosen=st.integers(1, 12),
    m=st.integers(1, 9),
)
def test_class_cycles_visit_a_class_once_and_its_images_before_one_returns(counts, chosen, m):
    """A cycle leaves out less than a step's classes, and a permutation serves floor(n / m) visits."""
    C = min(chosen, len(counts))
    sampler = ClassSampler(*numbered(counts), C, m, 1, seed=4)
    assert sampler.steps_per_cycle == len(counts) // C
    seen: dict[tuple[int, int], list[int]] = {}
    for cycle in range(20):
        steps = range(cycle * sampler.steps_per_cycle, (cycle + 1) * sampler.steps_per_cycle)
        visited = Counter(label for step in steps for label in sampler.classes(step).tolist())
        assert max(visited.values()) == 1 and len(counts) - len(visited) == len(counts) % C
        for step in steps:
            for column, label in enumerate(sampler.classes(step).tolist()):
                number = cycle // max(1, counts[label] // m)
                seen.setdefault((label, number), []).extend(sampler.rows(step, 0)[column::C].tolist())
    for (label, _), images in seen.items():
        assert len(set(images)) == min(len(images), counts[label])


def test_class_left_out_changes_over_the_run():
    sampler = ClassSampler(*numbered([4] * 3), 2, 4, 1, seed=0)
    drawn = Counter(label for step in range(1500) for label in sampler.classes(step).tolist())
    assert all(abs(count - 1000) < 100 for count in drawn.values()) and len(drawn) == 3


def test_class_order_of_listing_does_not_matter_and_labels_can_have_gaps():
    indices, labels = numbered([5, 9, 30])
    shuffle = np.random.default_rng(1).permutation(len(indices))
    one, other = (ClassSampler(indices[o], labels[o], 2, 4, 1, 0) for o in (slice(None), shuffle))
    assert all(one.rows(step, 0).tolist() == other.rows(step, 0).tolist() for step in range(20))
    gaps = ClassSampler(np.arange(9), np.array([5, 900, 7] * 3), 3, 3, 1, 0)
    assert sorted(gaps.classes(0).tolist()) == [5, 7, 900]


def test_class_draws_differ_by_seed_by_class_and_from_the_classes_order():
    indices, labels = numbered([20] * 8)
    one, other = (ClassSampler(indices, labels, 2, 4, 1, seed) for seed in (0, 1))
    assert [one.classes(s).tolist() for s in range(8)] != [other.classes(s).tolist() for s in range(8)]
    one, other = (ClassSampler(*numbered([20]), 1, 20, 1, seed) for seed in (0, 1))
    assert one.rows(0, 0).tolist() != other.rows(0, 0).tolist()
    sampler = ClassSampler(np.arange(64), np.repeat(np.arange(8), 8), 8, 8, 1, seed=0)
    classes, rows = sampler.classes(0).tolist(), sampler.rows(0, 0)
    orders = {tuple(rows[column::8] % 8) for column in range(8)}
    assert len(orders) == 8 and tuple(classes) not in orders


def test_class_notes_name_what_is_empty_left_over_shared_and_repeated():
    names = ["ant", "bee", "cat", "dog", "elk", "fox"]
    sampler = ClassSampler(*numbered([0, 1, 2, 3, 40, 40]), 4, 8, 4, seed=0, class_names=names)
    empty, chunks, shared, repeated = sampler.notes()
    assert "1 of 6 classes" in empty and empty.endswith("no labeled image: ant")
    assert "each round of 1 step leaves out 1" in chunks
    assert "the 8 a batch takes" in shared and shared.endswith(": cat (2), dog (3)")
    assert "the 2 a rank takes" in repeated and repeated.endswith(": bee (1)")
    many = ClassSampler(*numbered([2] * 30), 5, 4, 2, 0, [str(label) for label in range(30)])
    assert many.notes()[-1].endswith("0 (2), 1 (2), 2 (2), 3 (2), 4 (2) and 25 more")
    assert ClassSampler(*numbered([8, 9, 10, 11]), 2, 8, 4, seed=0, class_names="abcd").notes() == []


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
