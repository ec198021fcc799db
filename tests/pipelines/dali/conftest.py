"""A plug-in that is built."""

from pathlib import Path

import pytest

from pipelines.dali.plugin import use


@pytest.fixture(scope="session")
def plugin() -> Path:
    """The plug-in of these sources, in DALI. Built here if it was not before, which takes about ten seconds."""
    path = use.built()
    use.load(path)
    return path
