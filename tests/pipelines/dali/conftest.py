"""A view operator that is built."""

from pathlib import Path

import pytest

from pipelines.dali.view_operator import use


@pytest.fixture(scope="session")
def view_operator() -> Path:
    """The view operator of these sources, in DALI. Built here if it was not before, which takes about ten seconds."""
    path = use.built()
    use.load(path)
    return path
