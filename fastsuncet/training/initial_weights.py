"""`model.init`: an encoder that pre-training starts from, instead of one drawn from the seed.

The file is read once, when a run starts. The run's checkpoints record its sha256, and a resume never reads it again.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastsuncet.checkpoint import manager
from fastsuncet.checkpoint.format import META, MODEL, record_path
from fastsuncet.checkpoint.run_folder import on_rank_0
from fastsuncet.config import Config, flat
from fastsuncet.distributed.collectives import broadcast
from fastsuncet.distributed.place import Place
from fastsuncet.errors import CheckpointError
from fastsuncet.paths import typed_path
from pipelines import atomic_files

PUBLISHED = "timm"  # model.init: the weights that timm has published of the network
DRAWN_HEAD = "; the head is drawn from meta.seed"  # the end of a note
# What a checkpoint keeps: path, sha256, and a note on what was loaded and what was not.
Loaded = dict[str, str]


def load(config: Config, model: nn.Module, place: Place) -> Loaded:
    """Fill `model` with the weights in model.init, which is set, on every rank with what rank 0 reads.

    Classifier and prototypes stay as drawn, and the heads without model.init_heads. Raises
    ConfigErrors for a path that does not exist, another network than the config's, or another sha256 than
    model.init_sha256; CheckpointError for a file that cannot be used.
    """
    loaded = on_rank_0(place, lambda: _fill(config, model))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()) if place.world_size > 1 else ():
            tensor.copy_(broadcast(tensor.detach().clone(memory_format=torch.contiguous_format)))
    return loaded


def _fill(config: Config, model: nn.Module) -> Loaded:
    from fastsuncet.models.pretrained_weights import digest_of, fill, read_weights_of

    m = config.model
    if m.init == PUBLISHED:
        return _fill_published(config, model.get_submodule("encoder"))
    path = _file(config, typed_path(m.init))
    digest, about = digest_of(path), _described(path)
    _require_digest(config, digest, str(path))
    if "record_sha256" in about and about.get("sha256") != digest:
        raise CheckpointError(f"{path} was changed after it was exported: its sha256 is {digest}")
    weights = read_weights_of(m.name, path)
    if (weights.name, weights.stem) != (m.name, m.stem):
        raise config.error(
            "model.init",
            f"{path} holds a {weights.name}, stem {weights.stem}; model.name is {m.name}, model.stem {m.stem}",
        )
    heads = {"head": weights.head, **({"predictor": weights.predictor} if m.prediction_head else {})}
    if m.init_heads and not all(heads.values()):
        raise config.error(
            "model.init_heads", f"{path} does not hold the heads of this config; set it to false"
        )
    for part, tensors in {"encoder": weights.encoder, **(heads if m.init_heads else {})}.items():
        fill(model.get_submodule(part), tensors, str(path))
    what, left = ("encoder and heads", []) if m.init_heads else ("encoder", ["any projection head"])
    if weights.classifier:
        left.insert(0, f"the classifier of {len(weights.classifier[0])} classes")
    note = f"{what} from {path} ({len(weights.encoder)} tensors of the encoder, sha256 {digest[:12]})"
    note += f"; not loaded: {' and '.join(left)}" if left else ""
    note += "" if m.init_heads else DRAWN_HEAD
    trained = flat(about.get("config", {}))
    pixels = (trained.get(f"data.augmentation.{key}") for key in ("mean", "std"))
    return {"path": str(m.init), "sha256": digest, "note": note + _other_pixels(config, *pixels)}


def _described(path: Path) -> dict[str, Any]:
    """Return what lies beside the weights of a checkpoint or an export; {} for those of another program."""
    beside = [path.with_name(META)] if path.name == MODEL else []
    found = map(atomic_files.read_object, [*beside, record_path(path)])
    return next((each for each in found if isinstance(each.get("config"), dict)), {})


def _other_pixels(config: Config, mean: Any, std: Any) -> str:
    """Return the end of a note on weights for pixels normalized by `mean` and `std`, "" where these do not differ."""
    a = config.data.augmentation
    # In a JSON of another program they can be anything.
    known = isinstance(mean, (list, tuple)) and isinstance(std, (list, tuple))
    if not known or (a.mean, a.std) == (tuple(mean), tuple(std)):
        return ""
    return f"; they were trained with data.augmentation.mean {tuple(mean)} and std {tuple(std)}"


def _fill_published(config: Config, encoder: nn.Module) -> Loaded:
    from fastsuncet.models import timm_backbone
    from fastsuncet.models.pretrained_weights import fill

    m = config.model
    if m.init_heads:
        raise config.error(
            "model.init_heads", "must be false with model.init: timm, which has no projection heads"
        )
    tensors, about = timm_backbone.published(m.name)
    source = f"timm's published weights {about['architecture']}.{about.get('tag') or 'default'}"
    digest = hashlib.sha256(b"".join(x.contiguous().numpy().tobytes() for x in tensors.values())).hexdigest()
    _require_digest(config, digest, source)
    fill(encoder, tensors, source)
    note = f"encoder from {source} ({len(tensors)} tensors, sha256 {digest[:12]}){DRAWN_HEAD}"
    note += _other_pixels(config, about["mean"], about["std"])
    return {"path": PUBLISHED, "sha256": digest, "note": note}


def _require_digest(config: Config, digest: str, source: str) -> None:
    if config.model.init_sha256 not in (None, digest):
        raise config.error("model.init_sha256", f"is not the sha256 of {source}, which is {digest}")


def _file(config: Config, path: Path) -> Path:
    """Return the file of weights: `path`, or that in the folder of a run, a checkpoint or an export."""
    for file in (path, path / MODEL):
        if file.is_file():
            return file
    newest = manager.load_newest(path / manager.FOLDER)
    if newest is None:
        raise config.error(
            "model.init", f"{path} is no file of weights, and no folder of a run, checkpoint or export"
        )
    return newest.path / MODEL


def check(config: Config, meta: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a checkpoint's `meta` says that its run began with other weights than `config` says."""
    m, begun = config.model, meta["init"] or {"path": None, "sha256": None}
    now = {"path": m.init, "sha256": m.init_sha256}
    # With a sha256 it does not matter where the file lies.
    key = "sha256" if m.init_sha256 and begun["sha256"] else "path"
    if begun[key] != now[key]:
        moved = f", or set model.init_sha256={begun['sha256']} if the file was only moved"
        before, after = (
            f"{path or 'null'}{f' of sha256 {digest}' if digest else ''}"
            for path, digest in ((begun["path"], begun["sha256"]), (m.init, m.init_sha256))
        )
        raise CheckpointError(
            f"this run was started with model.init: {before}, and it is {after} now. Give the new run another "
            f"logging.write_tag{moved if m.init and begun['path'] else ''}"
        )
