"""The plateau rule, on recorded curves of real runs and on curves of every shape."""

import json
from pathlib import Path

import numpy as np
import pytest

from fastsuncet.training.pretraining import has_plateaued

RECORDED = json.loads((Path(__file__).parent / "suncet_curves.json").read_text())
CURVES = RECORDED["curves"]  # label fraction -> mean SuNCEt loss of each epoch


def ends_after(means, epochs: int = 10, gain: float = 0.01) -> int | None:
    """Return after how many epochs supervision is switched off; None: never."""
    ends = (epoch for epoch in range(1, len(means) + 1) if has_plateaued(means[:epoch], epochs, gain))
    return next(ends, None)


def noisy(curve: np.ndarray, seed: int, noise: float = 0.05) -> np.ndarray:
    """Add the noise from epoch to epoch that was measured on the recorded curves."""
    return curve * (1 + noise * np.random.default_rng(seed).standard_normal(len(curve)))


@pytest.mark.parametrize("fraction", sorted(CURVES))
def test_plateau_ends_real_curves_once_they_are_flat_and_not_before(fraction):
    means = CURVES[fraction]
    end = ends_after(means)
    assert end == RECORDED["ends_after"][fraction]
    fallen = means[0] - np.mean(means[end - 10 : end])
    assert fallen > 0.9 * (means[0] - np.mean(means[-10:])), "it ended too early"
    assert np.mean(means[end - 30 : end - 20]) > 1.01 * np.mean(means[end - 10 : end]), "it ended too late"


@pytest.mark.parametrize("seed", range(20))
def test_plateau_in_noise_ends_flat_curves_and_no_falling_one(seed):
    """The third curve falls from 2.3 to a floor of 0.2; 99 % of the fall is done after 70 epochs."""
    assert ends_after(noisy(np.linspace(2.3, 0.5, 60), seed)) is None
    assert 20 <= ends_after(noisy(np.full(200, 0.25), seed)) <= 60
    assert 20 <= ends_after(noisy(np.full(200, 0.25), seed, noise=0.005)) <= 30
    assert 50 <= ends_after(noisy(0.2 + 2.1 * np.exp(-np.arange(300) / 15), seed)) <= 140


FALLING = list(np.linspace(2.3, 1.0, 60))
CURVES_BY_HAND = {  # the means, the length of a span, the end
    "straight": (FALLING, 10, None),
    "lucky": ([*FALLING[:25], 0.01, *FALLING[26:]], 10, None),
    "spike": ([*FALLING[:25], 30.0, *FALLING[26:]], 10, None),
    "zero": ([0.0] * 30, 10, 20),
    # Cross-entropy on memorized images keeps falling by the same share; 0.95^90 is 1 %.
    "without a floor": ([0.95**epoch for epoch in range(200)], 10, 96),
    "rising": ([1 + epoch / 100 for epoch in range(40)], 10, 20),
    **{f"span {epochs}": ([1.0] * 100, epochs, 2 * epochs) for epochs in (1, 3, 10)},
}


@pytest.mark.parametrize("name", CURVES_BY_HAND)
def test_plateau_of_simple_curves(name):
    """It needs two spans, and one odd epoch changes nothing."""
    means, epochs, end = CURVES_BY_HAND[name]
    assert ends_after(means, epochs) == end
