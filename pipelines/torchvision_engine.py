"""The same streams with the same parameters in plain torchvision: the oracle of the DALI graphs, and their
fallback.

Image by image and readable; no more than that. Where DALI is absent it feeds a CPU or a small GPU run.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from pipelines.datasets.image_headers import readable_by_pil
from pipelines.sampling.augmentation import (
    Augmentation,
    Center,
    CenterParams,
    ViewParams,
    blur_windows,
)
from pipelines.sampling.step_plan import Visit

# PIL alone reads more (GIF, EPS, ...), but a folder that trains here must train with DALI too.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF")

# DALI's linear colour space: luma, and a plane in which hue is an angle and saturation a radius.
YIQ = torch.tensor(
    [[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]], dtype=torch.float64
)


class TwinEngine:
    """Reads the views of first_step, first_step + 1, ... `prefetch` steps ahead, on `threads` threads."""

    def __init__(
        self,
        index: Any,
        augmentations: Sequence[Augmentation | Center],
        *,
        visit: Callable[[int], Visit],
        first_step: int,
        batch: int,
        device: str,
        device_id: int,
        threads: int,
        prefetch: int,
        dtype: torch.dtype,
    ):
        self._index, self._augmentations, self._visit = index, augmentations, visit
        self._step, self._prefetch, self._dtype = first_step, prefetch, dtype
        self._device = torch.device("cuda", device_id) if device == "gpu" else torch.device("cpu")
        self._pool = ThreadPoolExecutor(threads)
        self._pending: dict[int, list[Future]] = {}

    def __del__(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def run(self) -> list[torch.Tensor]:
        """The next step's views, each (B, 3, S, S) channels-last. Raises RuntimeError for a file PIL cannot
        decode."""
        for step in range(self._step, self._step + self._prefetch):
            if step not in self._pending:
                try:
                    visit = self._visit(step)
                except StopIteration:
                    break
                rows = range(len(visit.indices))
                self._pending[step] = [self._pool.submit(self._one_image, visit, row) for row in rows]
        rows = [future.result() for future in self._pending.pop(self._step)]
        self._step += 1
        return [
            torch.stack(view).to(self._device, self._dtype, memory_format=torch.channels_last)
            for view in zip(*rows)
        ]

    def _one_image(self, visit: Visit, row: int) -> list[torch.Tensor]:
        i = int(visit.indices[row])
        pixels = read_rgb(self._index.content(i)) if self._index.pixels is None else self._index.pixels[i]
        if pixels.shape[:2] != tuple(self._index.sizes[i]):
            # torchvision would pad a crop that reaches over the edge; DALI's slice refuses it.
            raise RuntimeError(f"{self._index.name(i)} has not the size that its crop was drawn for")
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        return [
            (centred if isinstance(augmentation, Center) else augmented)(image, view, row, augmentation)
            for augmentation, view in zip(self._augmentations, visit.views)
        ]


def augmented(image: torch.Tensor, view: ViewParams, row: int, augmentation: Augmentation) -> torch.Tensor:
    """One augmented view, (3, S, S) float32, of a (3, H, W) uint8 image."""
    size = [augmentation.size, augmentation.size]
    image = F.resized_crop(image, *view.box[row].tolist(), size, InterpolationMode.BILINEAR, antialias=True)
    if view.flip[row]:
        image = F.horizontal_flip(image)
    if augmentation.recolors:
        recolor = twist if augmentation.color == "fast" else jitter
        factors = (view.brightness, view.contrast, view.saturation, view.hue)
        image = recolor(image, *(float(factor[row]) for factor in factors))
    if view.grey[row]:
        image = F.rgb_to_grayscale(image, num_output_channels=3)
    if view.sigma[row] > 0:
        window = augmentation.blur_window
        if window == "auto":
            window = int(blur_windows(view.sigma[row]))
        image = F.gaussian_blur(image, [window, window], [float(view.sigma[row])])
    return normalise(image, augmentation)


def centred(image: torch.Tensor, view: CenterParams, row: int, center: Center) -> torch.Tensor:
    """The evaluation view, (3, S, S) float32, of a (3, H, W) uint8 image."""
    image = F.resize(image, view.resized[row].tolist(), InterpolationMode.BILINEAR, antialias=True)
    image = F.crop(image, *view.corner[row].tolist(), center.size, center.size)
    return normalise(image, center)


def jitter(
    image: torch.Tensor, brightness: float, contrast: float, saturation: float, hue: float
) -> torch.Tensor:
    """torchvision's ColorJitter in the fixed order brightness, contrast, saturation, hue (in turns)."""
    if brightness != 1:
        image = F.adjust_brightness(image, brightness)
    if contrast != 1:
        image = F.adjust_contrast(image, contrast)
    if saturation != 1:
        image = F.adjust_saturation(image, saturation)
    if hue != 0:
        image = F.adjust_hue(image, hue)
    return image


def twist(
    image: torch.Tensor, brightness: float, contrast: float, saturation: float, hue: float
) -> torch.Tensor:
    """The same factors as one linear map, which is what DALI's color_twist computes.

    Saturation scales and hue turns the plane beside luma, contrast turns about a fixed 128, brightness
    scales; pixels are rounded and clipped once, at the end.
    """
    angle = torch.tensor(2 * torch.pi * hue, dtype=torch.float64)
    plane = torch.eye(3, dtype=torch.float64)
    plane[1:, 1:] = saturation * torch.stack(
        [torch.stack([angle.cos(), angle.sin()]), torch.stack([-angle.sin(), angle.cos()])]
    )
    matrix = brightness * contrast * torch.linalg.inv(YIQ) @ plane @ YIQ
    pixels = matrix @ image.double().flatten(1) + brightness * (1 - contrast) * 128
    return pixels.round().clamp(0, 255).to(torch.uint8).view_as(image)


def normalise(image: torch.Tensor, augmentation: Augmentation | Center) -> torch.Tensor:
    """uint8 to float32 in [0, 1], then (x - mean) / std."""
    image = F.to_dtype(image, torch.float32, scale=True)
    return F.normalize(image, list(augmentation.mean), list(augmentation.std))


def read_rgb(file: os.PathLike | bytes) -> np.ndarray:
    """An image file, or what it held, as (H, W, 3) uint8 RGB, EXIF orientation ignored. RuntimeError when it cannot
    be decoded."""
    try:
        with Image.open(readable_by_pil(file), formats=FORMATS) as image:
            return np.array(image.convert("RGB"))
    except Exception as error:  # PIL's plug-ins raise OSError, SyntaxError, ValueError, struct.error, ...
        raise RuntimeError(f"{'a packed image' if isinstance(file, bytes) else file}: {error}") from error


def pil_decode(file: os.PathLike | bytes) -> tuple[int, int]:
    """The (height, width) of a file that decodes; RuntimeError for one that does not. For pipelines.find_bad_images."""
    height, width, _channels = read_rgb(file).shape
    return height, width
