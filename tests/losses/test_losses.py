"""The chunked losses are the paper's equations: held to dense float64 autograd and the authors' numbers.

What they do with little to contrast, with extreme numbers and with a wrong call is in test_losses_edges.py.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsuncet.losses import cross_entropy, nt_xent, suncet, sup_con
from fastsuncet.losses.contrast_symmetric import COLDEST
from tests.support import dense_losses
from tests.support.dense_losses import gradient, labeled_batch
from tests.support.vectors import load_vectors

LABELED = {"suncet": suncet, "sup_con": sup_con}
INT64 = torch.iinfo(torch.int64)

temperatures = st.floats(math.log(0.01), math.log(10)).map(math.exp)
batches = st.builds(
    lambda rows, width, classes, seed: (
        torch.randn(rows, width, dtype=torch.float64, generator=(g := torch.Generator().manual_seed(seed))),
        torch.randint(-classes, classes, (rows,), generator=g),
    ),
    rows=st.integers(1, 24),
    width=st.integers(1, 9),
    classes=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)


def _relative(value: torch.Tensor, truth: torch.Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm()).item()


# The equations


def test_suncet_is_equation_2_read_aloud_anchor_by_anchor():
    z, labels = labeled_batch(rows=9, classes=3)
    temperature = 0.3
    losses = []
    for i in range(9):
        cosines = [torch.cosine_similarity(z[i], z[j], dim=0).item() for j in range(9)]
        similar = [math.exp(cosine / temperature) for cosine in cosines]
        positives = [similar[j] for j in range(9) if j != i and labels[j] == labels[i]]
        others = [similar[j] for j in range(9) if j != i]
        if positives:
            losses.append(-math.log(sum(positives) / sum(others)))
    assert suncet(z, labels, temperature).item() == pytest.approx(sum(losses) / len(losses), rel=1e-14)
    assert dense_losses.suncet(z, labels, temperature).item() == pytest.approx(
        sum(losses) / len(losses), rel=1e-14
    )


@settings(max_examples=60, deadline=None)
@given(batches, temperatures, st.integers(1, 30), st.sampled_from(["attached", "detached"]))
def test_nt_xent_is_the_dense_equation_for_any_batch_and_chunk(batch, temperature, chunk_size, keys):
    z = torch.cat([batch[0], batch[0].flip(0).roll(1, dims=1) + 0.1])
    loss, grad = gradient(nt_xent, z, temperature, keys=keys, chunk_size=chunk_size)
    true_loss, true_grad = gradient(dense_losses.nt_xent, z, temperature, keys=keys)
    torch.testing.assert_close(loss, true_loss, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(grad, true_grad, rtol=1e-9, atol=1e-9 / temperature)


@settings(max_examples=100, deadline=None)
@given(
    batches,
    temperatures,
    st.integers(1, 30),
    st.sampled_from(["attached", "detached"]),
    st.sampled_from(["sample", "class"]),
    st.sampled_from(sorted(LABELED)),
)
def test_labeled_losses_are_the_dense_equations_for_any_batch_and_chunk(
    batch, temperature, chunk_size, keys, average, name
):
    z, labels = batch
    loss, grad = gradient(
        LABELED[name], z, labels, temperature, keys=keys, average=average, chunk_size=chunk_size
    )
    if len(set(labels.tolist())) == len(labels):
        assert loss.item() == 0 and not grad.any()
        return
    truth = getattr(dense_losses, name)
    true_loss, true_grad = gradient(truth, z, labels, temperature, keys=keys, average=average)
    torch.testing.assert_close(loss, true_loss, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(grad, true_grad, rtol=1e-9, atol=1e-9 / temperature)


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_float32_loss_and_gradient_are_the_dense_float64_ones_to_a_millionth(temperature):
    z, labels = labeled_batch(rows=640, width=128, classes=40, dtype=torch.float32)
    for chunked, dense, arguments in (
        (nt_xent, dense_losses.nt_xent, (temperature,)),
        (suncet, dense_losses.suncet, (labels, temperature)),
        (sup_con, dense_losses.sup_con, (labels, temperature)),
    ):
        loss, grad = gradient(chunked, z, *arguments)
        true_loss, true_grad = gradient(dense, z.double(), *arguments)
        assert loss.dtype == grad.dtype == torch.float32
        assert loss.item() == pytest.approx(true_loss.item(), rel=1e-6)
        assert _relative(grad, true_grad) < 1e-6


def test_gradients_are_the_slopes_of_the_values():
    z, labels = labeled_batch(rows=10, width=4, classes=3)
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: nt_xent(z, 0.2, chunk_size=3), z)
    for loss in LABELED.values():
        for average in ("sample", "class"):
            assert torch.autograd.gradcheck(lambda z: loss(z, labels, 0.2, average=average, chunk_size=3), z)  # noqa: B023


def test_averages_differ_only_where_classes_differ_in_size():
    z, _ = labeled_batch(rows=12)
    balanced = torch.arange(12) % 3
    lopsided = torch.tensor([0] * 6 + [1] * 4 + [2] * 2)
    for loss in LABELED.values():
        by_sample, by_class = (loss(z, balanced, 0.1, average=each).item() for each in ("sample", "class"))
        assert by_sample == pytest.approx(by_class, rel=1e-14)
        by_sample, by_class = (loss(z, lopsided, 0.1, average=each).item() for each in ("sample", "class"))
        assert abs(by_sample - by_class) > 1e-3


def test_cross_entropy_is_the_mean_that_torch_computes():
    logits, labels = labeled_batch(rows=12, width=7, dtype=torch.float32)
    loss, grad = gradient(cross_entropy, logits, labels)
    true_loss, true_grad = gradient(torch.nn.functional.cross_entropy, logits.double(), labels)
    assert loss.item() == pytest.approx(true_loss.item(), rel=1e-6)
    assert _relative(grad, true_grad) < 1e-6
    assert torch.equal(
        cross_entropy(logits.bfloat16(), labels.int()), cross_entropy(logits.bfloat16().float(), labels)
    )


@pytest.mark.parametrize("temperature", [COLDEST / 1.0001, COLDEST, COLDEST * 1.0001])
def test_the_sweep_of_a_process_alone_ends_where_float32_does(temperature):
    """At its coldest, rows that look away from everything still have exponentials to tell apart, e^-80."""
    z = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    z[:20, 0], z[20:, 0] = z[:20, 0].abs() + 9, -z[20:, 0].abs() - 9
    labels = torch.arange(40) % 20  # every positive is on the other side
    for loss, truth, arguments in (
        (nt_xent, dense_losses.nt_xent, (temperature,)),
        (suncet, dense_losses.suncet, (labels, temperature)),
    ):
        value, grad = gradient(loss, z, *arguments)
        true_value, true_grad = gradient(truth, z.double(), *arguments)
        assert value.item() == pytest.approx(true_value.item(), rel=1e-6) and value > 70
        assert _relative(grad, true_grad) < 3e-6


@pytest.mark.parametrize("loss", ["nt_xent", "suncet"])
def test_a_process_alone_meets_each_pair_once_and_gets_the_same(loss, monkeypatch):
    z, labels = labeled_batch(rows=300, width=32, dtype=torch.float32)
    arguments = (0.1,) if loss == "nt_xent" else (labels, 0.1)
    chunked, dense = globals()[loss], getattr(dense_losses, loss)
    pairs = gradient(chunked, z, *arguments)
    monkeypatch.setattr("fastsuncet.losses.contrast.COLDEST", math.inf)
    general = gradient(chunked, z, *arguments)
    assert not torch.equal(pairs[1], general[1]), "both went the same way"
    true_loss, true_grad = gradient(dense, z.double(), *arguments)
    for value, grad in (pairs, general):
        assert value.item() == pytest.approx(true_loss.item(), rel=1e-6)
        assert _relative(grad, true_grad) < 1e-6


# The authors' numbers


def _authors_case(version: int, loss: str, precision: str, temperature: str) -> tuple:
    arrays = load_vectors(f"vectors_losses_v{version}_w1")
    z = torch.from_numpy(arrays["zu" if loss == "ntxent" else "zs"][0])
    smoothing = "" if loss == "ntxent" else "_sm0.0"
    name = f"rank0_{loss}_tau{temperature}{smoothing}_{precision}"
    z = z.to(torch.float64 if precision == "f64" else torch.float32)
    true_loss, true_grad = float(arrays[f"{name}_loss"]), torch.from_numpy(arrays[f"{name}_grad"]).double()
    return z, torch.from_numpy(arrays["labels_local"]), true_loss, true_grad


@pytest.mark.parametrize("temperature", ["0.1", "0.5"])
@pytest.mark.parametrize("precision", ["f64", "f32"])
@pytest.mark.parametrize("version", [0, 1])
def test_one_process_gives_the_numbers_of_the_authors_code(version, precision, temperature):
    """Version 0 is their first code (5245e4a), whose SuNCEt accumulates in float32 whatever it is given."""
    z, _, true_loss, true_grad = _authors_case(version, "ntxent", precision, temperature)
    keys = ("attached", "detached")[version]
    loss, grad = gradient(nt_xent, z, float(temperature), keys=keys)
    near = 1e-13 if precision == "f64" else 1e-6
    assert loss.item() == pytest.approx(true_loss, rel=near)
    assert _relative(grad, true_grad) < near

    z, labels, true_loss, true_grad = _authors_case(version, "suncet", precision, temperature)
    near = 1e-13 if precision == "f64" and version == 1 else 1e-6
    for average in ("sample", "class"):
        loss, grad = gradient(suncet, z, labels, float(temperature), average=average)
        assert loss.item() == pytest.approx(true_loss, rel=near)
        assert _relative(grad, true_grad) < near


def test_sup_con_gives_the_numbers_of_its_authors_code():
    arrays = load_vectors("vectors_supcon")
    z, labels = torch.from_numpy(arrays["z"]), torch.from_numpy(arrays["y"])
    for temperature in ("0.1", "0.5"):
        name = f"supcon_HEAD_tau{temperature}_base{temperature}"
        loss, grad = gradient(sup_con, z.float(), labels, float(temperature))
        assert loss.item() == pytest.approx(float(arrays[f"{name}_loss"]), rel=1e-6)
        assert _relative(grad, torch.from_numpy(arrays[f"{name}_grad"]).double()) < 1e-6
    formula = float(arrays["Lsupout_formula_selfexcluded_tau0.1"])
    assert sup_con(z, labels, 0.1).item() == pytest.approx(formula, rel=1e-13)
    # Their two-view layout is view 0 of all images, then view 1 of all.
    views = torch.from_numpy(np.concatenate([arrays["zview"][:, 0], arrays["zview"][:, 1]]))
    two_views = sup_con(views, torch.from_numpy(arrays["yview"]).repeat(2), 0.1)
    assert two_views.item() == pytest.approx(float(arrays["supcon_2view_HEAD_tau0.1_loss"]), rel=1e-6)


# What must not matter


@settings(max_examples=40, deadline=None)
@given(batches, temperatures, st.randoms(use_true_random=False), st.sampled_from(sorted(LABELED)))
def test_neither_row_order_nor_class_names_nor_lengths_matter(batch, temperature, random, name):
    z, labels = batch
    loss, grad = gradient(LABELED[name], z, labels, temperature)
    order = torch.tensor(random.sample(range(len(z)), len(z)))
    moved_loss, moved_grad = gradient(LABELED[name], z[order], labels[order], temperature)
    torch.testing.assert_close(moved_loss, loss, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(moved_grad, grad[order], rtol=1e-9, atol=1e-9 / temperature)

    names = sorted(set(labels.tolist()))
    new_names = random.sample(
        [INT64.min, INT64.min + 1, -(2**53) - 1, -(2**53), -1, 0, 2**31, 2**53, 2**53 + 1]
        + [INT64.max - k for k in range(10)],
        len(names),
    )
    renamed = torch.tensor([new_names[names.index(each)] for each in labels.tolist()])
    assert torch.equal(LABELED[name](z, renamed, temperature), loss)

    longer_loss, longer_grad = gradient(LABELED[name], 7 * z, labels, temperature)
    torch.testing.assert_close(longer_loss, loss, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(7 * longer_grad, grad, rtol=1e-9, atol=1e-9 / temperature)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 299, 300, 10_000])
def test_chunk_size_changes_nothing_beyond_rounding(chunk_size):
    z, labels = labeled_batch(rows=300, width=32, dtype=torch.float32)
    for loss, arguments in ((nt_xent, (0.1,)), (suncet, (labels, 0.1)), (sup_con, (labels, 0.1))):
        value, grad = gradient(loss, z, *arguments)
        chunked_value, chunked_grad = gradient(loss, z, *arguments, chunk_size=chunk_size)
        assert chunked_value.item() == pytest.approx(value.item(), rel=1e-6)
        assert _relative(chunked_grad, grad.double()) < 1e-6


def test_the_same_batch_gives_the_same_bits_again():
    z, labels = labeled_batch(rows=300, width=32, dtype=torch.float32)
    for loss, arguments in ((nt_xent, (0.1,)), (suncet, (labels, 0.1)), (sup_con, (labels, 0.1))):
        once, again = gradient(loss, z, *arguments), gradient(loss, z, *arguments)
        assert torch.equal(once[0], again[0]) and torch.equal(once[1], again[1])


def test_integers_of_every_width_label_alike():
    z, labels = labeled_batch()
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        assert torch.equal(suncet(z, labels.to(dtype), 0.1), suncet(z, labels, 0.1))


def test_autocast_does_not_reach_into_a_loss():
    z, labels = labeled_batch(rows=64, width=32, dtype=torch.float32)

    def losses() -> tuple[torch.Tensor, ...]:
        return nt_xent(z, 0.1), suncet(z, labels, 0.1), sup_con(z, labels, 0.1), cross_entropy(z, labels)

    outside = losses()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = losses()
    for one, other in zip(outside, inside, strict=True):
        assert one.dtype == other.dtype == torch.float32 and torch.equal(one, other)


def test_inputs_are_left_as_they_were():
    z, labels = labeled_batch()
    before = z.clone(), labels.clone()
    gradient(nt_xent, z, 0.1)
    gradient(suncet, z, labels, 0.1)
    assert torch.equal(z, before[0]) and torch.equal(labels, before[1])
