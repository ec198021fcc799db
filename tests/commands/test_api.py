"""The public names of `import fastsuncet`: they exist, work together, and cost nothing before they are used."""

import subprocess
import sys
from pathlib import Path

import PIL.Image
import pytest
import torch

import fastsuncet
from fastsuncet import losses
from fastsuncet.errors import ConfigError
from tests.support.runs import small_config

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_import_fastsuncet_imports_nothing_else():
    code = "import sys, fastsuncet; print(*sorted(m for m in sys.modules if m.split('.')[0] in sys.argv[1:]))"
    words = [sys.executable, "-c", code, "fastsuncet", "pipelines", "torch", "numpy", "pydantic", "yaml"]
    out = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert out.split() == ["fastsuncet"]


def test_every_public_name_exists():
    assert all(getattr(fastsuncet, name) is not None for name in fastsuncet.__all__)
    assert fastsuncet.suncet is losses.suncet and set(fastsuncet.__all__) <= set(dir(fastsuncet))
    assert {name for names in fastsuncet._MODULES.values() for name in names} == set(fastsuncet.__all__)
    with pytest.raises(AttributeError, match="no attribute 'sunset'"):
        fastsuncet.sunset  # noqa: B018


@pytest.mark.slow
def test_train_load_encoder_and_embed_work_together(tmp_path):
    run = fastsuncet.train(small_config(tmp_path))
    encoder = fastsuncet.load_encoder(str(run))
    assert not encoder.training and encoder.view.size == 16
    (tmp_path / "images" / "deep").mkdir(parents=True)
    for name in ("b.png", "a.jpg", "deep/c.png"):
        PIL.Image.effect_noise((16, 16), 60).convert("RGB").save(tmp_path / "images" / name)
    files, rows = fastsuncet.embed(encoder, tmp_path / "images")
    assert files == ["a.jpg", "b.png", "deep/c.png"] and rows.shape == (3, 64)
    with pytest.raises(ConfigError, match="pass view=Center"):
        fastsuncet.embed(torch.nn.Conv2d(3, 3, 1), tmp_path / "images")
