"""Supervision ends by itself where its loss has plateaued: on curves of real runs, and on curves of every shape."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsuncet.training.supervision import PlateauRule

RECORDED = json.loads((Path(__file__).parent / "suncet_curves.json").read_text())
CURVES = RECORDED["curves"]  # label fraction -> mean SuNCEt loss of each epoch


def _ends_after(means, epochs: int = 10, gain: float = 0.01) -> int | None:
    """After how many epochs the rule says to switch off; None: never."""
    rule = PlateauRule(epochs, gain)
    return next((epoch for epoch, mean in enumerate(means, 1) if rule.add(mean)), None)


def _noisy(curve: np.ndarray, seed: int, noise: float = 0.05) -> np.ndarray:
    """With one in twenty of noise from epoch to epoch, as measured on the recorded curves."""
    return curve * (1 + noise * np.random.default_rng(seed).standard_normal(len(curve)))


# Real curves: one seed each. The paper sees fewer labels plateau sooner; these runs, which all see as many labeled
# images an update and the same schedule, do not show it (79, 71 and 57 epochs for 10, 20 and 50 %).


@pytest.mark.parametrize("fraction", sorted(CURVES))
def test_real_curves_end_once_they_are_flat_and_not_before(fraction):
    means = CURVES[fraction]
    assert len(means) == 200
    end = _ends_after(means)
    assert end == RECORDED["ends_after"][fraction]
    fallen = means[0] - np.mean(means[end - 10 : end])
    assert fallen > 0.9 * (means[0] - np.mean(means[-10:])), "what was still to come was worth waiting for"
    assert np.mean(means[end - 30 : end - 20]) > 1.01 * np.mean(means[end - 10 : end]), "it was flat long ago"


@pytest.mark.parametrize("fraction", sorted(CURVES))
def test_more_patience_and_a_smaller_gain_end_real_curves_later(fraction):
    means = CURVES[fraction]
    ends = [_ends_after(means, epochs, 0.01) or math.inf for epochs in (5, 10, 20)]
    assert ends == sorted(ends) and ends[0] < ends[2]
    ends = [_ends_after(means, 10, gain) or math.inf for gain in (0.05, 0.02, 0.01, 0.002)]
    assert ends == sorted(ends)


def test_the_noise_assumed_below_is_that_of_the_real_curves():
    for means in CURVES.values():
        late = np.array(means[100:])
        assert 0.03 < np.diff(late).std() / math.sqrt(2) / late.mean() < 0.06


# Curves of every shape


@pytest.mark.parametrize("seed", range(20))
def test_a_curve_that_still_falls_never_ends_supervision(seed):
    falling = np.linspace(2.3, 0.5, 120)
    assert _ends_after(falling) is None
    assert _ends_after(_noisy(np.linspace(2.3, 0.5, 60), seed)) is None


def test_falling_by_more_than_the_gain_goes_on_and_by_less_ends_at_once():
    for gain in (0.01, 0.1):
        steady = lambda share: [(1 - share) ** (epoch / 10) for epoch in range(300)]  # noqa: E731
        assert _ends_after(steady(1.05 * gain), gain=gain) in (None, *range(40, 300))
        assert _ends_after(steady(0.95 * gain), gain=gain) == 20


@pytest.mark.parametrize("seed", range(20))
def test_a_flat_noisy_curve_ends_supervision_within_a_few_spans(seed):
    assert 20 <= _ends_after(_noisy(np.full(200, 0.25), seed)) <= 60
    assert 20 <= _ends_after(_noisy(np.full(200, 0.25), seed, noise=0.005)) <= 30


@pytest.mark.parametrize("seed", range(20))
def test_a_noisy_curve_with_a_floor_ends_after_its_fall(seed):
    """2.3 to a floor of 0.2 with a time constant of 15 epochs: 99 % of the fall is done after 70."""
    epochs = np.arange(300)
    end = _ends_after(_noisy(0.2 + 2.1 * np.exp(-epochs / 15), seed))
    assert 50 <= end <= 140


def test_a_slower_curve_ends_later():
    ends = [_ends_after(0.2 + 2.1 * np.exp(-np.arange(2000) / slow)) for slow in (5, 10, 20, 40, 80)]
    assert ends == sorted(set(ends))


def test_a_loss_without_a_floor_ends_once_next_to_nothing_is_left():
    """Cross-entropy on images known by heart falls by the same share for ever."""
    epochs = np.arange(2000)
    geometric = 2.3 * 0.95**epochs
    end = _ends_after(geometric)
    assert np.median(geometric[end - 10 : end]) < 0.023 < np.median(geometric[end - 11 : end - 1])
    assert _ends_after([0.0] * 30) == 20


def test_one_lucky_epoch_and_one_spike_end_nothing():
    falling = list(np.linspace(2.3, 1.0, 60))
    for odd in (0.01, 30.0):
        assert _ends_after([*falling[:25], odd, *falling[26:]]) is None


def test_a_rising_loss_ends_supervision():
    assert _ends_after([1 + epoch / 100 for epoch in range(40)]) == 20


# What must not matter, and edges


def test_nothing_ends_before_two_spans():
    for epochs in (1, 3, 10):
        assert _ends_after([1.0] * 100, epochs) == 2 * epochs


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 5), max_size=40), st.integers(1, 8), st.integers(0, 40), st.floats(0.001, 1))
def test_a_restored_rule_says_what_one_never_interrupted_says(means, epochs, stopped, gain):
    whole, first, second = (PlateauRule(epochs, gain) for _ in range(3))
    said = [whole.add(mean) for mean in means]
    for mean in means[:stopped]:
        first.add(mean)
    second.means = json.loads(json.dumps(first.means))
    assert [second.add(mean) for mean in means[stopped:]] == said[stopped:]
    assert second.means == whole.means


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(-40, 40))
def test_the_unit_of_the_loss_does_not_matter(seed, power):
    curve = _noisy(0.2 + 2.1 * np.exp(-np.arange(200) / 15), seed)
    assert _ends_after(curve * 2.0**power) == _ends_after(curve)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_mean_that_is_no_number_is_no_news(bad):
    flat = PlateauRule(2, 0.01)
    assert [flat.add(mean) for mean in (1.0, bad, 1.0, 1.0, bad, 1.0)] == [False] * 5 + [True]
    assert flat.means == [1.0] * 4
