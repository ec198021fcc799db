"""A run's state: what a checkpoint holds, and how all ranks save it and continue from it together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastsuncet.checkpoint import manager
from fastsuncet.config import Config
from fastsuncet.console import Say
from fastsuncet.distributed.collectives import any_rank, broadcast_json
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import CheckpointError, NumericalError
from fastsuncet.metrics.cost import RunCost
from fastsuncet.metrics.interval import MetricsInterval
from fastsuncet.models.resnet import Model
from fastsuncet.optim import LARS

FOLDER = "checkpoints"  # in the run's folder


def save(
    folder: Path,
    step: int,  # updates done
    *,
    epoch: float,  # the same in passes over the images
    config: Config,
    place: Place,
    model: Model,
    optimizer: LARS,
    scaler: torch.amp.GradScaler,
    interval: MetricsInterval,
    sums: torch.Tensor,  # (W, T) of the interval, from all ranks
    extra: dict[str, Any],  # plain values that `restore` hands back
    ledger: RunCost,
    images: str,  # fingerprint of the data set
    say: Say,
) -> None:
    """Writes the checkpoint of `step` from rank 0; every rank leaves together, with or without an error.

    The data have no state: a step's images are a function of its number. What is kept beside weights, momentum and
    scaler is the part of a metrics interval that is already behind us, so that its line comes out the same.
    """
    state = {
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "window": {"sums": sums, "steps": interval.steps},
        "extra": extra,
    }
    meta = {
        "config": config.canonical(),
        "epoch": epoch,
        "ledger": ledger.state(),
        "world_size": place.world_size,
        "images": images,
    }
    keep = config.checkpoint.keep
    save_together(folder, step, place=place, model=model, state=state, meta=meta, keep=keep, say=say)


def require_finite_weights(model: nn.Module, step: int) -> None:
    """Raises NumericalError for weights that must not be saved; the one sync of it, at a checkpoint.

    A gradient can overflow under a finite loss: its update must not become what every restart begins from.
    """
    norms = torch.stack(torch._foreach_norm([p.detach() for p in model.parameters()]))
    if not torch.isfinite(norms).all():
        raise NumericalError(
            f"a weight is not a finite number after step {step:,} though the losses are: a gradient did it. "
            "Nothing has been saved since; what was saved before is sound. A lower lr or precision fp32 may help."
        )


def save_together(
    folder: Path,
    step: int,
    *,
    place: Place,
    model: nn.Module,
    state: dict[str, Any],
    meta: dict[str, Any],
    keep: int,
    say: Say,
) -> None:
    """`manager.save` by rank 0 in `folder`/checkpoints; every rank leaves together, with or without an error."""
    problem = None
    if place.first:
        try:
            manager.save(
                folder / FOLDER, step, model=model.state_dict(), state=state, meta=meta, keep=keep, say=say
            )
        except (
            Exception
        ) as error:  # whatever it is, the others must hear of it, or they wait until the time-out
            problem = error
    failed = any_rank(problem is not None)
    if problem is not None:
        raise problem
    if failed:
        raise CheckpointError("rank 0 could not write the checkpoint; its own message says why")


def restore(
    folder: Path,
    *,
    config: Config,
    place: Place,
    model: Model,
    optimizer: LARS,
    scaler: torch.amp.GradScaler,
    interval: MetricsInterval,
    ledger: RunCost,
    images: str,
    say: Say,
) -> tuple[int, dict[str, Any]]:
    """Continues from the newest good checkpoint, if there is one; returns its step and `extra`, or 0 and {}.

    Rank 0 chooses and verifies, the others read what it chose: no two ranks continue from different steps. Raises
    CheckpointError on every rank: damaged ones only, another config (each key named), other images.
    """
    loaded = load_together(
        folder, place=place, expect=lambda meta: refuse_others(meta, config, images), say=say
    )
    if loaded is None:
        return 0, {}
    if place.first and loaded.meta["world_size"] != place.world_size:
        say(
            f"on {place.world_size} processes instead of {loaded.meta['world_size']}: the same images in the same "
            "global batches, so results are equal up to rounding, not to the bit"
        )
    model.load_state_dict(loaded.model)
    optimizer.load_state_dict(loaded.state["optimizer"])
    scaler.load_state_dict(loaded.state["scaler"])
    ledger.restore(loaded.meta["ledger"])
    saved = loaded.state["window"]
    interval.restore(saved["sums"], saved["steps"], place.rank, place.world_size)
    return loaded.step, loaded.state["extra"]


def load_together(
    folder: Path, *, place: Place, expect: Callable[[dict[str, Any]], None], say: Say
) -> manager.Checkpoint | None:
    """`manager.load_newest` in `folder`/checkpoints, the same on every rank: rank 0 chooses, the others follow."""
    loaded, problem = None, None
    if place.first:
        try:
            loaded = manager.load_newest(folder / FOLDER, expect=expect, say=say)
        except CheckpointError as error:
            problem = error
    chosen = broadcast_json({"failed": problem is not None, "path": str(loaded.path) if loaded else None})
    if problem is not None:
        raise problem
    if chosen["failed"]:
        raise CheckpointError("rank 0 found checkpoints it cannot continue from; its own message says why")
    if chosen["path"] is None:
        return None
    if loaded is None:
        return manager.load(chosen["path"])
    say(f"continuing from {loaded.path.name}: {loaded.step:,} updates done")
    return loaded


def refuse_others(meta: dict[str, Any], config: Config, images: str) -> None:
    """Raises CheckpointError if a checkpoint's run had another config or other images than this one."""
    changed = config.changed_keys(meta["config"])
    if changed:
        lines = [f"{key}: {old!r} in the checkpoint, {new!r} now" for key, old, new in changed]
        raise CheckpointError(
            "\n  ".join(["the config is not the one this run was started with:", *lines])
            + "\nSet these back to continue the run, or give the new one another logging.write_tag."
        )
    if meta["images"] != images:
        raise CheckpointError(
            "the training images or their labels are not those this run was started with (files added, removed, "
            "resized or labeled otherwise). Bring them back, or give the new run another logging.write_tag."
        )
