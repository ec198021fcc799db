"""A view operator that is built."""

from pathlib import Path

import pytest

from pipelines.dali.view_operator import build, use


@pytest.fixture(scope="session")
def view_operator() -> Path:
    """The view operator of these sources, in DALI. Built here if it was not before, which takes about ten seconds."""
    if build.kept() is None and (missing := build.unavailable()) is not None:
        pytest.skip(f"the view operator cannot be built: {missing}")
    path = use.built()
    use.load(path)
    return path
