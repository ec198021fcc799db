"""What holds for every loss: float32 under autocast and of 16 bits, the same bits again, and inputs left alone.

Calls that cannot be computed are refused; each message begins with the loss and names what it was given.
"""

import math

import numpy as np
import pytest
import torch

from fastsuncet import cross_entropy, nt_xent, paws, suncet, sup_con, swav
from fastsuncet.losses.swav import prototype_scores

F32, F64 = torch.float32, torch.float64


def draw(rows: int) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))


LABELS, OTHERS = torch.arange(300) % 7, draw(40)
CALLS = {
    "nt_xent": lambda z: nt_xent(z, 0.1),
    "suncet": lambda z: suncet(z, LABELS[: len(z)], 0.1),
    "sup_con": lambda z: sup_con(z, LABELS[: len(z)], 0.1),
    "cross_entropy": lambda z: cross_entropy(z, LABELS[: len(z)].int()),
    "swav": lambda z: swav(z, 5.0, crops=4, epsilon=2.0),
    "paws": lambda z: sum(paws(z, others(z), LABELS[:40], z.detach()[: len(z) // 2], others(z), views=4)),
    "prototype_scores": lambda z: prototype_scores(z, OTHERS).square().mean(),
}
every_loss = pytest.mark.parametrize("name", CALLS)


def value_and_gradient(
    name: str, z: torch.Tensor, autocast: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    z = z.detach().requires_grad_()  # no copy: what is written into it would show
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = CALLS[name](z)
    value.backward()
    return value.detach(), z.grad


def others(z: torch.Tensor) -> torch.Tensor:
    return OTHERS.double() if z.dtype == torch.float64 else OTHERS


@every_loss
def test_loss_repeats_its_bits_also_under_autocast_and_leaves_its_inputs(name):
    z, before = draw(300), [x.clone() for x in (draw(300), LABELS, OTHERS)]
    once, again = (value_and_gradient(name, z, autocast) for autocast in (False, True))
    assert {x.dtype for x in (*once, *again)} == {torch.float32}
    assert all(map(torch.equal, once, again)) and once[1].any()
    assert all(map(torch.equal, (z, LABELS, OTHERS), before))


@every_loss
def test_loss_of_16_bits_is_that_of_the_same_numbers_in_float32(name):
    z = draw(300).half()
    (found, grad), (value, slope) = (value_and_gradient(name, x) for x in (z, z.float()))
    assert found.dtype == torch.float32 and torch.equal(found, value)
    assert grad.dtype == torch.float16 and torch.equal(grad, slope.half())


@every_loss
def test_loss_in_float32_is_near_that_in_float64(name):
    """test_contrast.py has it by each way to compute it."""
    (found, grad), (value, slope) = (value_and_gradient(name, draw(300).to(dtype)) for dtype in (F32, F64))
    assert found.item() == pytest.approx(value.item(), rel=1e-5) and value.dtype == slope.dtype == F64
    assert (grad - slope).norm() < 2e-5 * slope.norm()


@every_loss
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_loss_shows_a_number_that_is_not_finite(name, bad):
    z = draw(300)
    z[-1, 0] = bad
    assert value_and_gradient(name, z)[0].isnan()


@pytest.mark.parametrize("name", ["nt_xent", "suncet", "sup_con", "cross_entropy", "swav", "paws"])
def test_loss_of_no_images_is_zero(name):
    value, grad = value_and_gradient(name, draw(0))
    assert value.item() == pytest.approx(0, abs=1e-30) and grad.shape == (0, 32)


def test_cross_entropy_does_not_ignore_a_class_number():
    with pytest.raises(IndexError):
        cross_entropy(torch.zeros(4, 3), torch.full((4,), -100))


# Of calls that are refused.
Z, Y, S = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.zeros(8, 3)


def wrong_paws(anchors=S, supports=Z, labels=Y, targets=S, target_supports=Z, views=2, **settings):
    return lambda: paws(anchors, supports, labels, targets, target_supports, views=views, **settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nt_xent(torch.zeros(5, 3), 0.1), r"nt_xent: .*first views of B images.* not \(5, 3\)"),
        (lambda: nt_xent(Z, 0.1, keys="on"), r"keys must be one of \('attached', 'detached'\), not 'on'"),
        (lambda: sup_con(Z, Y, 0.1, chunk_size=1.5), r"sup_con: chunk_size must be an integer .* not 1.5"),
        (lambda: nt_xent(np.zeros((4, 3)), 0.1), r"nt_xent: z must be .* a tensor .* not array"),
        (lambda: suncet(Z, Y.numpy(), 0.1), r"suncet: labels must be .* a tensor \(4,\), not array"),
        (lambda: suncet(torch.zeros(4, 3).long(), Y, 0.1), r"suncet: z must be .*floating.*torch.int64"),
        (lambda: suncet(Z, Y[:3], 0.1), r"suncet: labels must be one integer per row, .* not \(3,\)"),
        (lambda: suncet(Z, Y[:, None], 0.1), r"suncet: labels must be .* a tensor \(4,\), not \(4, 1\)"),
        (lambda: suncet(Z, Y.bool(), 0.1), r"suncet: labels must be integers.* of torch.bool"),
        (lambda: suncet(Z, Y.to("meta"), 0.1), r"suncet: labels must be on cpu, as the rows, not .* on meta"),
        (
            lambda: suncet(Z, Y, 0.1, average="all"),
            r"average must be one of \('sample', 'class'\), not 'all'",
        ),
        *(
            (lambda t=t: suncet(Z, Y, t), r"suncet: temperature .*0\.5 for .* must be a plain number above 0")
            for t in (0, -0.1, math.nan, math.inf, "0.1", None, torch.tensor(0.1))
        ),
        (lambda: cross_entropy(Z[0], Y), r"cross_entropy: logits must be \(rows, classes\)"),
        (lambda: cross_entropy(Z, Y.float()), r"cross_entropy: labels must be integers"),
        (lambda: swav(S[0], 0.1, crops=4), r"swav: scores must be \(crops x images, prototypes\)"),
        (lambda: swav(S[:, :0], 0.1, crops=4), r"swav: scores must have at least one prototype, .*\(8, 0\)"),
        (lambda: swav(torch.zeros(9, 3), 0.1, crops=4), r"swav: scores must hold 4 crops .* not \(9, 3\)"),
        (lambda: swav(S, 0.1, crops=1), "swav: crops must be an integer of at least 2"),
        (lambda: swav(S, 0.1, crops=4, epsilon=math.nan), "swav: epsilon must be a plain number above 0"),
        (lambda: swav(S, 0.1, crops=4, iterations=0), "swav: iterations must be an integer of at least 1"),
        (lambda: swav(S, 0.0, crops=4), "swav: temperature .* must be a plain number above 0"),
        (wrong_paws(targets=S[0]), r"paws: targets must be \(rows, width\)"),
        (wrong_paws(labels=Y[:3]), r"paws: labels must be one integer per row, a tensor \(4,\), not \(3,\)"),
        (wrong_paws(views=1), "paws: views must be an integer of at least 2"),
        (wrong_paws(anchors=torch.zeros(9, 3)), r"paws: anchors must hold views=2 .* not \(9, 8\)"),
        (wrong_paws(views=4), r"paws: anchors must hold views=4 .* and targets two, not \(8, 8\)"),
        (wrong_paws(target_supports=Z[:3]), r"paws: target_supports .* of supports, \(4, 3\).* not \(3, 3\)"),
        (wrong_paws(Z, Z[:0], Y[:0], Z, Z[:0]), "paws: target_supports must be .* at least one"),
        (wrong_paws(sharpen=0.0), "paws: sharpen must be a plain number above 0"),
        (wrong_paws(sharpen=1.5), "paws: sharpen must be at most 1, not 1.5"),
        (wrong_paws(targets=S.double()), r"paws: targets must have .* of anchors, \(8, 3\) .*float64"),
        (wrong_paws(targets=S.to("meta")), r"paws: targets must have .* device .* on cpu.* on meta"),
        (wrong_paws(supports=Z[:, :2]), r"paws: supports must have the width .* not \(4, 2\)"),
        (wrong_paws(smoothing=1.0), "paws: smoothing must be from 0 to below 1, not 1.0"),
        (wrong_paws(smoothing=0.0, temperature=0.02), "paws: temperature .* without smoothing, not 0.02"),
        (wrong_paws(prior=torch.ones(3)), r"paws: prior must be .* floating tensor \(4,\), not \(3,\)"),
        (wrong_paws(prior=torch.ones(4).long()), r"paws: prior must be .* not \(4,\) of torch.int64"),
        (wrong_paws(classes="5"), "paws: classes must be an integer of at least 1, not '5'"),
        (wrong_paws(prior=[1] * 4), r"paws: prior must be .* not \[1, 1"),
    ],
)
def test_checks_refuse_a_wrong_call(call, message):
    with pytest.raises(ValueError, match=message):
        call()
