"""What decides the weights that a fine-tuning ends with, and the record of one that has ended.

A folder is continued, and a record is used, only if all that decides the weights is the same.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fastsuncet.checkpoint.run_folder import disk_errors, on_rank_0, shown
from fastsuncet.config import Config, PerRank, flat
from fastsuncet.distributed.place import Place
from fastsuncet.errors import CheckpointError
from fastsuncet.evaluation.encoder import Encoder
from pipelines import atomic_files
from pipelines.datasets.index import ImageIndex
from pipelines.output import counted

# Keys of the config that decide the weights. In a fine-tuning's config, `with_sizes`, batch size and rate are numbers.
KEYS = (
    *(f"finetune.{key}" for key in ("head", "epochs", "batch_size", "lr", "momentum", "nesterov")),
    *(f"finetune.{key}" for key in ("weight_decay", "accumulate", "crop_scale")),
    *(f"data.augmentation.{key}" for key in ("size", "flip", "crop_ratio", "mean", "std")),
    *("meta.seed", "meta.precision"),
)
START = ("linear.strength", "linear.max_iterations")  # the same, of what finetune.head: linear starts from
# Those that change how numbers are rounded.
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


def labels_digest(index: ImageIndex, indices: np.ndarray) -> str:
    """Return the sha256 of the names of images and of their classes, whatever other images there are."""
    pairs = [(index.name(int(i)), index.classes[index.labels[i]]) for i in indices]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def deciding(config: Config) -> tuple[str, ...]:
    """Return the keys that decide the weights of a fine-tuning with this config."""
    return (*KEYS, *START) if config.finetune.head == "linear" else KEYS


def config_values(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of dotted keys of the config, in the types of JSON."""
    values = flat(config.canonical())
    return {key: values[key] for key in keys}


def resolve_batch(config: Config, section: str, images: int, of: str, world_size: int, passes: int) -> int:
    """Return the images of an update, from `section`.batch_size of the config.

    Raises ConfigErrors for a batch that the processes and passes cannot share, or that the `images` of the data set
    `of` do not fill.
    """
    asked, parts = getattr(config, section).batch_size, world_size * passes
    batch = asked.per_rank * world_size if isinstance(asked, PerRank) else asked
    if section == "finetune" and config.finetune.head == "linear":
        batch = max(parts, min(batch, images // parts * parts))
    if not 1 <= batch <= images or batch % parts:
        sharing = counted(world_size, "process")
        sharing += f" in {passes} passes each ({section}.accumulate)" if passes > 1 else ""
        text = f"{batch:,} images on {sharing}: must be a multiple of {parts}, and at most the {images:,}"
        raise config.error(f"{section}.batch_size", f"{text} labeled images{of}")
    return batch


def with_sizes(config: Config, **values: Any) -> Config:
    """Return the config with other `values` in its section finetune, such as numbers for batch_size and lr."""
    return config.model_copy(update={"finetune": config.finetune.model_copy(update=values)})


def sizes(config: Config) -> tuple[int, float]:
    """Return batch size and rate of a fine-tuning, with a config of `with_sizes`."""
    batch, lr = config.finetune.batch_size, config.finetune.lr
    assert isinstance(batch, int) and lr is not None, "with_sizes has set them"
    return batch, lr


def fit_identity(
    config: Config, encoder: Encoder, train: ImageIndex, indices: np.ndarray, **more: Any
) -> dict[str, Any]:
    """Return all that decides the final weights but the number of ranks: settings, `more`, and what they apply to."""
    return {
        **config_values(config, (*deciding(config), *ROUNDING)),
        **json.loads(json.dumps(more)),  # as a checkpoint gives them back, with lists for tuples
        "encoder": module_digest(encoder.module),
        "images": f"{train.fingerprint()}/{indices_digest(np.sort(indices))}",
    }


def refuse_changed(old: dict[str, Any], new: dict[str, Any], where: Path) -> None:
    """Raise CheckpointError, which names each key that differs, if `where` was begun with other settings."""
    pairs = {key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())}
    if lines := [f"\n  {key}: {shown(a)} there, {shown(b)} now" for key, (a, b) in pairs.items() if a != b]:
        raise CheckpointError(
            f"{where} was begun with other settings:{''.join(lines)}\nSet these back, or remove that folder to begin "
            "again. `fastsuncet finetune` keeps both with finetune.write_tag=ANOTHER_NAME"
        )


def read_record(path: Path, identity: dict[str, Any], place: Place) -> dict[str, Any] | None:
    """Return the record that rank 0 finds in `path`, None if there is none. Collective.

    Raises CheckpointError for a damaged one and for that of other settings.
    """

    def read() -> dict[str, Any] | None:
        try:
            record = json.loads(path.read_bytes())
            refuse_changed(record["identity"], identity, path.parent)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{path} is not the record of a fine-tuning ({problem}): remove it"
            ) from error
        return record

    return on_rank_0(place, read)


def write_record(path: Path, record: dict[str, Any], identity: dict[str, Any], place: Place) -> None:
    """Write the record of what has ended on rank 0, under the folder's lock. CheckpointError if the disk refuses."""
    if place.first:
        with disk_errors(path):
            atomic_files.replace(path, atomic_files.as_json({**record, "identity": identity}))
