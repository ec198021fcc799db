"""A plug-in that is built, and a cache for libraries that a tiny compiler writes."""

from pathlib import Path

import pytest

from pipelines.dali.plugin import use
from tests.support.plugin import MISSING, tiny_compiler


@pytest.fixture(scope="session")
def plugin() -> Path:
    """The plug-in of these sources, in DALI. Built here if it was not before, which takes about ten seconds."""
    path = use.built()
    use.load(path)
    return path


@pytest.fixture
def tiny(monkeypatch, tmp_path) -> Path:
    """The folder of an own cache, for libraries that a tiny compiler writes."""
    if MISSING is not None and "compiler" not in MISSING:
        pytest.skip(f"the plug-in cannot be built: {MISSING}")
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(tiny_compiler(tmp_path)))
    return tmp_path / "cache" / "plugin"
