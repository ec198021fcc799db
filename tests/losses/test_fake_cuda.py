"""The losses on a GPU that is not there: no tensor of the host, and no wait for a value, also in the backward pass.

So what runs here can be queued ahead of the device and captured in a CUDA graph.
"""

import pytest
import torch

from fastsuncet import cross_entropy, nt_xent, paws, suncet, sup_con, swav
from fastsuncet.losses.swav import normalize_prototypes_, prototype_scores
from tests.support.fake_cuda import CARD, Watch, fake_card

KEYS, AVERAGES = ("attached", "detached"), ("sample", "class")


def contrasted(loss, **options):
    return lambda: loss(rows(600), zeros(600), 0.1, **options)


def rows(count, width=8):
    return torch.randn(count, width, device=CARD, requires_grad=True)


def zeros(count):
    return torch.zeros(count, dtype=torch.int64, device=CARD)


def swapped():
    prototypes = rows(6)
    normalize_prototypes_(prototypes.detach())
    return swav(prototype_scores(rows(20), prototypes), 0.1, crops=4)


def assigned(**settings):
    given = rows(20), rows(12), zeros(12), rows(10).detach(), rows(12).detach()
    return sum(paws(*given, views=4, **settings))


CALLS = {
    "cross_entropy": lambda: cross_entropy(rows(600), zeros(600)),
    "swav": swapped,
    "paws": assigned,
    "paws, classes": lambda: assigned(classes=12),
    "paws, prior": lambda: assigned(prior=torch.ones(12, device=CARD)),
    **{f"nt_xent, {keys}": lambda keys=keys: nt_xent(rows(600), 0.1, keys=keys) for keys in KEYS},
    **{
        f"{loss.__name__}, {keys}, {average}": contrasted(loss, keys=keys, average=average)
        for loss in (suncet, sup_con)
        for keys in KEYS
        for average in AVERAGES
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_loss_stays_on_the_gpu(name):
    with fake_card(), Watch() as watch:
        loss = CALLS[name]()
        loss.backward()
    assert loss.device == CARD and watch.mixed == []


def test_losses_run_on_the_meta_device():
    z = torch.empty(600, 8, device="meta", requires_grad=True)
    labels = torch.empty(600, dtype=torch.int64, device="meta")
    (nt_xent(z, 0.1) + suncet(z, labels, 0.1)).backward()
    assert z.grad.shape == z.shape
