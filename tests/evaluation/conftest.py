"""What tests of evaluations share."""

import pytest

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images
from tests.support.colors import open_colors


@pytest.fixture
def colors(tmp_path) -> tuple[Config, Images]:
    """A config of noisy images in one of three colors, which every evaluation gets right, and its images."""
    return open_colors(tmp_path)
