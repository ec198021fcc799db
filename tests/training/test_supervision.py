"""The plateau rule, on recorded curves of real runs and on curves of every shape."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fastsuncet.config import load_config
from fastsuncet.training.pretraining import Supervision, has_plateaued
from tests.support.runs import CONFIGS

RECORDED = json.loads((Path(__file__).parent / "suncet_curves.json").read_text())


def ends_after(means, epochs: int = 10, gain: float = 0.01) -> int | None:
    """Return after how many epochs supervision is switched off; None: never."""
    ends = (epoch for epoch in range(1, len(means) + 1) if has_plateaued(means[:epoch], epochs, gain))
    return next(ends, None)


FALLING = list(np.linspace(2.3, 1.0, 60))
CURVES = {  # the means, the length of a span, the end
    # Mean SuNCEt losses of real runs, by label fraction: they end where nine tenths of the whole fall are done, and the
    # span before the last two still fell by more than 1 %.
    **{name: (means, 10, RECORDED["ends_after"][name]) for name, means in RECORDED["curves"].items()},
    "straight": (FALLING, 10, None),
    "lucky": ([*FALLING[:25], 0.01, *FALLING[26:]], 10, None),
    "spike": ([*FALLING[:25], 30.0, *FALLING[26:]], 10, None),
    "zero": ([0.0] * 30, 10, 20),
    # Cross-entropy on memorized images keeps falling by the same share; 0.95^90 is 1 %.
    "without a floor": ([2 * 0.95**epoch for epoch in range(200)], 10, 96),
    "rising": ([1 + epoch / 100 for epoch in range(40)], 10, 20),
    **{f"span {epochs}": ([1.0] * 100, epochs, 2 * epochs) for epochs in (1, 3, 10)},
}


@pytest.mark.parametrize("name", CURVES)
def test_plateau_ends_real_and_simple_curves_where_they_are_flat(name):
    """It needs two spans, and one odd epoch changes nothing."""
    means, epochs, end = CURVES[name]
    assert ends_after(means, epochs) == end


@pytest.mark.parametrize(("epochs", "means"), [("all", []), ("plateau", [1.0] * 20)])
def test_supervision_ends_at_a_plateau_of_means_where_it_is_asked_to(epochs, means):
    config = load_config(CONFIGS / "digits_demo.yaml", [f"criterion.supervised_epochs={epochs}"])
    sizes = config.resolve(1, 1442)
    supervision, steps = Supervision(config, sizes, 0, torch.device("cpu")), 30 * sizes.steps_per_epoch
    ended = [step + 1 for step in range(steps) if supervision.add(torch.ones(()), step)]
    assert ended == ([20 * sizes.steps_per_epoch] if means else []) and supervision.means == means
