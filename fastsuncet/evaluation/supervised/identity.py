"""What decides the weights that a fine-tuning ends with: a folder is continued only if all of it is the same."""

import hashlib
import json
from collections.abc import Iterable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fastsuncet.config import Config
from fastsuncet.errors import CheckpointError
from fastsuncet.evaluation.encoder import Encoder
from pipelines.datasets.index import ImageIndex

# Keys of the config that change how numbers are rounded.
ROUNDING = ("meta.device", "meta.channels_last", "meta.compile", "meta.threads", "data.backend")


def module_digest(module: nn.Module) -> str:
    """Return the sha256 of a module's names, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        values = tensor.detach().cpu().contiguous().numpy()
        digest.update(f"{name} {values.dtype} {values.shape}\n".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def indices_digest(indices: np.ndarray) -> str:
    """Return the sha256 of ascending image numbers."""
    return hashlib.sha256(indices.astype("<i8").tobytes()).hexdigest()


def config_values(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of dotted keys of the config, in the types of JSON."""
    values = config.canonical()
    return {key: reduce(getitem, key.split("."), values) for key in keys}


def fit_identity(
    settings: dict[str, Any], encoder: Encoder, train: ImageIndex, indices: np.ndarray, config: Config
) -> dict[str, Any]:
    """Return all that decides the final weights but the number of ranks: `settings`, and what they apply to."""
    return {
        **json.loads(json.dumps(settings)),  # as a checkpoint gives them back, with lists for tuples
        "encoder": module_digest(encoder.module),
        "images": f"{train.fingerprint()}/{indices_digest(np.sort(indices))}",
        **config_values(config, ROUNDING),
    }


def refuse_changed(old: dict[str, Any], new: dict[str, Any], where: Path, remedy: str) -> None:
    """Raise CheckpointError, which names each key that differs, if `where` was begun with other settings."""
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    if changed:
        lines = [f"{key}: {_shown(old.get(key))} there, {_shown(new.get(key))} now" for key in changed]
        raise CheckpointError(
            "\n  ".join([f"{where} was begun with other settings:", *lines]) + f"\n{remedy}"
        )


def _shown(value: Any) -> str:
    """Return a value as text, a long digest cut short."""
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 60 else repr(value)
