"""Temperatures, calibration errors, left-out images and intervals, against what is known about them."""

from functools import partial

import pytest
import torch

from fastsuncet.evaluation.calibration import (
    calibrate,
    calibration_error,
    fit_temperature,
    folds,
    out_of_fold,
)
from fastsuncet.evaluation.classifier import two_best
from fastsuncet.evaluation.linear import fit_linear, linear_logits
from fastsuncet.evaluation.scoring import wilson_interval


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_fit_temperature_finds_that_of_the_draw_and_calibrates(temperature):
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(20_000, 4, generator=generator)
    labels = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)[:, 0]
    found, _ = fit_temperature(logits, labels)
    assert found == pytest.approx(temperature, rel=0.05)
    after, before = (calibration_error((logits / t).softmax(1), labels) for t in (found, 1.0))
    assert after < 0.01 and (temperature == 1 or before > 0.05)
    few = calibrate(logits[:39], labels[:39]).said_of(39)
    assert few.endswith("fitted to 39 images; 40 or more can tell how far probabilities are off")
    assert calibrate(logits[:40], labels[:40]).said_of(40).startswith("probabilities are off by")


def test_fit_temperature_of_labels_that_are_all_right_is_not_certain():
    logits = 10 * torch.eye(4).repeat(5, 1)
    labels = torch.arange(4).repeat(5)
    sure = (logits / fit_temperature(logits, labels)[0]).softmax(1).max().item()
    assert sure == pytest.approx((20 + 1 / 4) / 21, abs=1e-3)  # the mean of the targets


def test_the_highest_temperature_keeps_the_order_of_classes():
    """Of a network that is never right. In float32 many of its probabilities are equal."""
    logits = torch.randn(64, 10, generator=torch.Generator().manual_seed(3))
    found = calibrate(logits, logits.argmin(1))
    assert found.temperature > 1e5 and found.error == pytest.approx(0.1, abs=1e-4)
    best, probability = two_best(logits / found.temperature)
    assert torch.equal(best, logits.topk(2).indices) and (probability - 0.1).abs().max() < 1e-5


def test_calibration_error_counts_the_gap_of_each_bin():
    # 20 images at 0.9 of which 12 are right, 20 at 0.6 of which 15 are: gaps 0.3 and 0.15 in two bins.
    confidence = torch.tensor([0.9] * 20 + [0.6] * 20)
    right = torch.tensor([1] * 12 + [0] * 8 + [1] * 15 + [0] * 5)
    probabilities = torch.stack([1 - confidence, confidence], 1)
    assert calibration_error(probabilities, right) == pytest.approx((0.3 + 0.15) / 2)


def test_out_of_fold_rows_are_those_of_a_fit_without_the_image():
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(31, 6, generator=generator)
    # Class 3 has one image, which cannot be judged: it is learned in every fold, as by the final classifier.
    labels = torch.tensor([*range(3)] * 10 + [3])
    numbers, logits = out_of_fold(labels, partial(linear_logits, features, labels, 4, 0.1))
    assert numbers.tolist() == list(range(30))
    fold_of = folds(labels)
    for fold in range(5):
        left_out = (fold_of == fold) & (labels < 3)
        assert torch.bincount(labels[left_out], minlength=3)[:3].tolist() == [2, 2, 2]
        fit = fit_linear(features[~left_out], labels[~left_out], 4, strength=0.1)
        torch.testing.assert_close(logits[left_out[:30]], fit.scores(features[:30][left_out[:30]]))


def test_out_of_fold_learns_from_known_images_and_judges_the_others():
    labels = torch.tensor([0, 1] * 10)
    known = torch.arange(20) < 12

    def classify(learned: torch.Tensor, left_out: torch.Tensor) -> torch.Tensor:
        assert learned[known].all() and not (learned & left_out).any()
        return left_out.nonzero()[:, 0]

    numbers, rows = out_of_fold(labels, classify, learned=known)
    assert numbers.tolist() == rows.tolist() == list(range(12, 20))
    assert len(out_of_fold(labels, classify, learned=torch.ones(20, dtype=torch.bool))[0]) == 0


def test_wilson_interval_is_the_published_one():
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, table I
    assert wilson_interval(0, 20) == pytest.approx((0, 0.1611), abs=1e-4)
    assert wilson_interval(20, 20) == pytest.approx((0.8389, 1), abs=1e-4)
