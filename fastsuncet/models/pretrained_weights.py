"""A ResNet's weights in a file of another program: torchvision's, timm's, the authors', or a trainer's around one.

What is looked for is a `conv1.weight` of three input channels; what stands before that name (`module.`, `encoder.`,
...) is a prefix, and the shapes say which network it is. They cannot say how it is strided or blurred: timm's resnetaa
and resnetblur look like a plain ResNet. Nothing in a file is run: tensors and plain types are read.
"""

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fastsuncet.errors import CheckpointError
from fastsuncet.models.flops import SHAPES
from fastsuncet.models.resnet import WIDTHS

# Where trainers put the network in what they save: the authors, torchvision's references and timm, many others.
WRAPPINGS = ("encoder", "state_dict", "model", "model_state_dict", "state_dict_ema", "model_ema")
TRUNK = re.compile(r"(conv1|bn1|layer\d+)\.")
HEADS = re.compile(r"(fc|pred|head|classifier|prototypes|projection_head)\.")  # on top of a trunk; not of it
STATISTICS = ("running_mean", "running_var")
_SHOWN = 4  # keys told in a message; the rest are counted
CONVERT = (
    'python -c \'import sys, torch; torch.save({"state_dict": torch.load(sys.argv[1], map_location="cpu", '
    'weights_only=False)["state_dict"]}, sys.argv[2])\' IN OUT'
)


@dataclass(frozen=True)
class Weights:
    """A ResNet found in a file, on the CPU."""

    name: str  # as in model.name
    stem: str  # "imagenet" or "cifar"
    encoder: dict[str, Tensor]  # torchvision's names, without fc
    classifier: tuple[Tensor, Tensor] | None  # fc: weight (C, width), bias (C,); None: other heads, or none


def read_weights(path: Path) -> Weights:
    """The ResNet in the file `path`. Raises CheckpointError: not such a file, no ResNet in it, or one unknown here."""
    tensors = _network(path, _read(path))
    trunk = {key: value for key, value in tensors.items() if TRUNK.match(key)}
    others = [key for key in tensors if not TRUNK.match(key) and not HEADS.match(key)]
    if others:
        raise CheckpointError(
            f"{path} holds a network with {told(others)} beside conv1, bn1 and its layers: {_known()}"
        )
    name, stem = _identify(path, trunk)
    return Weights(name, stem, trunk, _classifier(tensors, WIDTHS[name]))


def fill(encoder: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Loads `tensors` into `encoder`, all of them or none. Raises CheckpointError with every key that does not fit.

    num_batches_tracked may be missing (files from before it existed): nothing here reads it.
    """
    own = encoder.state_dict()
    missing = [key for key in own if key not in tensors and not key.endswith("num_batches_tracked")]
    if missing and all(key.endswith(STATISTICS) for key in missing):
        raise CheckpointError(
            f"{source} has no BatchNorm statistics ({told(missing)}): its parameters were saved without the buffers, "
            "and without them no image can be evaluated. Save `module.state_dict()` whole"
        )
    problems = [f"missing: {told(missing)}"] if missing else []
    if unknown := [key for key in tensors if key not in own]:
        problems.append(f"not in this network: {told(unknown)}")
    problems += [
        f"{key} is {tuple(tensors[key].shape)}, {tuple(value.shape)} is wanted"
        for key, value in own.items()
        if key in tensors and tensors[key].shape != value.shape
    ][:_SHOWN]
    if problems:
        raise CheckpointError("\n  ".join([f"{source} does not fit the network:", *problems]))
    broken = [key for key, value in tensors.items() if not torch.isfinite(value).all()]
    if broken:
        raise CheckpointError(f"{source} has weights that are not finite numbers: {told(broken)}")
    encoder.load_state_dict({**own, **tensors})


def told(keys: list[str]) -> str:
    """The first few of `keys`, and how many more there are."""
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        # torch's own advice is to allow everything; only the name of what was met is passed on.
        if met := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"{path} holds a {met[1]} beside its tensors. Reading that would run code from the file, so nothing "
                "of it was read. If you trust whoever made it, write its tensors alone to another file (with the "
                f"key it keeps them under):\n  {CONVERT}"
            ) from error
        raise CheckpointError(_no_file(path)) from error
    except MemoryError:
        raise
    except Exception as error:  # the parsers raise many types for bytes that are no such file
        raise CheckpointError(_no_file(path)) from error


def _no_file(path: Path) -> str:
    return (
        f"{path} is no file of tensors, or is damaged: a torch.save file or .safetensors is wanted, or the folder of "
        "a run or of one of its checkpoints"
    )


def _network(path: Path, content: Any) -> dict[str, Tensor]:
    """The tensors of the one network in `content`, by names without the prefix they share."""
    inner = content
    while isinstance(inner, Mapping) and not any(isinstance(value, Tensor) for value in inner.values()):
        wrapped = [key for key in WRAPPINGS if isinstance(inner.get(key), Mapping)]
        if not wrapped:
            break
        inner = inner[wrapped[0]]
    if not isinstance(inner, Mapping) or not any(isinstance(value, Tensor) for value in inner.values()):
        held = (
            f"the keys {told([str(key) for key in inner])}"
            if isinstance(inner, Mapping)
            else f"a {type(inner).__name__}"
        )
        raise CheckpointError(
            f"{path} holds no state_dict but {held}; it is looked for at the top and under {', '.join(WRAPPINGS)}"
        )
    tensors = {str(key): value for key, value in inner.items() if isinstance(value, Tensor)}
    first = [
        key.removesuffix("conv1.weight")
        for key, value in tensors.items()
        if re.search(r"(^|\.)conv1\.weight$", key)
        and "layer" not in key
        and value.ndim == 4
        and value.shape[1] == 3
    ]
    if not first:
        raise CheckpointError(
            f"{path} holds no ResNet: none of its {len(tensors)} tensors ({told(list(tensors))}) is a conv1.weight on "
            f"three channels. {_known()}"
        )
    if len(first) > 1:
        raise CheckpointError(
            f"{path} holds {len(first)} networks, under {told(first)}: write the one you mean to a file of its own"
        )
    return {key.removeprefix(first[0]): value for key, value in tensors.items() if key.startswith(first[0])}


def _identify(path: Path, trunk: Mapping[str, Tensor]) -> tuple[str, str]:
    """(name, stem) by the number of blocks and the first convolution; `fill` then compares every shape."""
    found = {match.groups() for key in trunk if (match := re.match(r"layer(\d+)\.(\d+)\.", key))}
    stages = sorted({int(stage) for stage, _ in found})
    blocks = tuple(sum(int(stage) == s for stage, _ in found) for s in stages)
    bottleneck = any(key.startswith("layer1.0.conv3.") for key in trunk)
    for name, shape in SHAPES.items():
        if shape.blocks == blocks and shape.bottleneck == bottleneck:
            return name, "imagenet" if trunk["conv1.weight"].shape[-1] == 7 else "cifar"
    kind = "three" if bottleneck else "two"
    raise CheckpointError(
        f"{path} holds a ResNet with {'-'.join(map(str, blocks)) or 'no'} blocks of {kind} convolutions: {_known()}"
    )


def _classifier(tensors: Mapping[str, Tensor], width: int) -> tuple[Tensor, Tensor] | None:
    """fc, where it is a linear layer on the encoder; any other shape is a head of something else."""
    weight, bias = tensors.get("fc.weight"), tensors.get("fc.bias")
    if weight is None or weight.ndim != 2 or weight.shape[1] != width:
        return None
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    return (weight.float(), bias.float()) if bias.shape == weight.shape[:1] else None


def _known() -> str:
    return f"the networks here are {', '.join(SHAPES)}, as torchvision builds them"
