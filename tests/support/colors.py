"""A data set that every evaluation gets right: noisy images in one of three colors, as PNG files in folders."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from fastsuncet.config import Config, load_config
from fastsuncet.data.dataset import Images, open_images
from fastsuncet.distributed.place import Place

ALONE = Place(0, 1, torch.device("cpu"))


class MeanColor(nn.Module):
    """Return the mean blue, green and red of an image: the scores of the classes b, g and r."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3)).flip(1)


def write_colors(folder: Path) -> Path:
    """Write 18 training and 11 validation images of r, g and b below `folder`, and a config; return `folder`."""
    rng = np.random.default_rng(0)
    for part, counts in (("train", (5, 6, 7)), ("val", (3, 4, 4))):
        for c, count in enumerate(counts):
            (folder / part / "rgb"[c]).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = rng.integers(0, 60, (24 + i, 30, 3))
                pixels[:, :, c] += 150
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / "rgb"[c] / f"{i}.png")
    (folder / "colors.yaml").write_text(
        f"data: {{kind: image_folder, root: {folder}, decode_threads: 1, split: {{kind: all}}, "
        "augmentation: {size: 16, blur: 0.0}}\n"
        "criterion: {temperature: 0.1, unsupervised_batch_size: 6}\n"
        "optimization: {epochs: 1, lr: 1.0}\n"
        "model: {name: resnet_tiny}\n"
        f"logging: {{folder: {folder / 'runs'}}}\n"
    )
    return folder


def color_config(folder: Path, *overrides: str) -> Config:
    """Load the config that `write_colors` wrote."""
    return load_config(folder / "colors.yaml", overrides)


def open_colors(folder: Path, *overrides: str) -> tuple[Config, Images]:
    """Write the data set below `folder`, and return its config and its images."""
    config = color_config(write_colors(folder), *overrides)
    return config, open_images(config, ALONE, validation=True)
