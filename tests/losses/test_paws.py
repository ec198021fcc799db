"""PAWS against dense float64 equations and its authors' numbers, on one process and on two and four ranks."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastsuncet import paws
from tests.support import dense_losses
from tests.support.dense_losses import by_view, draw
from tests.support.ranks import run_ranks
from tests.support.vectors import load_vectors
from tools.bench.dispatch_counter import Counter

IMAGES, VIEWS, WIDTH, SUPPORTS = 5, 4, 8, 12
# Unbalanced classes, labels of any value; on the last rank classes that no other rank has.
LABELS = [[0, 0, 1, 2, 2, 2, -7, 10**15, 3, 3, 3, 3], [0, 1] * 6, [2, 5, -7] * 4, [*range(100, 112)]]
SETTINGS = {"sharpen": 0.3, "smoothing": 0.05, "temperature": 0.15}


def batch_of(rank: int = 0, images=IMAGES, views=VIEWS, width=WIDTH) -> tuple[torch.Tensor, ...]:
    """Return anchors, supports, labels, targets, target_supports."""
    sizes = (views * images, SUPPORTS, 2 * images, SUPPORTS)
    anchors, supports, targets, of_targets = (draw(10 * rank + i, n, width) for i, n in enumerate(sizes))
    return anchors, supports, torch.tensor(LABELS[rank]), targets, of_targets


def prior_of(labels: torch.Tensor) -> torch.Tensor:
    """Return a share for each support, equal in a class, that sums to nothing in particular."""
    return 1 + (labels % 5).double()


def run(loss, anchors, supports, labels, *targets, **settings) -> tuple[torch.Tensor, ...]:
    """Return cross-entropy and me-max, and the gradients for anchors and supports."""
    anchors, supports = (x.detach().clone().requires_grad_() for x in (anchors, supports))
    cross_entropy, me_max = loss(anchors, supports, labels, *targets, **settings)
    grads = torch.autograd.grad(cross_entropy + me_max, (anchors, supports))
    return cross_entropy.detach(), me_max.detach(), *grads


def assert_near(found, expected, near=1e-10) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near * theirs.abs().max().item() + 1e-14)


@given(
    images=st.integers(1, 9),
    views=st.integers(2, 6),
    supports=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.05, 1),
    sharpen=st.floats(0.1, 1),
    smoothing=st.floats(0, 0.9),
    with_prior=st.booleans(),
)
def test_paws_is_the_dense_equation(images, views, supports, seed, with_prior, **settings):
    anchors, targets = draw(seed, views * images), draw(seed + 1, 2 * images)
    rows = draw(seed + 2, supports), draw(seed + 3, supports)
    labels = torch.tensor(LABELS[0][:supports])
    settings |= {"views": views, "prior": prior_of(labels) if with_prior else None}
    inputs = (anchors, rows[0], labels, targets, rows[1])
    assert_near(run(paws, *inputs, **settings), run(dense_losses.paws, *inputs, **settings), 1e-9)


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_paws_does_not_depend_on_the_rows_at_a_time(rows, monkeypatch):
    monkeypatch.setattr(sys.modules[paws.__module__], "ROWS_PER_CHUNK", rows)
    assert_near(run(paws, *batch_of(), views=VIEWS), run(dense_losses.paws, *batch_of(), views=VIEWS))


def authors_rank(arrays: dict, case: int, rank: int) -> tuple[tuple[torch.Tensor, ...], dict, list]:
    """Return one rank's inputs, the settings, and the authors' (cross-entropy, me-max, two gradients)."""
    mine = {key: arrays[f"case{case}.rank{rank}.{key}"] for key in (
        "anchor_views", "anchor_supports", "labels", "target_views", "target_supports", "loss", "me_max",
        "grad_views", "grad_supports")}  # fmt: skip
    inputs = [torch.from_numpy(mine[key]) for key in list(mine)[:5]]
    # They have the label rows of all ranks.
    inputs[2] = inputs[2].argmax(dim=1).chunk(int(arrays[f"case{case}.world"]))[rank]
    options = {"temperature": "tau", "sharpen": "T", "smoothing": "smoothing"}
    settings = {key: float(arrays[f"case{case}.{name}"]) for key, name in options.items()}
    settings["views"] = 2 + int(arrays[f"case{case}.multicrop"])
    return tuple(inputs), settings, [torch.as_tensor(mine[key]) for key in list(mine)[5:]]


@pytest.mark.parametrize("case", [0, 1])
def test_paws_has_its_authors_numbers(case):
    inputs, settings, expected = authors_rank(load_vectors("paws"), case, 0)
    assert_near(run(paws, *inputs, **settings), expected, 1e-12)


def test_paws_does_not_depend_on_the_dtype_of_labels_or_the_number_of_columns():
    anchors, supports, labels, *targets = batch_of()
    expected = run(paws, anchors, supports, labels, *targets, views=VIEWS)
    small = labels.unique(return_inverse=True)[1].to(torch.uint8)
    assert_near(run(paws, anchors, supports, small, *targets, views=VIEWS), expected)
    columns = len(labels.unique()) + 3
    assert_near(run(paws, anchors, supports, labels, *targets, views=VIEWS, classes=columns), expected)


def test_paws_refuses_more_classes_than_columns():
    with pytest.raises(RuntimeError, match="paws: there are more classes than classes=5 among the supports"):
        paws(*batch_of(), views=VIEWS, classes=5)


def test_paws_gives_targets_no_gradient():
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in batch_of()]
    sum(paws(*inputs, views=VIEWS)).backward()
    assert [x.grad is None for x in inputs] == [False, False, True, True, True]


@pytest.mark.parametrize("temperature", [0.01, 0.03])
def test_paws_of_opposite_rows_is_finite(temperature):
    supports = torch.cat([torch.eye(3), -torch.eye(3)])
    inputs = (supports.repeat(2, 1), supports, torch.arange(6), -supports.repeat(2, 1), supports)
    smoothing = 0.1 if temperature < 0.025 else 0.0
    for each in run(paws, *inputs, views=2, temperature=temperature, smoothing=smoothing, sharpen=0.02):
        assert each.isfinite().all()


def peak_bytes(loss, images: int) -> int:
    anchors, supports, labels, *targets = batch_of(images=images)
    anchors.requires_grad_()
    with Counter() as live:
        sum(loss(anchors, supports.repeat(40, 1), labels.repeat(40), targets[0], targets[1].repeat(40, 1), views=VIEWS)
            ).backward()  # fmt: skip
    return live.peak


def test_paws_memory_grows_by_the_anchors_and_not_by_anchors_times_supports():
    """480 supports: what is kept of 1,024 more images is their rows, and not 4,096 x 480 probabilities."""
    rows = 1024 * VIEWS * WIDTH * 8
    assert peak_bytes(paws, 1536) - peak_bytes(paws, 512) < 16 * rows < 1024 * VIEWS * 480 * 8 / 3
    assert peak_bytes(dense_losses.paws, 96) - peak_bytes(dense_losses.paws, 32) > 64 * VIEWS * 480 * 8


# --------------------------------------------------------------------------------------------------------- ranks
def on_a_rank(rank: int, world_size: int) -> dict:
    """Return the results of a rank; different shapes are refused by all."""
    inputs = batch_of(rank)
    found = {
        "plain": run(paws, *inputs, views=VIEWS),
        "prior": run(paws, *inputs, views=VIEWS, prior=prior_of(inputs[2]), **SETTINGS),
    }
    fewer = [x[: SUPPORTS - rank] if len(x) == SUPPORTS else x for x in batch_of()]
    for wrong, shape in ((batch_of(images=IMAGES + rank), r"\(24, 8\)"), (fewer, r"\(11, 8\)")):
        with pytest.raises(ValueError, match=f"^paws: the shape of its input .* rank 1: {shape}"):
            paws(*wrong, views=VIEWS)
    return found


@pytest.fixture(scope="module", params=[2, 4])
def on_ranks(request) -> list[dict]:
    return run_ranks(on_a_rank, request.param)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "prior"])
def test_paws_on_ranks_is_that_of_one_process(on_ranks, case):
    world_size = len(on_ranks)
    anchors, supports, labels, targets, of_targets = map(torch.cat, zip(*map(batch_of, range(world_size))))
    settings = SETTINGS | {"prior": prior_of(labels)} if case == "prior" else {}
    joined = (by_view(IMAGES, anchors, VIEWS), supports, labels, by_view(IMAGES, targets, 2), of_targets)
    expected = run(dense_losses.paws, *joined, views=VIEWS, **settings)
    values = list(zip(*(each[case] for each in on_ranks)))
    found = [torch.stack(each).mean(0) for each in values[:2]]
    found.append(by_view(IMAGES, torch.cat(values[2]), VIEWS) / world_size)
    found.append(torch.cat(values[3]) / world_size)
    assert_near(found, expected, 1e-11)
    # me-max is that of all ranks, with the same bits on each.
    assert len({each.item() for each in values[1]}) == 1


def authors_on_a_rank(rank: int, world_size: int, arrays: dict) -> tuple:
    inputs, settings, _ = authors_rank(arrays, 3, rank)
    return run(paws, *inputs, **settings)


@pytest.mark.slow
def test_paws_on_two_ranks_has_its_authors_numbers():
    arrays = load_vectors("paws")
    for rank, found in enumerate(run_ranks(authors_on_a_rank, 2, arrays)):
        assert_near(found, authors_rank(arrays, 3, rank)[2], 1e-12)
