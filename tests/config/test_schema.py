"""The defaults are the paper's where it has a value; test_shipped_configs.py has its values."""

from fastsuncet.config import flat, load_config
from fastsuncet.config.schema import DEFAULTS


def test_schema_defaults_are_the_papers():
    paper = flat(load_config("in1k_simclr").canonical())
    sections = ("data.augmentation.", "model.", "optimization.")
    differ = {
        key for key, value in DEFAULTS.items() if key.startswith(sections) and paper.get(key, value) != value
    }
    assert differ == {f"optimization.{key}" for key in ("epochs", "start_lr", "warmup")}
    colors = {
        key: DEFAULTS[f"data.augmentation.{key}"] for key in ("brightness", "contrast", "saturation", "hue")
    }
    assert list(colors.values()) == [0.8, 0.8, 0.8, 0.2]
    assert "criterion.temperature" not in DEFAULTS
