"""The losses where there is little to contrast, where numbers are extreme, and where the call itself is wrong."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastsuncet.losses import cross_entropy, nt_xent, suncet, sup_con
from tests.support import dense_losses
from tests.support.dense_losses import gradient, labeled_batch

LABELED = {"suncet": suncet, "sup_con": sup_con}


# Edges


@pytest.mark.parametrize("name", sorted(LABELED))
@pytest.mark.parametrize("average", ["sample", "class"])
def test_anchors_without_a_positive_are_left_out_of_the_mean_but_stay_keys(name, average):
    z, _ = labeled_batch(rows=7)
    labels = torch.tensor([4, 4, -1, 9, 9, 9, 123])  # -1 and 123 stand alone
    loss, grad = gradient(LABELED[name], z, labels, 0.2, average=average)
    true_loss, true_grad = gradient(getattr(dense_losses, name), z, labels, 0.2, average=average)
    torch.testing.assert_close(loss, true_loss)
    torch.testing.assert_close(grad, true_grad)
    assert grad[2].abs().sum() > 0 and grad[6].abs().sum() > 0
    _, grad = gradient(LABELED[name], z, labels, 0.2, average=average, keys="detached")
    assert not grad[2].any() and not grad[6].any()


@pytest.mark.parametrize("name", sorted(LABELED))
@pytest.mark.parametrize("average", ["sample", "class"])
@pytest.mark.parametrize("keys", ["attached", "detached"])
@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_no_anchor_at_all_is_zero_with_a_zero_gradient(name, average, keys, rows):
    z, _ = labeled_batch(rows=rows, dtype=torch.float32)
    z.requires_grad_()
    loss = LABELED[name](z, torch.arange(rows), 0.1, average=average, keys=keys)
    loss.backward()
    assert loss.item() == 0 and loss.shape == ()
    assert z.grad.shape == z.shape and not z.grad.any()


def test_no_image_is_zero_for_the_other_losses_too():
    for loss, arguments in ((nt_xent, (0.1,)), (cross_entropy, (torch.zeros(0, dtype=torch.int64),))):
        value, grad = gradient(loss, torch.zeros(0, 5), *arguments)
        assert value.item() == 0 and grad.shape == (0, 5)


def test_one_class_alone_has_nothing_to_tell_apart():
    z, _ = labeled_batch(rows=8)
    loss, grad = gradient(suncet, z, torch.full((8,), -3), 0.1)
    assert abs(loss.item()) < 1e-14 and grad.abs().max() < 1e-13


def test_one_image_alone_has_nothing_to_be_told_from():
    loss, grad = gradient(nt_xent, labeled_batch(rows=2)[0], 0.1)
    assert loss.item() == 0 and not grad.any()


def test_minus_one_is_a_label_like_any_other():
    z, _ = labeled_batch(rows=6)
    with_minus_one = suncet(z, torch.tensor([-1, -1, -1, 5, 5, 5]), 0.1)
    assert torch.equal(with_minus_one, suncet(z, torch.tensor([1, 1, 1, 5, 5, 5]), 0.1))


def test_identical_rows_are_told_apart_only_by_chance():
    """All cosines are 1, so an anchor finds a positive with probability (positives) / (others)."""
    z = torch.ones(12, 4, dtype=torch.float64)
    for temperature in (0.01, 0.1, 10.0):
        assert nt_xent(z, temperature).item() == pytest.approx(math.log(11), rel=1e-6)
        labels = torch.arange(12) % 3
        assert suncet(z, labels, temperature).item() == pytest.approx(math.log(11 / 3), rel=1e-6)
        assert sup_con(z, labels, temperature).item() == pytest.approx(math.log(11), rel=1e-6)


@pytest.mark.parametrize("temperature", [0.001, 0.01, 10.0, 1e4])
def test_opposite_rows_are_finite_at_any_temperature(temperature):
    """At 0.001 the positives' exponentials are e^-2000 of the largest: only their own maximum saves them."""
    z = torch.tensor([[1.0, 0.0], [1.0, 1e-3], [-1.0, 0.0], [-1.0, 1e-3]])
    expected = 2 / temperature + math.log1p(2 * math.exp(-2 / temperature))
    for labels_or_none in (None, torch.tensor([0, 1, 0, 1])):
        arguments = (temperature,) if labels_or_none is None else (labels_or_none, temperature)
        loss, grad = gradient(nt_xent if labels_or_none is None else suncet, z, *arguments)
        assert loss.item() == pytest.approx(expected, rel=1e-3)
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_numbers_and_zeros_of_every_dtype_stay_finite(dtype):
    z, labels = labeled_batch(rows=16, width=8, classes=4)
    z = z.clamp(-1, 1).to(dtype)
    z[:4] *= torch.finfo(dtype).max
    z[4:6] = 0
    for loss, arguments in ((nt_xent, (0.1,)), (suncet, (labels, 0.1)), (sup_con, (labels, 0.1))):
        value, grad = gradient(loss, z, *arguments)
        assert value.isfinite() and grad.isfinite().all()
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert grad.dtype == dtype


def test_a_row_without_a_direction_moves_nothing_and_asks_for_nothing():
    z, labels = labeled_batch(rows=6)
    z[2] = 0
    loss, grad = gradient(suncet, z, labels, 0.1)
    assert loss.isfinite() and not grad[2].any() and grad[0].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_a_number_is_not_hidden(bad):
    z, labels = labeled_batch(rows=6, classes=2)
    z[1, 0] = bad
    assert nt_xent(z, 0.1).isnan() and suncet(z, labels, 0.1).isnan() and sup_con(z, labels, 0.1).isnan()


# Gradient as autograd sees it


def test_backward_scales_by_what_it_is_given_and_may_run_again():
    z, labels = labeled_batch()
    for loss in (lambda z: nt_xent(z, 0.1), lambda z: suncet(z, labels, 0.1)):
        z = z.detach().clone().requires_grad_()
        value = loss(z)
        (once,) = torch.autograd.grad(value, z, retain_graph=True)
        (scaled,) = torch.autograd.grad(-2.5 * value, z)
        torch.testing.assert_close(scaled, -2.5 * once)


def test_a_second_derivative_is_refused_rather_than_wrong():
    z, _ = labeled_batch()
    z.requires_grad_()
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(nt_xent(z, 0.1), z, create_graph=True)


def test_no_gradient_is_prepared_where_none_is_wanted():
    z, labels = labeled_batch()
    with torch.no_grad():
        assert not suncet(z.requires_grad_(), labels, 0.1).requires_grad
    assert not nt_xent(z.detach(), 0.1).requires_grad


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_nothing_waits_for_the_device(device):
    """Fake tensors have no values: to read one, or to make a shape of one, raises. Nor do they mix devices.

    So what runs here can be queued ahead of the device, and captured in a CUDA graph. Backward needs a real
    CUDA context even for fake tensors, so it is shown on the CPU's.
    """
    with FakeTensorMode(allow_non_fake_inputs=False):
        z = torch.randn(600, 8, device=device, requires_grad=True)
        labels = torch.zeros(600, dtype=torch.int64, device=device)
        for keys in ("attached", "detached"):
            losses = [nt_xent(z, 0.1, keys=keys), cross_entropy(z, labels)]
            for loss in LABELED.values():
                losses += [loss(z, labels, 0.1, average=each, keys=keys) for each in ("sample", "class")]
            if device == "cpu":
                torch.stack(losses).sum().backward()


def test_shapes_alone_are_enough_so_that_flops_can_be_counted_on_the_meta_device():
    z = torch.empty(600, 8, device="meta", requires_grad=True)
    labels = torch.empty(600, dtype=torch.int64, device="meta")
    (nt_xent(z, 0.1) + suncet(z, labels, 0.1)).backward()
    assert z.grad.shape == z.shape


# What a person is told


Z, Y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: nt_xent(torch.zeros(5, 3), 0.1), r"nt_xent: .*first views of B images.*it has 5 rows"),
        (lambda: nt_xent(torch.zeros(2, 2, 3), 0.1), r"nt_xent: z must be \(rows, width\).*\(2, 2, 3\)"),
        (lambda: nt_xent(torch.tensor(1.0), 0.1), r"nt_xent: z must be \(rows, width\).*\(\)"),
        (lambda: suncet(torch.zeros(4, 3).long(), Y, 0.1), r"suncet: z must be .*floating.*torch.int64"),
        (lambda: suncet(Z, Y[:3], 0.1), r"suncet: labels must be one integer a row, \(4,\), not \(3,\)"),
        (lambda: suncet(Z, Y[:, None], 0.1), r"suncet: labels must be one integer a row"),
        (lambda: sup_con(Z, Y.float(), 0.1), r"sup_con: labels must be integers.*float32; use .long\(\)"),
        (lambda: suncet(Z, Y.bool(), 0.1), r"suncet: labels must be integers, not torch.bool"),
        (lambda: suncet(Z, Y.to("meta"), 0.1), r"suncet: labels are on meta, the rows on cpu"),
        (
            lambda: suncet(Z, Y, 0.1, average="all"),
            r"average must be one of \('sample', 'class'\), not 'all'",
        ),
        (lambda: nt_xent(Z, 0.1, keys="on"), r"keys must be one of \('attached', 'detached'\), not 'on'"),
        (lambda: nt_xent(Z, 0.1, chunk_size=0), r"nt_xent: chunk_size must be at least 1"),
        (lambda: cross_entropy(Z[0], Y), r"cross_entropy: logits must be \(rows, classes\)"),
        (lambda: cross_entropy(Z, Y.float()), r"cross_entropy: labels must be integers"),
        *[
            (lambda t=t: suncet(Z, Y, t), r"suncet: temperature must be a plain number above 0")
            for t in (0, -0.1, math.nan, math.inf, "0.1", None, torch.tensor(0.1))
        ],
    ],
)
def test_what_cannot_be_contrasted_is_refused_in_words(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_no_class_number_is_passed_over_in_silence():
    with pytest.raises(IndexError):
        cross_entropy(Z, torch.full((4,), -100))
