"""A view operator that is built."""

from pathlib import Path

import pytest

from pipelines.dali.view_operator import build, use
from tests.support.view_operator import MISSING


@pytest.fixture(scope="session")
def view_operator() -> Path:
    """The view operator of these sources, in DALI. Built here if it was not before, which takes about ten seconds."""
    if build.kept() is None and MISSING is not None:
        pytest.skip(f"the view operator cannot be built: {MISSING}")
    path = use.built()
    use.load(path)
    return path
