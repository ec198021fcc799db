"""Losses on real ranks are those of one process on the joined batch: values, and gradients over the world size."""

import itertools
import re

import pytest
import torch

from fastsuncet import cross_entropy, nt_xent, suncet, sup_con, swav
from fastsuncet.losses import contrast, contrast_kernel
from fastsuncet.losses.swav import sinkhorn
from tests.support import dense_losses, vectors
from tests.support.dense_losses import by_view, draw, gradient
from tests.support.host_kernels import on_the_host
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

F32, F64 = torch.float32, torch.float64
NEAR = {F32: 3e-6, F64: 1e-12}
LABELED = {"suncet": suncet, "sup_con": sup_con}
IMAGES, LABELED_ROWS, WIDTH, CROPS, PROTOTYPES = 5, 12, 8, 4, 6
TEMPERATURE = 0.2

# Labels of one rank's rows. On the last rank of "lonely" no row has a positive anywhere, and no two ranks
# have equally many anchors; -7 and 10**15 have their positives on different ranks.
LABELS = {
    "balanced": lambda rank: [0, 1, 2] * 4,
    "lonely": lambda rank: [
        [0] * 8 + [-7, 10**15, 3, 3],
        [100 + k for k in range(11)] + [-7],
        [200 + k for k in range(10)] + [-7, 10**15],
        [300 + k for k in range(12)],
    ][rank],
    "all_apart": lambda rank: range(1000 * rank, 1000 * rank + LABELED_ROWS),
}
KEYS, AVERAGES = ["attached", "detached"], ["sample", "class"]
# (dtype, keys, loss, kind of labels, average); with "kernel" by the kernel's own source, on the CPU
EQUAL_CASES = [
    *itertools.product([F64, F32], KEYS, ["nt_xent"], [None], [None]),
    *itertools.product([F64], KEYS, sorted(LABELED), ["balanced", "lonely"], AVERAGES),
    *itertools.product([F32], ["attached"], sorted(LABELED), ["lonely"], AVERAGES),
    *itertools.product([F32], KEYS, ["nt_xent"], [None], [None], ["kernel"]),
    *itertools.product([F32], KEYS, sorted(LABELED), ["lonely"], ["class"], ["kernel"]),
]
ZERO_CASES = [*itertools.product([F32], KEYS, sorted(LABELED), ["all_apart"], ["class"])]


def views_of(rank: int, dtype: torch.dtype = F64) -> torch.Tensor:
    """Return this rank's first views of its images, then its second views."""
    return draw(rank, 2 * IMAGES, dtype=dtype)


def rows_of(rank: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return draw(100 + rank, LABELED_ROWS, dtype=dtype)


def labels_of(kind: str, rank: int) -> torch.Tensor:
    return torch.tensor(list(LABELS[kind](rank)))


def scores_of(rank: int) -> torch.Tensor:
    return draw(200 + rank, CROPS * IMAGES, PROTOTYPES).tanh()


def run_case(case: tuple, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, keys, name, kind, average, *executor = case
    if executor:
        with on_the_host(contrast_kernel), pytest.MonkeyPatch.context() as patch:
            patch.setattr(contrast, "row_pass_for", lambda example: contrast_kernel.row_pass)
            return run_case(case[:-1], rank)
    options = {"keys": keys, "chunk_size": 5}
    if name == "nt_xent":
        return gradient(nt_xent, views_of(rank, dtype), TEMPERATURE, **options)
    rows, labels = rows_of(rank, dtype), labels_of(kind, rank)
    return gradient(LABELED[name], rows, labels, TEMPERATURE, average=average, **options)


def compute_everything(rank: int, world_size: int) -> dict:
    """Compute every case on one set of ranks, whose start costs seconds; different shapes are refused by all."""
    found = {str(case): run_case(case, rank) for case in EQUAL_CASES + ZERO_CASES}
    balanced = labels_of("balanced", rank)
    found["cross_entropy"] = gradient(cross_entropy, rows_of(rank), balanced)
    found["swav"] = gradient(swav, scores_of(rank), 0.1, crops=CROPS)
    found["codes"] = sinkhorn(scores_of(rank)[:IMAGES])
    found["no rows"] = gradient(suncet, torch.zeros(0, WIDTH), torch.zeros(0, dtype=torch.int64), TEMPERATURE)
    found["no images"] = gradient(nt_xent, torch.zeros(0, WIDTH), TEMPERATURE)

    more = int(rank == 1)
    refusals = {  # each call, which has another shape on rank 1, and the shapes that all ranks name
        "nt_xent": (lambda: nt_xent(views_of(rank)[: 4 + 2 * more], 0.1), "0: (4, 8), rank 1: (6, 8)"),
        "suncet": (lambda: suncet(rows_of(rank)[: 4 + more], balanced[: 4 + more], 0.1), "1: (5, 8)"),
        "cross_entropy": (lambda: cross_entropy(rows_of(rank)[:, : 4 + more], balanced), "1: (12, 5)"),
        "swav": (lambda: swav(scores_of(rank)[: 8 + 4 * more], 0.1, crops=4), "0: (8, 6), rank 1: (12, 6)"),
    }
    for name, (refused, shapes) in refusals.items():
        with pytest.raises(ValueError, match=f"^{name}: the shape of its input .*rank {re.escape(shapes)}"):
            refused()

    odd_ranks = torch.distributed.new_group(range(1, world_size, 2))
    if rank % 2:
        found["odd rows"] = gradient(suncet, rows_of(rank), balanced, TEMPERATURE, group=odd_ranks)
        found["odd views"] = gradient(nt_xent, views_of(rank), TEMPERATURE, group=odd_ranks)
        found["odd scores"] = gradient(swav, scores_of(rank), 0.1, crops=CROPS, group=odd_ranks)
    return found


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict]]:
    """Each rank's results, on two and on four ranks."""
    return {world_size: run_ranks(compute_everything, world_size) for world_size in (2, 4)}


worlds = pytest.mark.parametrize("world_size", [2, 4])


def joined(function, ranks, *arguments) -> torch.Tensor:
    """Join the rows of the ranks, rank by rank."""
    return torch.cat([function(*arguments, r) for r in ranks])


def assert_shares(found: list[tuple], expected: tuple, near: float, views: int = 0) -> None:
    """Require that the shares average to the loss, and the gradients over the world size are those of one process."""
    (loss, grad), ours = expected, torch.cat([each.double() for _, each in found]) / len(found)
    mean = torch.stack([each for each, _ in found]).double().mean()
    assert mean.item() == pytest.approx(loss.item(), rel=near)
    assert ((by_view(IMAGES, ours, views) if views else ours) - grad).norm() <= near * grad.norm()


@worlds
@pytest.mark.parametrize("case", EQUAL_CASES, ids=str)
def test_ranks_equal_one_process_on_the_joined_batch(results, world_size, case):
    dtype, keys, name, kind, average, *_ = case
    found, ranks = [each[str(case)] for each in results[world_size]], range(world_size)
    if name == "nt_xent":
        z = by_view(IMAGES, joined(views_of, ranks), 2)
        expected = gradient(dense_losses.nt_xent, z, TEMPERATURE, keys=keys)
        assert_shares(found, expected, NEAR[dtype], views=2)
    else:
        rows, labels = joined(rows_of, ranks), joined(labels_of, ranks, kind)
        dense = getattr(dense_losses, name)
        expected = gradient(dense, rows, labels, TEMPERATURE, keys=keys, average=average)
        assert_shares(found, expected, NEAR[dtype])


@worlds
def test_ranks_cross_entropy_and_swav_equal_one_process(results, world_size):
    ranks = range(world_size)
    rows, labels = joined(rows_of, ranks), joined(labels_of, ranks, "balanced")
    expected = gradient(torch.nn.functional.cross_entropy, rows, labels)
    assert_shares([each["cross_entropy"] for each in results[world_size]], expected, 1e-12)
    scores = by_view(IMAGES, joined(scores_of, ranks), CROPS)
    expected = gradient(dense_losses.swav, scores, 0.1, crops=CROPS)
    assert_shares([each["swav"] for each in results[world_size]], expected, 1e-11, views=CROPS)
    codes = torch.cat([each["codes"] for each in results[world_size]])
    expected = dense_losses.sinkhorn(scores[: world_size * IMAGES], 0.05, 3)
    torch.testing.assert_close(codes, expected, rtol=1e-12, atol=1e-14)


@worlds
def test_ranks_with_nothing_to_contrast_give_zero(results, world_size):
    for found in results[world_size]:
        for case in (*map(str, ZERO_CASES), "no rows", "no images"):
            assert found[case][0].item() == 0 and not found[case][1].any(), case


def test_ranks_of_a_group_contrast_only_its_rows(results):
    odd = [results[4][r] for r in (1, 3)]
    rows, labels = joined(rows_of, (1, 3)), joined(labels_of, (1, 3), "balanced")
    expected = gradient(dense_losses.suncet, rows, labels, TEMPERATURE)
    assert_shares([each["odd rows"] for each in odd], expected, 1e-12)
    expected = gradient(dense_losses.nt_xent, by_view(IMAGES, joined(views_of, (1, 3)), 2), TEMPERATURE)
    assert_shares([each["odd views"] for each in odd], expected, 1e-12, views=2)
    scores = by_view(IMAGES, joined(scores_of, (1, 3)), CROPS)
    expected = gradient(dense_losses.swav, scores, 0.1, crops=CROPS)
    assert_shares([each["odd scores"] for each in odd], expected, 1e-11, views=CROPS)


def authors_on_a_rank(rank: int, world_size: int, calls: dict) -> dict:
    return {
        name: gradient(loss, z[rank], *arguments, keys=keys)
        for name, (loss, z, arguments, keys) in calls.items()
    }


@pytest.mark.parametrize("version", [0, 1])
def test_ranks_have_the_authors_numbers(version):
    """Version 0 is their first code (5245e4a), whose SuNCEt accumulates in float32 for any input."""
    arrays, calls = vectors.load_vectors(f"vectors_losses_v{version}_w2"), {}
    labels = torch.from_numpy(arrays["labels_local"])
    losses = {"ntxent_tau{}_{}": (nt_xent, "zu", ()), "suncet_tau{}_sm0.0_{}": (suncet, "zs", (labels,))}
    for stem, temperature, precision in itertools.product(losses, ("0.1", "0.5"), ("f64", "f32")):
        loss, batch, arguments = losses[stem]
        # Their second code lets gradient through SuNCEt's keys and not through NT-Xent's.
        keys = "attached" if version == 1 and loss is suncet else "detached"
        z = torch.from_numpy(arrays[batch]).to(F64 if precision == "f64" else F32)
        calls[stem.format(temperature, precision)] = loss, z, (*arguments, float(temperature)), keys
    for rank, found in enumerate(run_ranks(authors_on_a_rank, 2, calls)):
        for case, (loss, grad) in found.items():
            exact = case.endswith("f64") and (version == 1 or case.startswith("ntxent"))
            near = 1e-12 if exact else 3e-6
            assert loss.item() == pytest.approx(float(arrays[f"rank{rank}_{case}_loss"]), rel=near), case
            expected = torch.from_numpy(arrays[f"rank{rank}_{case}_grad"]).double()
            assert (grad.double() - expected).norm() <= near * expected.norm(), case
