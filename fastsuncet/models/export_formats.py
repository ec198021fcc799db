"""Which formats a network can be exported to: what a run checks at its start, without `commands.export`."""

import importlib.util

from fastsuncet.config import Config
from fastsuncet.config.schema import TIMM
from fastsuncet.errors import ConfigError
from fastsuncet.models.resnet import OWN

ONNX = ("onnx", "onnxscript")


def exports(config: Config) -> list[str]:
    """Return the formats of `checkpoint.export`; torchvision has no network of timm's, whose state_dict is timm's."""
    named = config.checkpoint.export
    if config.model.name.startswith(TIMM):
        return list(dict.fromkeys("timm" if to == "torchvision" else to for to in named))
    return list(named)


def check(config: Config, to: str) -> None:
    """Raise ConfigError where the network of `config` cannot be exported to `to`, or a package is missing."""
    m = config.model
    if to == "torchvision" and m.name.startswith(TIMM):
        raise ConfigError(f"torchvision does not load the weights of {m.name}: export it to timm")
    c = config.criterion
    if m.name.startswith(TIMM) and to != "onnx" and c.supervised and c.supervision == "cross_entropy":
        from fastsuncet.models import timm_backbone

        timm_backbone.linear_shapes(m.name, 2)
    if to in ("timm", "safetensors") and m.name in OWN:
        raise ConfigError(f"timm has no {m.name}: export it to torchvision, which is a plain state_dict")
    if to == "safetensors" and m.stem == "cifar":
        raise ConfigError(
            "timm builds a network by its name, and no name stands for model.stem=cifar: export it to torchvision or "
            "timm, and see docs/export.md for the two lines that change the stem"
        )
    missing = [name for name in ONNX if importlib.util.find_spec(name) is None] if to == "onnx" else []
    if missing:
        raise ConfigError(f"an export to onnx needs {' and '.join(missing)}: pip install {' '.join(missing)}")
