"""Rules between keys; wrong_configs.txt has a case for each of them."""

import pytest

from fastsuncet.config.rules import RULES, broken
from fastsuncet.config.schema import Sections
from tests.support.configs import GOOD, load

WRONG = {
    "data": {"kind": "csv", "download": True, "split": {"kind": "names", "fraction": 0.1}},
    "criterion": {"temperature": 1, "unsupervised_batch_size": 1, "supervised_epochs": 3},
    "optimization": {"lr": 1, "start_lr": 2, "nesterov": True, "momentum": 0},
    "evaluation": {"knn_every_epochs": 1},
}


def test_rules_ignore_what_is_invalid():
    """A rule says nothing where one of its settings is invalid, and the others still speak."""
    config = Sections.from_values(WRONG)
    everything = {problem.key for problem in broken(config)}
    assert {"data.root", "optimization.start_lr", "optimization.nesterov"} <= everything
    without = {problem.key for problem in broken(config, {"optimization.lr", "data"})}
    assert without == everything - {"optimization.start_lr"} - {
        k for k in everything if k.startswith("data.")
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.key)
def test_rules_texts_can_be_formatted(rule):
    config = load(GOOD)
    assert "{c" not in rule.text.format(c=config)


def test_rules_widest_blur_that_fits():
    """A blur 13 pixels wide reaches 6 pixels beyond the border, and a view of 7 pixels has 6 to mirror."""
    assert load(GOOD, "data.augmentation.size=7").data.augmentation.size == 7
    assert load(GOOD, "data.augmentation={size: 6, blur: 0}").data.augmentation.size == 6
