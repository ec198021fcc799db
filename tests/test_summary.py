"""The lines before a run say what is so, and why."""

from types import SimpleNamespace

import pytest

from fastsuncet import summary


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
