"""SimCLR's two views as torchvision's users make them: transforms v2 in a DataLoader."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler

from pipelines.datasets.folders import image_tree
from pipelines.sampling.augmentation import blur_windows

WORKERS, SIGMA = 2, (0.1, 2.0)


class Files(Dataset):
    """A file -> what `views` makes of it; the file is decoded once."""

    def __init__(self, paths: list[Path], views: Callable[[Image.Image], Any]):
        self.paths, self.views = paths, views

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        return self.views(Image.open(self.paths[i]).convert("RGB"))


def data_loader(folder: str, views: Callable[[Image.Image], Any], batch: int) -> DataLoader:
    """Return torchvision's way to read a tree of images: batches of what `views` makes, without end."""
    index = image_tree(folder)
    data = Files([index.path(i) for i in range(len(index))], views)
    # Epoch after epoch in new orders, so that workers start only once and no batch is ragged.
    order = RandomSampler(data, num_samples=10**12)
    # Forked, so that `views` can be any function.
    return DataLoader(data, batch, sampler=order, num_workers=WORKERS, multiprocessing_context="fork")


def two_views(kind: str, blur: str) -> Callable[[Image.Image], tuple[Any, Any]]:
    """Return two draws of the recipe's augmentation by torchvision's own transforms, on "tensors" (uint8) or "PIL".

    `blur`: "23", or "sigma" for a kernel as wide as its sigma needs, which v2 itself does not offer.
    """

    from torchvision.transforms import v2  # takes three seconds

    def sigma_blur(image: Any) -> Any:
        sigma = float(torch.empty(()).uniform_(*SIGMA))
        window = int(blur_windows(np.array(sigma)))
        return v2.functional.gaussian_blur(image, [window, window], [sigma, sigma])

    transform = v2.Compose(
        [
            *([v2.PILToTensor()] if kind == "tensors" else []),
            v2.RandomResizedCrop(224, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.RandomApply([v2.GaussianBlur(23, SIGMA) if blur == "23" else v2.Lambda(sigma_blur)], p=0.5),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    return lambda image: (transform(image), transform(image))
