"""What tests of evaluations share."""

import pytest

from fastsuncet.config import Config
from fastsuncet.data.dataset import Images, open_images
from tests.support.colors import ALONE, color_config, write_colors


@pytest.fixture
def colors(tmp_path) -> tuple[Config, Images]:
    """A config of noisy images in one of three colors, which every evaluation gets right, and its images."""
    config = color_config(write_colors(tmp_path))
    return config, open_images(config, ALONE, validation=True)
