"""Every method through the real network and the real run, against dense float64 losses.

test_multi_view_model.py has them on two ranks.
"""

import itertools
from typing import get_args

import pytest
import torch

from fastsuncet.checkpoint import manager
from fastsuncet.config.schema import CriterionSection
from fastsuncet.training import methods
from tests.support.methods import METHODS, config_of, dense, images, loss_and_gradients, network, small
from tests.support.runs import assert_continues, metrics


def test_methods_every_loss_of_the_schema_is_compared_here():
    keys = ("instance", "supervision")
    names = {name for key in keys for name in get_args(CriterionSection.model_fields[key].annotation)}
    compared = {getattr(config_of(method).criterion, key) for method in METHODS for key in keys}
    assert names == compared == set(methods.TERMS)


@pytest.mark.parametrize("method", METHODS)
def test_method_is_the_sum_of_the_papers_losses_with_its_gradient(method):
    config = config_of(method)
    assert methods.name(config) == method
    batch = images(config)
    losses, gradients = loss_and_gradients(config, network(config), *batch)
    twin = network(config)
    expected = dense(config, twin, *batch)
    expected.sum().backward()
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-14)
    assert (losses[0] != 0) == (config.criterion.instance != "none")
    assert (losses[1] > 0) == ("none" not in methods.terms(config)[1:])
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in twin.named_parameters()}
    torch.testing.assert_close(gradients, wanted, rtol=1e-9, atol=1e-13)


def test_paws_takes_images_that_stand_in_from_more_classes_than_a_batch_has():
    config = config_of("PAWS", "criterion.classes_per_batch=2", "data.bad_images=1")  # of three classes
    losses, _ = loss_and_gradients(config, network(config), *images(config))
    torch.testing.assert_close(losses, dense(config, network(config), *images(config)))


LABELS_FIRST = ("criterion.supervised_epochs=1", "optimization.momentum=0.0")  # four updates of seven


# A weight of each method, and in which updates after the first it moves, by more than its normalization does.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options", "key", "moves"),
    [
        ("labels alone, SuNCEt", (), "encoder.conv1.weight", [True] * 6),
        ("SimCLR + cross-entropy", LABELS_FIRST, "classifier.weight", [True] * 3 + [False] * 3),
        ("SwAV + SuNCEt", (), "prototypes.weight", [False] * 3 + [True] * 3),
        ("PAWS", (), "predictor.1.weight", [True] * 6),
    ],
)
def test_run_of_a_method_stopped_in_its_middle_ends_in_the_same_bits(tmp_path, method, options, key, moves):
    """Classifiers rest once supervision is off, prototypes in the first four updates."""
    options += ("optimization.steps=7", "checkpoint.every=1", "checkpoint.keep=99")
    whole, parts = (small(tmp_path / name, method, *options) for name in ("whole", "parts"))
    assert_continues(whole, parts, 4)
    paths = sorted((whole.run_folder / "checkpoints").glob("step_*"))
    weights = [manager.load(path).model[key] for path in paths]
    least = 1e-6 if key == "prototypes.weight" else 0
    assert [(a - b).abs().max().item() > least for a, b in itertools.pairwise(weights)] == moves
    last = metrics(whole.run_folder, "train")[-1]
    if method == "labels alone, SuNCEt":  # an epoch is a pass over the 70 labeled images, 40 an update
        assert "nt_xent" not in last and last["suncet"] > 0
        assert (last["views"], last["epoch"]) == (7 * 40, 7 / (70 // 40))
    elif key == "classifier.weight":
        assert "suncet" not in last and last["cross_entropy"] == 0
    elif key == "prototypes.weight":
        torch.testing.assert_close(weights[0].norm(dim=1), torch.ones(12))
