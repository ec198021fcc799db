"""What holds for every loss: float32 under autocast and of 16 bits, the same bits again, and inputs left alone.

Cross-entropy is so small that all of its tests are here.
"""

import math

import pytest
import torch

from fastsuncet import cross_entropy, nt_xent, paws, suncet, sup_con, swav
from fastsuncet.losses.swav import prototype_scores
from tests.support.dense_losses import gradient, labeled_batch


def draw(rows: int) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))


LABELS, OTHERS = torch.arange(300) % 7, draw(40)
CALLS = {
    "nt_xent": lambda z: nt_xent(z, 0.1),
    "suncet": lambda z: suncet(z, LABELS[: len(z)], 0.1),
    "sup_con": lambda z: sup_con(z, LABELS[: len(z)], 0.1),
    "cross_entropy": lambda z: cross_entropy(z, LABELS[: len(z)]),
    "swav": lambda z: swav(z, 5.0, crops=4, epsilon=2.0),
    "paws": lambda z: sum(paws(z, OTHERS, LABELS[:40], z.detach()[: len(z) // 2], OTHERS, views=4)),
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
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_loss_shows_a_number_that_is_not_finite(name, bad):
    z = draw(300)
    z[-1, 0] = bad
    assert value_and_gradient(name, z)[0].isnan()


@pytest.mark.parametrize("name", ["nt_xent", "suncet", "sup_con", "cross_entropy", "swav", "paws"])
def test_loss_of_no_images_is_zero(name):
    value, grad = value_and_gradient(name, draw(0))
    assert value.item() == pytest.approx(0, abs=1e-30) and grad.shape == (0, 32)


def test_cross_entropy_is_torchs_mean():
    logits, labels = labeled_batch(rows=12, width=7, dtype=torch.float32)
    loss, grad = gradient(cross_entropy, logits, labels.int())
    true_loss, true_grad = gradient(torch.nn.functional.cross_entropy, logits.double(), labels)
    assert loss.item() == pytest.approx(true_loss.item(), rel=3e-6)
    assert (grad - true_grad).norm() < 3e-6 * true_grad.norm()


def test_cross_entropy_does_not_ignore_a_class_number():
    with pytest.raises(IndexError):
        cross_entropy(torch.zeros(4, 3), torch.full((4,), -100))
