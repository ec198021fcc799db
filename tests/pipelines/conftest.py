"""Pictures for all streams, which no test changes, and the back-ends that read them."""

import pytest

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
