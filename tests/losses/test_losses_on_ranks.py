"""Losses on real ranks are those of one process on the joined batch: their values, and DDP's gradients."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from fastsuncet.losses import cross_entropy, nt_xent, suncet, sup_con
from tests.support import dense_losses, vectors
from tests.support.dense_losses import gradient
from tests.support.ranks import run_ranks

F32, F64 = torch.float32, torch.float64
NEAR = {F32: 1e-6, F64: 1e-13}
LABELED = {"suncet": suncet, "sup_con": sup_con}
DENSE = {"suncet": dense_losses.suncet, "sup_con": dense_losses.sup_con}
IMAGES, LABELED_ROWS, WIDTH = 5, 12, 8
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


# (dtype, keys, loss, kind of labels, average)
EQUAL_CASES = [
    *itertools.product([F64, F32], ["attached", "detached"], ["nt_xent"], [None], [None]),
    *itertools.product(
        [F64], ["attached", "detached"], sorted(LABELED), ["balanced", "lonely"], ["sample", "class"]
    ),
    *itertools.product([F32], ["attached"], sorted(LABELED), ["lonely"], ["sample", "class"]),
]
ZERO_CASES = list(
    itertools.product([F32], ["attached", "detached"], sorted(LABELED), ["all_apart"], ["class"])
)
CASES = EQUAL_CASES + ZERO_CASES


def _labels(kind: str, rank: int) -> torch.Tensor:
    return torch.tensor(list(LABELS[kind](rank)))


def _views(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """This rank's first views of its images, then its second views."""
    return torch.randn(
        2 * IMAGES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
    ).to(dtype)


def _rows(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(LABELED_ROWS, WIDTH, dtype=torch.float64, generator=generator).to(dtype)


def _network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, 6)).double()


def _step_loss(
    network: torch.nn.Module, views: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """One forward over both batches, as in training."""
    z_views, z_rows = network(torch.cat([views, rows])).split([len(views), len(rows)])
    class_loss = suncet(z_rows, labels, TEMPERATURE, average="class") + sup_con(z_rows, labels, TEMPERATURE)
    return nt_xent(z_views, TEMPERATURE) + class_loss + cross_entropy(z_rows, labels.abs() % 6)


def _compute_everything(rank: int, world_size: int, authors: dict[str, torch.Tensor]) -> dict:
    """Every case on one set of ranks: starting them costs seconds, a case costs nothing."""
    told = {}
    for case in CASES:
        dtype, keys, name, kind, average = case
        rows, settings = (
            (_views if name == "nt_xent" else _rows)(rank, dtype),
            {"keys": keys, "chunk_size": 5},
        )
        if name == "nt_xent":
            told[str(case)] = gradient(nt_xent, rows, TEMPERATURE, **settings)
        else:
            labels = _labels(kind, rank)
            told[str(case)] = gradient(LABELED[name], rows, labels, TEMPERATURE, average=average, **settings)
    told["cross_entropy"] = gradient(cross_entropy, _rows(rank), _labels("balanced", rank))
    told["no rows"] = gradient(suncet, torch.zeros(0, WIDTH), torch.zeros(0, dtype=torch.int64), TEMPERATURE)
    told["no images"] = gradient(nt_xent, torch.zeros(0, WIDTH), TEMPERATURE)

    network = DistributedDataParallel(_network())
    loss = _step_loss(network, _views(rank), _rows(rank), _labels("lonely", rank))
    loss.backward()
    told["step"] = (loss.detach(), torch.cat([p.grad.flatten() for p in network.parameters()]))

    refusals = {
        "nt_xent": lambda: nt_xent(_views(rank)[: 4 + 2 * (rank == 1)], TEMPERATURE),
        "suncet": lambda: suncet(_rows(rank)[: 4 + rank], _labels("balanced", rank)[: 4 + rank], TEMPERATURE),
        "cross_entropy": lambda: cross_entropy(_rows(rank)[:, : 4 + rank], _labels("balanced", rank)),
    }
    for name, call in refusals.items():
        with pytest.raises(ValueError) as refusal:
            call()
        told[f"refusal of {name}"] = str(refusal.value)

    odd_ranks = torch.distributed.new_group(range(1, world_size, 2))
    if rank % 2:
        labels = _labels("balanced", rank)
        told["odd rows"] = gradient(suncet, _rows(rank), labels, TEMPERATURE, group=odd_ranks)
        told["odd views"] = gradient(nt_xent, _views(rank), TEMPERATURE, group=odd_ranks)

    for name, (z, labels, temperature, keys) in authors.items():
        if labels is None:
            told[name] = gradient(nt_xent, z[rank], temperature, keys=keys)
        else:
            told[name] = gradient(suncet, z[rank], labels, temperature, keys=keys)
    return told


def _authors_cases() -> tuple[dict, dict]:
    """Inputs, and each rank's (loss, gradient), of the authors' two codes on two ranks; none without them."""
    inputs, numbers = {}, {}
    for version in (0, 1):
        if not (vectors.FOLDER / f"vectors_losses_v{version}_w2.npz").exists():
            continue
        arrays = vectors.load_vectors(f"vectors_losses_v{version}_w2")
        for precision, dtype in (("f64", torch.float64), ("f32", torch.float32)):
            for temperature in ("0.1", "0.5"):
                for loss, batch, suffix in (("ntxent", "zu", ""), ("suncet", "zs", "_sm0.0")):
                    case = f"v{version} {loss} {temperature} {precision}"
                    labels = torch.from_numpy(arrays["labels_local"]) if loss == "suncet" else None
                    # Their second code lets gradient through SuNCEt's keys and not through NT-Xent's.
                    keys = "attached" if version == 1 and loss == "suncet" else "detached"
                    inputs[case] = (
                        torch.from_numpy(arrays[batch]).to(dtype),
                        labels,
                        float(temperature),
                        keys,
                    )
                    stem = f"{loss}_tau{temperature}{suffix}_{precision}"
                    numbers[case] = [
                        (
                            float(arrays[f"rank{r}_{stem}_loss"]),
                            arrays[f"rank{r}_{stem}_grad"].astype(np.float64),
                        )
                        for r in range(2)
                    ]
    return inputs, numbers


@pytest.fixture(scope="module")
def told_by() -> dict[int, list[dict]]:
    return {
        2: run_ranks(_compute_everything, 2, _authors_cases()[0]),
        4: run_ranks(_compute_everything, 4, {}),
    }


worlds = pytest.mark.parametrize("world_size", [2, 4])


def _joined_views(world_size: int) -> torch.Tensor:
    """One process has all first views and then all second views."""
    blocks = torch.stack([_views(r) for r in range(world_size)]).view(world_size, 2, IMAGES, WIDTH)
    return blocks.transpose(0, 1).reshape(-1, WIDTH)


def _by_rank(grad: torch.Tensor, world_size: int) -> torch.Tensor:
    """The gradient of the joined views, back in the order in which the ranks have them."""
    return grad.view(2, world_size, IMAGES, WIDTH).transpose(0, 1).reshape(world_size, 2 * IMAGES, WIDTH)


def _joined_rows(world_size: int) -> torch.Tensor:
    return torch.cat([_rows(r) for r in range(world_size)])


def _joined_labels(kind: str, world_size: int) -> torch.Tensor:
    return torch.cat([_labels(kind, r) for r in range(world_size)])


def _assert_same(
    told: list[tuple[torch.Tensor, torch.Tensor]], loss: torch.Tensor, grad: torch.Tensor, near: float
):
    """The mean over ranks of the shares is `loss`; each rank's gradient over the world size is its part of `grad`."""
    assert torch.stack([each for each, _ in told]).double().mean().item() == pytest.approx(
        loss.item(), rel=near
    )
    ours = torch.stack([each.double() for _, each in told]) / len(told)
    assert (ours - grad.view_as(ours)).norm() <= near * grad.norm()


@worlds
@pytest.mark.parametrize("case", EQUAL_CASES, ids=str)
def test_ranks_equal_one_process_on_the_joined_batch(told_by, world_size, case):
    dtype, keys, name, kind, average = case
    if name == "nt_xent":
        loss, grad = gradient(dense_losses.nt_xent, _joined_views(world_size), TEMPERATURE, keys=keys)
        grad = _by_rank(grad, world_size)
    else:
        rows, labels = _joined_rows(world_size), _joined_labels(kind, world_size)
        loss, grad = gradient(DENSE[name], rows, labels, TEMPERATURE, keys=keys, average=average)
    _assert_same([told[str(case)] for told in told_by[world_size]], loss, grad, NEAR[dtype])


def test_a_rank_without_an_anchor_has_no_share_but_its_rows_are_keys(told_by):
    loss, grad = told_by[4][3][str((F64, "attached", "suncet", "lonely", "sample"))]
    assert loss.item() == 0 and grad.any()
    loss, grad = told_by[4][3][str((F64, "detached", "suncet", "lonely", "sample"))]
    assert loss.item() == 0 and not grad.any()


@worlds
def test_a_balanced_share_is_the_mean_over_this_ranks_anchors(told_by, world_size):
    rows, labels = _joined_rows(world_size), _joined_labels("balanced", world_size)
    exps = torch.exp(dense_losses.cosines(rows) / TEMPERATURE).fill_diagonal_(0)
    losses = -torch.log((exps * (labels[:, None] == labels)).sum(1) / exps.sum(1)).view(
        world_size, LABELED_ROWS
    )
    for r, told in enumerate(told_by[world_size]):
        share = told[str((F64, "attached", "suncet", "balanced", "sample"))][0]
        assert share.item() == pytest.approx(losses[r].mean().item(), rel=1e-13)


@worlds
def test_nothing_to_contrast_on_any_rank_is_zero_with_a_zero_gradient(told_by, world_size):
    for told in told_by[world_size]:
        for case, (loss, grad) in (
            (c, told[c]) for c in told if "all_apart" in c or c in ("no rows", "no images")
        ):
            assert loss.item() == 0 and not grad.any(), case


@worlds
def test_cross_entropy_on_ranks_equals_one_process_on_the_joined_batch(told_by, world_size):
    rows, labels = _joined_rows(world_size), _joined_labels("balanced", world_size)
    loss, grad = gradient(torch.nn.functional.cross_entropy, rows, labels)
    _assert_same([told["cross_entropy"] for told in told_by[world_size]], loss, grad, 1e-13)


@worlds
def test_ddp_gives_a_network_the_gradient_of_one_process(told_by, world_size):
    network = _network()
    rows, labels = _joined_rows(world_size), _joined_labels("lonely", world_size)
    loss = _step_loss(network, _joined_views(world_size), rows, labels)
    loss.backward()
    grad = torch.cat([p.grad.flatten() for p in network.parameters()])
    shares = torch.stack([told["step"][0] for told in told_by[world_size]])
    assert shares.mean().item() == pytest.approx(loss.item(), rel=1e-13)
    for told in told_by[world_size]:
        assert (told["step"][1] - grad).norm() <= 1e-13 * grad.norm()


@worlds
def test_ranks_with_different_shapes_are_all_told_so(told_by, world_size):
    for told in told_by[world_size]:
        for name, two in (
            ("nt_xent", "rank 0: (4, 8), rank 1: (6, 8)"),
            ("suncet", "rank 0: (4, 8), rank 1: (5, 8)"),
            ("cross_entropy", "rank 0: (12, 4), rank 1: (12, 5)"),
        ):
            assert told[f"refusal of {name}"].startswith(f"{name}: the shape of its input")
            assert two in told[f"refusal of {name}"]


def test_a_group_contrasts_its_own_ranks_only(told_by):
    rows, labels = torch.cat([_rows(1), _rows(3)]), _joined_labels("balanced", 2)
    loss, grad = gradient(dense_losses.suncet, rows, labels, TEMPERATURE)
    _assert_same([told_by[4][r]["odd rows"] for r in (1, 3)], loss, grad, 1e-13)
    views = torch.stack([_views(1), _views(3)]).view(2, 2, IMAGES, WIDTH).transpose(0, 1)
    loss, grad = gradient(dense_losses.nt_xent, views.reshape(-1, WIDTH), TEMPERATURE)
    _assert_same([told_by[4][r]["odd views"] for r in (1, 3)], loss, _by_rank(grad, 2), 1e-13)


@pytest.mark.parametrize("version", [0, 1])
def test_two_ranks_give_the_numbers_of_the_authors_code(told_by, version):
    """Version 0 is their first code (5245e4a), whose SuNCEt accumulates in float32 whatever it is given."""
    vectors.load_vectors(f"vectors_losses_v{version}_w2")
    _, numbers = _authors_cases()
    cases = [case for case in numbers if case.startswith(f"v{version}")]
    assert len(cases) == 8
    for case in cases:
        exact = case.endswith("f64") and not case.startswith("v0 suncet")
        for r in range(2):
            (loss, grad), (true_loss, true_grad) = told_by[2][r][case], numbers[case][r]
            near = 1e-13 if exact else 1e-6
            assert loss.item() == pytest.approx(true_loss, rel=near), case
            truth = torch.from_numpy(true_grad)
            assert (grad.double() - truth).norm() <= near * truth.norm(), case
