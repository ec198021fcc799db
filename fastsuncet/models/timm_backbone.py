"""Backbones of timm by name: `model.name: timm/NAME`, any network that maps images to one vector.

Only `published` downloads anything. Networks that can take images of any size by resampling their position embedding
do so.
"""

import functools
import socket
import urllib.parse
import urllib.request
from difflib import get_close_matches
from typing import Any

import torch
from huggingface_hub import constants
from torch.nn.modules.dropout import _DropoutNd

from fastsuncet.config.schema import TIMM
from fastsuncet.errors import ConfigError
from pipelines.output import first_five


def create(name: str, device: str, seed: int = 0, classes: int = 0) -> Any:
    """Build timm's network `name` ("timm/NAME") without a classifier, an nn.Module: (B, 3, S, S) -> (B, width).

    With `classes` it has timm's classifier, and gives logits.

    Dropout and stochastic depth are off: a step draws no random numbers, so that it repeats its bits.

    Weights are timm's own initialization, drawn on the CPU from `seed` without the global random state; on "meta" there
    are none. Raises ConfigError for a name that timm does not have, with the nearest ones.
    """
    import timm  # seconds, only where a network is timm's

    short = name.removeprefix(TIMM)
    if short not in timm.list_models(short):
        near = get_close_matches(short, timm.list_models(), 3)
        hint = f"; did you mean {' or '.join(TIMM + each for each in near)}?" if near else ""
        raise ConfigError(f"model.name: timm {timm.__version__} has no network {short}{hint}")
    try:
        network = _built(short, device, seed, classes)
    except RuntimeError:
        if device != "meta":
            raise
        # Before 1.0.30 timm reads numbers from tensors to build some networks, which have none there.
        network = _built(short, "cpu", seed, classes).to(device)
    for module in network.modules():
        for rate in ("drop_rate", "drop_prob", *(["p"] if isinstance(module, _DropoutNd) else [])):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return network


def _built(short: str, device: str, seed: int, classes: int) -> Any:
    """Return timm's network as timm draws it from `seed`."""
    import timm

    options = {"pretrained": False, "num_classes": classes}
    with torch.device(device), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            return timm.create_model(short, **options, dynamic_img_size=True)
        except TypeError:  # a network without a position embedding
            torch.default_generator.manual_seed(seed)
            return timm.create_model(short, **options)


def published(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return timm's published weights of "timm/NAME" or a ResNet of the same name, and timm's record of them.

    The weights are those of the encoder, on the CPU, by timm's names, which for a ResNet are torchvision's. timm
    downloads them the first time and keeps them. Raises ConfigError for a network without published weights, and where
    they cannot be had.
    """
    import timm

    short = name.removeprefix(TIMM)
    if not timm.is_model(short) or not timm.models.is_model_pretrained(short):
        raise ConfigError(f"model.init: timm {timm.__version__} has no published weights of {short}")
    # Without a network the downloader tries for a minute, though it may have the file.
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE or not _reachable()
    try:
        network: Any = timm.create_model(short, pretrained=True, num_classes=0)
    except Exception as error:  # of the network, the disk, timm and the hub, which have no common type
        reason = str(error).strip().split("\n")[0][:200]
        raise ConfigError(
            f"model.init: timm's published weights of {short} cannot be downloaded from {constants.ENDPOINT}: "
            f"{type(error).__name__}: {reason}\nConnect this machine once, or write a file of weights or null in "
            "model.init"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before
    return network.state_dict(), network.pretrained_cfg


def _reachable() -> bool:
    if urllib.request.getproxies():
        return True
    host = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((host.hostname, host.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


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


@functools.cache
def classifier_shapes(name: str, classes: int) -> dict[str, torch.Size]:
    """Return the tensors that "timm/NAME" has with a classifier and not without: shapes by timm's names, sorted."""
    headless = create(name, "meta").state_dict()
    whole = create(name, "meta", classes=classes).state_dict()
    return {key: whole[key].shape for key in sorted({*whole} - {*headless})}


def linear_shapes(name: str, classes: int) -> dict[str, torch.Size]:
    """Return `classifier_shapes` of one linear layer: bias (C,) and weight (C, width), or (C, width, 1, 1).

    Raises ConfigError for another classifier.
    """
    found = classifier_shapes(name, classes)
    if [shape.numel() for shape in found.values()] != [classes, classes * width_of(name)]:
        raise ConfigError(
            f"timm's {name.removeprefix(TIMM)} has no classifier of one linear layer, as this run or fine-tuning has, "
            f"but {first_five(list(found))}: export it to onnx, or a run without a classifier"
        )
    return found
