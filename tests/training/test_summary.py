"""The lines before a run say what is so, and why."""

from types import SimpleNamespace

import pytest
import torch

from fastsuncet.config import load_config
from fastsuncet.distributed.launch import Place
from fastsuncet.training import summary
from tests.support.runs import CONFIGS


@pytest.mark.parametrize(
    ("asked", "problem", "why"),
    [
        ("torchvision", None, "as configured"),
        ("torchvision", "No module named 'nvidia'", "as configured"),
        ("auto", "libcuda.so: not found", "DALI cannot be used here: libcuda.so: not found"),
    ],
)
def test_torchvisions_pixels_come_with_the_reason_why_it_is_not_dali(monkeypatch, asked, problem, why):
    monkeypatch.setattr(summary, "dali_problem", lambda: problem)
    stream = SimpleNamespace(backend="torchvision")
    assert summary.pixel_source(stream, asked) == f"torchvision on the CPU ({why})"


@pytest.mark.parametrize(
    ("device", "precision", "asked", "said"),
    [
        ("cuda", "bf16", "tf32", ", products in TF32"),
        ("cuda", "fp32", "tf32", ""),
        ("cuda", "bf16", "fp32", ""),
        ("cpu", "bf16", "tf32", ""),
    ],
)
def test_losses_that_are_not_in_float32_are_said_to_be_so(device, precision, asked, said):
    config = load_config(
        CONFIGS / "digits_demo.yaml", [f"meta.precision={precision}", f"criterion.products={asked}"]
    )
    place = Place(0, 1, 0, torch.device(device))
    assert summary.cut(config, place) == said
    overrides = ["meta.precision=bf16", "criterion.supervision=cross_entropy"]
    swav = load_config(
        CONFIGS / "digits_demo.yaml", [*overrides, "criterion.instance=swav", "swav.small_crops=0"]
    )
    assert summary.cut(swav, Place(0, 1, 0, torch.device("cuda"))) == ""  # there is no product in these
