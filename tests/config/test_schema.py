"""The defaults are the paper's where it has a value."""

import math

import pytest

from fastsuncet.config.schema import CONFIG
from tests.support.configs import load


def test_schema_defaults_are_the_papers():
    config = load()
    a, m, o = config.data.augmentation, config.model, config.optimization
    assert math.prod(a.crop_ratio) == pytest.approx(1)  # 3/4 and 4/3
    assert (a.size, a.crop_scale, a.flip, a.jitter, a.strength) == (224, (0.08, 1.0), 0.5, 0.8, 1.0)
    assert (a.brightness, a.contrast, a.saturation, a.hue) == (0.8, 0.8, 0.8, 0.2)
    assert (a.grey, a.blur, a.blur_sigma, a.mean, a.std) == (0.2, 0.5, (0.1, 2.0), (0.0,) * 3, (1.0,) * 3)
    assert (m.name, m.stem, m.hidden, m.output, m.head_batchnorm) == (
        "resnet50",
        "imagenet",
        2048,
        128,
        False,
    )
    assert (o.momentum, o.weight_decay, o.trust_coefficient, o.final_lr) == (0.9, 1e-6, 0.001, 0.0)
    assert not (o.nesterov or o.lr_in_momentum or o.exclude_bias_and_norm or o.legacy_schedule)
    assert CONFIG.values["criterion.temperature"].is_required()
