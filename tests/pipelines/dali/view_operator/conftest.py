"""A cache for libraries that a tiny compiler writes."""

from pathlib import Path

import pytest

from tests.support.view_operator import MISSING, tiny_compiler


@pytest.fixture
def tiny(monkeypatch, tmp_path) -> Path:
    """The folder of an own cache, for libraries that a tiny compiler writes."""
    if MISSING is not None and "compiler" not in MISSING:
        pytest.skip(f"the view operator cannot be built: {MISSING}")
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(tiny_compiler(tmp_path)))
    return tmp_path / "cache" / "view_operator"
