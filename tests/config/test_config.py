"""A config has a value, reads back what it writes, and says which keys can change when a run continues."""

import copy
import json
import pickle
from pathlib import Path

import pytest

from fastsuncet.config import FREE_ON_RESUME, Config, ConfigErrors, load_config
from fastsuncet.config.schema import CONFIG
from tests.support.configs import GOOD, load


def test_config_reads_back_its_yaml_and_json():
    overrides = ("criterion.unsupervised_batch_size={per_rank: 8}", "logging.folder=ä")
    config = load(GOOD + "model: {hidden: 7}\n", *overrides, "data.augmentation.crop_ratio=[0.1, 0.3]")
    Path("again.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert load_config("again.yaml") == config
    assert Config.from_values(json.loads(json.dumps(config.canonical()))) == config
    assert "crop_scale: [0.08, 1.0]" in config.to_yaml()
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert load_config("again.yaml", "logging.folder=b") == config.with_values({"logging.folder": "b"})


def test_config_run_folder(monkeypatch):
    """A run is named after its config file unless it has a name."""
    Path("p01.yaml").write_text(GOOD)
    assert load_config("p01.yaml").run_folder == Path("runs/p01")
    named = load_config("p01.yaml", ["logging.write_tag=mine", "logging.folder=~/r"])
    monkeypatch.setenv("HOME", "/home/me")  # some users have none
    assert named.run_folder == Path("/home/me/r/mine")
    Path("my run.yaml").write_text(GOOD)
    with pytest.raises(ConfigErrors, match=r"my run\.yaml: logging\.write_tag: my run \(from the name of"):
        load_config("my run.yaml")


def test_config_changed_key():
    """Each key either forbids continuing a run or is listed in FREE_ON_RESUME."""
    assert set(FREE_ON_RESUME) <= {*CONFIG.sections, *CONFIG.values}
    config = load()
    for key in CONFIG.values:
        *above, name = key.split(".")
        section = saved = config.canonical()
        for part in above:
            section = section[part]
        section[name] = "something else"
        free = any(key == entry or key.startswith(entry + ".") for entry in FREE_ON_RESUME)
        assert [changed[0] for changed in config.changed_keys(saved)] == ([] if free else [key])


def test_config_changed_keys_have_both_values_or_the_default():
    saved = load().canonical()
    del saved["optimization"]["nesterov"], saved["data"]["augmentation"]["hue"]
    saved["meta"]["gone"] = 3
    assert load().changed_keys(saved) == [("meta.gone", 3, None)]
    other = ("optimization.nesterov=true", "criterion.unsupervised_batch_size={per_rank: 32}")
    assert load(GOOD, *other).changed_keys(saved) == [
        ("criterion.unsupervised_batch_size", 256, {"per_rank": 32}),
        ("meta.gone", 3, None),
        ("optimization.nesterov", False, True),
    ]
