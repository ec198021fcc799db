"""Pictures for all streams; no test changes them."""

import pytest

from pipelines.datasets.index import ImageIndex
from tests.support.pictures import write_pictures


@pytest.fixture(scope="session")
def index(tmp_path_factory) -> ImageIndex:
    """24 JPEG images of varied sizes in three classes."""
    return write_pictures(tmp_path_factory.mktemp("pictures"), count=24, side=48)
