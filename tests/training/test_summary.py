"""The lines that are printed before a run."""

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
def test_pixel_source_says_why_it_is_not_dali(monkeypatch, asked, problem, why):
    monkeypatch.setattr(summary, "dali_problem", lambda: problem)
    stream = SimpleNamespace(backend="torchvision")
    assert summary.pixel_source(stream, asked) == f"torchvision on the CPU ({why})"


SWAV_ALONE = ("criterion.supervision=cross_entropy", "criterion.instance=swav", "swav.small_crops=0")


@pytest.mark.parametrize(
    ("device", "precision", "products", "method", "note"),
    [
        ("cuda", "bf16", "tf32", (), ", products in TF32"),
        ("cuda", "fp32", "tf32", (), ""),
        ("cuda", "bf16", "fp32", (), ""),
        ("cpu", "bf16", "tf32", (), ""),
        ("cuda", "bf16", None, SWAV_ALONE, ""),  # these losses have no such product
    ],
)
def test_tf32_note_is_there_where_losses_are_not_in_float32(device, precision, products, method, note):
    asked = (
        f"meta.precision={precision}",
        *((f"criterion.products={products}",) if products else ()),
        *method,
    )
    config = load_config(CONFIGS / "digits_demo.yaml", asked)
    assert summary.tf32_note(config, Place(0, 1, 0, torch.device(device))) == note
