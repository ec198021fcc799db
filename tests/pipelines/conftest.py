"""Pictures for all streams, which no test changes, the back-ends that read them, and the view operator."""

from pathlib import Path

import pytest

from pipelines.dali.view_operator import build, use
from pipelines.datasets.index import ImageIndex
from tests.support.pictures import write_pictures
from tests.support.streams import BACKENDS


@pytest.fixture(params=BACKENDS)
def reader(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def index(tmp_path_factory) -> ImageIndex:
    """24 JPEG images of varied sizes in three classes."""
    return write_pictures(tmp_path_factory.mktemp("pictures"), count=24, side=48)


@pytest.fixture(scope="session")
def view_operator() -> Path:
    """The view operator of these sources, in DALI. Built here if it was not before, which takes about ten seconds."""
    if build.kept() is None and (missing := build.unavailable()) is not None:
        pytest.skip(f"the view operator cannot be built: {missing}")
    path = use.built()
    use.load(path)
    return path
