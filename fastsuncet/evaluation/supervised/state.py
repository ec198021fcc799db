"""What a fit saves and continues from, and what must be the same for it to continue."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fastsuncet.config import Config
from fastsuncet.console import Say
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import CheckpointError
from fastsuncet.evaluation.encoder import Encoder
from fastsuncet.metrics.cost import RunCost
from fastsuncet.metrics.interval import MetricsInterval
from fastsuncet.training import state
from pipelines.datasets.index import ImageIndex

# What changes how numbers are rounded, beside the settings of the fit itself.
ROUNDING = ("meta.device", "meta.channels_last", "meta.compile", "meta.threads", "data.backend")


def digest_of(module: nn.Module) -> str:
    """sha256 of a module's names, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        values = tensor.detach().cpu().contiguous().numpy()
        digest.update(f"{name} {values.dtype} {values.shape}\n".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def identity_of(
    numbers: dict[str, Any], encoder: Encoder, train: ImageIndex, indices: np.ndarray, config: Config
) -> dict[str, Any]:
    """All that decides the weights a fit ends with, but the number of ranks: `numbers`, and what they apply to."""
    chosen = hashlib.sha256(np.sort(indices).astype("<i8").tobytes()).hexdigest()
    values = config.canonical()
    return {
        **json.loads(json.dumps(numbers)),  # as a checkpoint will give them back: tuples are lists there
        "encoder": digest_of(encoder.module),
        "images": f"{train.fingerprint()}/{chosen}",
        **{key: values[key.split(".")[0]][key.split(".")[1]] for key in ROUNDING},
    }


def refuse_changed(old: dict[str, Any], new: dict[str, Any], where: Path, remedy: str) -> None:
    """Raises CheckpointError, which names each key that differs, if `where` was begun with other values."""
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    if changed:
        lines = [f"{key}: {_shown(old.get(key))} there, {_shown(new.get(key))} now" for key in changed]
        raise CheckpointError(
            "\n  ".join([f"{where} was begun with other settings:", *lines]) + f"\n{remedy}"
        )


def _shown(value: Any) -> str:
    """A value, or the beginning of a digest."""
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 60 else repr(value)


def save(
    folder: Path,
    step: int,  # updates done
    *,
    model: nn.Module,  # keys encoder.*, classifier.*
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    interval: MetricsInterval,
    sums: torch.Tensor,  # (W, T) of the interval
    ledger: RunCost,  # of the fit
    extra: dict[str, Any],
    encoder: Encoder,
    identity: dict[str, Any],
    config: Config,
    place: Place,
    keep: int,
    say: Say,
) -> None:
    """Writes the checkpoint of `step` from rank 0; every rank leaves together. `load_encoder` reads it as well.

    Its config names the network that is in it, which may be another than `model` of the config the fit runs with. Its
    ledger is that of the pre-training: what an evaluation of this encoder is held against.
    """
    described = config.canonical()
    described["model"] |= {"name": encoder.name, "stem": encoder.stem}
    meta = {
        "config": described,
        "ledger": encoder.ledger,
        "epoch": encoder.epoch,
        "world_size": place.world_size,
        "encoder": encoder.record(),
        "fit": identity,
        "fit_ledger": ledger.state(),
    }
    kept = {
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "window": {"sums": sums, "steps": interval.steps},
        "extra": extra,
    }
    state.save_together(folder, step, place=place, model=model, state=kept, meta=meta, keep=keep, say=say)


def restore(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    interval: MetricsInterval,
    ledger: RunCost,
    identity: dict[str, Any],
    place: Place,
    remedy: str,
    say: Say,
) -> tuple[int, dict[str, Any]]:
    """Continues from the newest good checkpoint, if there is one; returns its step and `extra`, or 0 and {}.

    Raises CheckpointError on every rank: damaged ones only, or a fit of other settings, each key named.
    """

    def expect(meta: dict[str, Any]) -> None:
        if "fit" not in meta:
            raise CheckpointError(f"{folder} holds checkpoints of something else. {remedy}")
        refuse_changed(meta["fit"], identity, folder, remedy)

    loaded = state.load_together(folder, place=place, expect=expect, say=say)
    if loaded is None:
        return 0, {}
    if place.first and loaded.meta["world_size"] != place.world_size:
        say(
            f"on {place.world_size} processes instead of {loaded.meta['world_size']}: the same images an update, but "
            "BatchNorm over other parts of them, so results are those of neither number alone"
        )
    model.load_state_dict(loaded.model)
    optimizer.load_state_dict(loaded.state["optimizer"])
    scaler.load_state_dict(loaded.state["scaler"])
    ledger.restore(loaded.meta["fit_ledger"])
    saved = loaded.state["window"]
    interval.restore(saved["sums"], saved["steps"], place.rank, place.world_size)
    return loaded.step, loaded.state["extra"]
