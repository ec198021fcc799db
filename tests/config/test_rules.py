"""Rules between keys; wrong_configs.txt has a case for each of them."""

from fastsuncet.config.rules import RULES, broken
from fastsuncet.config.schema import DEFAULTS
from tests.support.configs import GOOD, load

WRONG = DEFAULTS | {
    "data.kind": "csv",
    "data.download": True,
    "data.split.kind": "names",
    "optimization.lr": 1,
    "optimization.start_lr": 2,
    "optimization.nesterov": True,
    "optimization.momentum": 0,
}


def test_rules_ignore_what_is_not_valid():
    """A rule says nothing where one of its settings is not valid, and the others still speak."""
    everything = {problem.key for problem in broken(WRONG)}
    assert {"data.root", "optimization.start_lr", "optimization.nesterov"} <= everything
    valid = {key: WRONG[key] for key in WRONG if not key.startswith("data.") and key != "optimization.lr"}
    without = {problem.key for problem in broken(valid)}
    assert without == {key for key in everything if key != "optimization.start_lr" and key[:5] != "data."}


def test_rules_texts_can_be_formatted():
    values = WRONG | {"criterion.unsupervised_batch_size": 2, "criterion.temperature": 1}
    for _, _, text in RULES:
        assert "%(" not in text % {**values, "default": ""}


def test_rules_widest_blur_that_fits():
    """A blur 13 pixels wide reaches 6 pixels beyond the border, and a view of 7 pixels has 6 to mirror."""
    assert load(GOOD, "data.augmentation.size=7").data.augmentation.size == 7
    assert load(GOOD, "data.augmentation={size: 6, blur: 0}").data.augmentation.size == 6
