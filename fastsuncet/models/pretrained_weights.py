"""Read a ResNet's weights from a file of another program: torchvision, timm, the authors, or another trainer.

The reader looks for a `conv1.weight` of three input channels; what stands before that name (`module.`,
`encoder.`, ...) is a prefix, and the keys say which network it is. They cannot say how it is strided or
blurred: timm's resnetaa and resnetblur look like a plain ResNet. Only tensors and plain types are read, and no
code in the file is run.
"""

import functools
import hashlib
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fastsuncet.config.schema import TIMM
from fastsuncet.errors import CheckpointError
from fastsuncet.models import timm_backbone
from fastsuncet.models.resnet import OWN, WIDTHS, build_model
from pipelines.output import first_five

# Where trainers put the network in their files: the authors, torchvision's references and timm, many others. As timm
# does, averaged weights are taken before those that they are averages of; DINO's are its teacher, and beside a "model"
# a teacher can be another network.
WRAPPINGS = ("state_dict_ema", "model_ema", "encoder", "state_dict", "model", "model_state_dict", "teacher")
TRUNK = re.compile(r"(conv1|bn1|layer\d+)\.")
HEADS = re.compile(r"(fc|pred|predictor|head|classifier|prototypes|projection_head)\.")  # on top of the trunk
# The layers of PAWS's heads in its authors' files -> here.
PAWS_HEAD = {"fc1": "0", "bn1": "1", "fc2": "3", "bn2": "4", "fc3": "6"}
PAWS_PREDICTOR = {"bn1": "0", "fc1": "1", "bn2": "2", "fc2": "4"}
MOST_BYTES = 20 << 30  # of a file of weights; torch.load reads it whole
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
KNOWN = (
    f"fastsuncet has {', '.join(name for name in WIDTHS if name not in OWN)} as torchvision builds them, and its own "
    + " and ".join(OWN)
)
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
    classifier: tuple[Tensor, Tensor] | None  # fc: weight (C, width), bias (C,); None: no or another head
    head: dict[str, Tensor] = field(default_factory=dict)  # of the projection head; empty: none
    predictor: dict[str, Tensor] = field(default_factory=dict)  # of PAWS's prediction head


def read_weights(path: Path) -> Weights:
    """Return the ResNet in the file `path`.

    Raises CheckpointError: no such file, damaged, no ResNet in it, or a network that is not known here.
    """
    tensors = _network(path, _tensors(path))
    trunk = {key: value for key, value in tensors.items() if TRUNK.match(key)}
    others = [key for key in tensors if not TRUNK.match(key) and not HEADS.match(key)]
    if others:
        raise CheckpointError(
            f"{path} holds a network with other keys than conv1, bn1 and its layers: {first_five(others)}. {KNOWN}"
        )
    _refuse_odd(path, tensors)
    name = _name_of(path, trunk)
    stem = "imagenet" if trunk["conv1.weight"].shape[-1] == 7 else "cifar"
    return Weights(name, stem, trunk, _classifier(tensors, "fc", WIDTHS[name]), *heads(tensors))


def read_weights_of(name: str, path: Path) -> Weights:
    """Return the weights of the network `name` in the file `path`; those of a timm/NAME have timm's names.

    Raises CheckpointError as `read_weights`; whether the tensors of a timm/NAME fit is found out by `fill`.
    """
    if not name.startswith(TIMM):
        return read_weights(path)
    tensors = _tensors(path)
    # Some networks of timm have tables of positions in int64.
    _refuse_odd(path, {key: value for key, value in tensors.items() if value.dtype != torch.int64})
    network = timm_backbone.create(name, "meta").state_dict()
    own = [key for key in network if not key.endswith("num_batches_tracked")]
    # What stands before the network's names: "encoder." in a checkpoint of this project, "module." in those of DDP.
    prefixes = [key.removesuffix(own[0]) for key in tensors if key.endswith(own[0])]
    _refuse_several(path, [each for each in prefixes if all(f"{each}{key}" in tensors for key in own)])
    prefix = max(prefixes, key=lambda each: sum(f"{each}{key}" in tensors for key in own), default="")
    found = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
    layers = {key.rpartition(".")[0] for key in timm_backbone.classifier_shapes(name, 2)}
    # Of several layers none is a linear classifier on the encoder.
    classifier = _classifier(found, min(layers), timm_backbone.width_of(name)) if len(layers) == 1 else None
    ends = tuple(f"{layer}." for layer in layers)
    found = {key: x for key, x in found.items() if key in network or not key.startswith(ends)}
    # Below the prefix a "head" is timm's.
    beside = {key: x for key, x in tensors.items() if not key.startswith(prefix)}
    return Weights(name, "imagenet", found, classifier, *heads(beside))


def fill(encoder: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load `tensors` into `encoder`, all of them or none. Raises as `require_fit`, and for values not finite."""
    require_fit(encoder, tensors, source)
    broken = [key for key, value in tensors.items() if not torch.isfinite(value).all()]
    if broken:
        raise CheckpointError(f"{source} has weights that are not finite numbers: {first_five(broken)}")
    encoder.load_state_dict({**encoder.state_dict(), **tensors})


def require_fit(encoder: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise CheckpointError with every key of `tensors` that does not fit `encoder`, which needs no memory.

    num_batches_tracked can be missing, as in files from before it existed: nothing here reads it.
    """
    own = encoder.state_dict()
    missing = [key for key in own if key not in tensors and not key.endswith("num_batches_tracked")]
    unknown = [key for key in tensors if key not in own]
    other_shapes = [
        f"{key} is {tuple(tensors[key].shape)}, expected {tuple(value.shape)}"
        for key, value in own.items()
        if key in tensors and tensors[key].shape != value.shape
    ]
    problems = [f"missing: {first_five(missing)}"] * bool(missing)
    problems += [f"not in this network: {first_five(unknown)}"] * bool(unknown)
    problems += other_shapes[:5]
    if problems:
        raise CheckpointError("\n  ".join([f"{source} does not fit the network:", *problems]))


def digest_of(path: Path) -> str:
    """Return the sha256 of a file of weights. Raises CheckpointError for one that is larger than any network."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise CheckpointError(
            f"{path} has {size / 1e9:,.0f} GB, and files of weights have at most {MOST_BYTES / 1e9:,.0f}"
        )
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _read(path: Path) -> Any:
    try:
        if path.suffix.lower() == ".safetensors":
            return safetensors.torch.load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError as error:
        raise CheckpointError(f"{path} is damaged, or larger than the memory of this machine") from error
    except Exception as error:  # the parsers raise many types for bytes that are no such file
        # torch's own message advises to allow everything, so only the name of the refused object is passed on.
        found = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if found is None:
            message = (
                f"{path} is damaged or is not a file of tensors. Give a torch.save or .safetensors file, or the "
                "folder of a run or of one of its checkpoints"
            )
        else:
            message = (
                f"{path} holds a {found[1]} next to its tensors. Reading that would run code from the file, so "
                "nothing of it was read. If you trust its author, write only its tensors to another file (with "
                f"the key that holds them):\n  {CONVERT}"
            )
        raise CheckpointError(message) from error


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of the state_dict in the file, at the top or under WRAPPINGS."""
    inner = _read(path)
    for _ in WRAPPINGS:  # not for ever: a mapping can hold itself
        values = [inner.get(key) for key in WRAPPINGS] if isinstance(inner, Mapping) else []
        inner = next(
            (value for value in values if isinstance(value, Mapping) and _holds_tensors(value)), inner
        )
    named = inner if isinstance(inner, Mapping) else {}
    if tensors := {str(key): value for key, value in named.items() if isinstance(value, Tensor)}:
        return tensors
    keys = f"the keys {first_five([*map(str, named)])}" if named else f"a {type(inner).__name__}"
    raise CheckpointError(
        f"{path} holds no state_dict but {keys}; it must be at the top or under {', '.join(WRAPPINGS)}"
    )


def _holds_tensors(value: Mapping[Any, Any]) -> bool:
    return any(isinstance(x, Tensor) for x in value.values()) or any(key in value for key in WRAPPINGS)


def _network(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the one network among `tensors`, by names without the prefix they share."""
    prefixes = [
        key.removesuffix("conv1.weight")
        for key, value in tensors.items()
        if re.search(r"(^|\.)conv1\.weight$", key) and "layer" not in key and value.shape[1:2] == (3,)
    ]
    if not prefixes:
        raise CheckpointError(
            f"{path} holds no ResNet: none of its {len(tensors)} tensors ({first_five([*tensors])}) is a conv1.weight "
            f"of three channels. {KNOWN}"
        )
    _refuse_several(path, prefixes)
    (prefix,) = prefixes
    found = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    # The heads of this project's checkpoints are beside the encoder.
    return found | {key: x for key, x in tensors.items() if key.startswith(("head.", "predictor."))}


def _refuse_several(path: Path, prefixes: list[str]) -> None:
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{path} holds {len(prefixes)} networks, under {first_five(prefixes)}. Write the one you want to its own "
            "file"
        )


def heads(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the projection head and of the prediction head, by the keys of `Model.head`, `.predictor`.

    They are `head.0.weight` in this project, `fc.0.weight` in SuNCEt's first release, `fc.fc1.weight` in PAWS's.
    """
    projection, prediction = {}, {}
    for key, tensor in tensors.items():
        part, layer, name = (*key.split(".", 2), "", "")[:3]
        if part in ("fc", "head") and name:
            projection[f"{PAWS_HEAD.get(layer, layer)}.{name}"] = tensor
        elif part in ("pred", "predictor") and name:
            prediction[f"{PAWS_PREDICTOR.get(layer, layer)}.{name}"] = tensor
    return projection, prediction


def _refuse_odd(path: Path, tensors: Mapping[str, Tensor]) -> None:
    odd = [f"{key} ({kind})" for key, value in tensors.items() if (kind := _odd(value))]
    if odd:
        raise CheckpointError(
            f"{path} holds tensors that are no weights: {first_five(odd)}. Write them as dense float32 tensors"
        )


def _odd(tensor: Tensor) -> str:
    """Return what makes a tensor no weight, an empty string for a dense one of numbers that a network computes with."""
    if tensor.is_meta:
        return "without values, on the device meta"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return "quantized" if tensor.is_quantized else str(tensor.layout)
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        return f"expanded from fewer values to {tensor.nbytes / 1e9:,.1f} GB"
    counts = tensor.ndim == 0 and tensor.dtype == torch.int64  # num_batches_tracked
    return "" if counts or tensor.dtype in FLOATS else str(tensor.dtype)


def _structure(keys: Iterable[str]) -> tuple[tuple[int, ...], bool]:
    """Return a ResNet's number of blocks in each stage, and whether a block has three convolutions."""
    keys = list(keys)
    blocks = {match.groups() for key in keys if (match := re.match(r"layer(\d+)\.(\d+)\.", key))}
    stages = [stage for stage, _ in blocks]
    counts = tuple(stages.count(stage) for stage in sorted(set(stages), key=int))
    return counts, any(key.startswith("layer1.0.conv3.") for key in keys)


@functools.cache  # each builds a network
def _structure_of(name: str) -> tuple[tuple[int, ...], bool]:
    return _structure(build_model(name, stem="cifar", device="meta").encoder.state_dict())


def _name_of(path: Path, trunk: Mapping[str, Tensor]) -> str:
    """Return the name of the network with this structure; `fill` then compares every shape."""
    blocks, bottleneck = found = _structure(trunk)
    for name in WIDTHS:
        if _structure_of(name) == found:
            return name
    raise CheckpointError(
        f"{path} holds a ResNet with {'-'.join(map(str, blocks)) or 'no'} blocks of "
        f"{'three' if bottleneck else 'two'} convolutions. {KNOWN}"
    )


def _classifier(tensors: Mapping[str, Tensor], layer: str, width: int) -> tuple[Tensor, Tensor] | None:
    """Return `layer` where it is linear on the encoder, or a 1x1 convolution; one of another shape is another head."""
    weight, bias = (tensors.get(f"{layer}.{part}") for part in ("weight", "bias"))
    if weight is None or weight.shape[1:] not in ((width,), (width, 1, 1)):
        return None
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    return (weight.flatten(1).float(), bias.float()) if bias.shape == weight.shape[:1] else None
