"""Backbones of timm by name: `model.name: timm/NAME`, any network that maps images to one vector.

Nothing is downloaded. Networks that can take images of any size by resampling their position embedding do so.
"""

import functools
from difflib import get_close_matches
from typing import Any

import timm
import torch
from torch.nn.modules.dropout import _DropoutNd

from fastsuncet.errors import ConfigError

PREFIX = "timm/"


def create(name: str, device: str, seed: int = 0) -> Any:
    """Build timm's network `name` ("timm/NAME") without a classifier, an nn.Module: (B, 3, S, S) -> (B, width).

    Dropout and stochastic depth are off: a step draws no random numbers, so that it repeats its bits.

    Weights are timm's own initialization, drawn on the CPU from `seed` without the global random state; on "meta" there
    are none. Raises ConfigError for a name that timm does not have, with the nearest ones.
    """
    known = timm.list_models()
    short = name.removeprefix(PREFIX)
    if short not in known:
        near = get_close_matches(short, known, 3)
        hint = f"; did you mean {' or '.join(PREFIX + each for each in near)}?" if near else ""
        raise ConfigError(f"model.name: timm {timm.__version__} has no network {short}{hint}")
    options = {"pretrained": False, "num_classes": 0}
    with torch.device(device), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            network = timm.create_model(short, **options, dynamic_img_size=True)
        except TypeError:  # a network without a position embedding
            torch.default_generator.manual_seed(seed)
            network = timm.create_model(short, **options)
    for module in network.modules():
        for rate in ("drop_rate", "drop_prob", *(["p"] if isinstance(module, _DropoutNd) else [])):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return network


@functools.cache
def width_of(name: str) -> int:
    """Return the width of the vector that "timm/NAME" maps an image to. Raises ConfigError if it gives none."""
    network = create(name, "meta")
    images = torch.empty(2, *network.pretrained_cfg["input_size"], device="meta")
    try:
        shape = tuple(network(images).shape)
    except (AssertionError, AttributeError, RuntimeError, TypeError) as error:
        raise ConfigError(f"model.name: {name} cannot map images to a vector: {error}") from error
    if len(shape) != 2 or images.shape[1] != 3:
        raise ConfigError(
            f"model.name: {name} maps {tuple(images.shape)} to {shape}, not images to one vector each"
        )
    return shape[1]
