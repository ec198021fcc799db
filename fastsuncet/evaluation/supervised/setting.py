"""The numbers of a supervised fit, and whether a batch fits them."""

from dataclasses import dataclass
from typing import Literal

from fastsuncet.distributed.launch import Place
from fastsuncet.errors import ConfigError


@dataclass(frozen=True)
class FitSetting:
    """The numbers of a fit."""

    steps: int  # updates
    batch: int  # images an update, over all processes and passes
    lr: float  # of the first update
    momentum: float
    nesterov: bool
    weight_decay: float  # of every parameter
    size: int  # pixels of a crop
    resize: int  # pixels of the shorter side before the centre crop of an evaluation
    crop_scale: tuple[float, float]  # share of the image's area
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    num_classes: int
    loss: Literal["softmax", "sigmoid"]  # sigmoid: several classes an image, of the index's `presence`
    # torch's, the share of the running statistics that a batch replaces; None: the encoder's
    bn_momentum: float | None
    seed: int
    precision: str  # of meta.precision
    accumulate: int  # passes an update
    flip: float = 0.5  # probability
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height
    save_every: int = 1000  # updates; beside the last one and a signal


def require_batch(setting: FitSetting, images: int, place: Place) -> None:
    """Raises ConfigError for a batch that its processes and passes cannot share, or that `images` do not fill."""
    parts = place.world_size * setting.accumulate
    if setting.batch < 1 or setting.batch % parts:
        raise ConfigError(
            f"a batch of {setting.batch:,} images cannot be shared by {place.world_size} processes in "
            f"{setting.accumulate} passes each: it must be a multiple of {parts}"
        )
    if images < setting.batch:
        fits = images // parts * parts
        advice = f"the largest batch that fits is {fits:,}" if fits else f"{parts} images are the least"
        raise ConfigError(f"{images:,} labeled images do not fill a batch of {setting.batch:,}: {advice}")
