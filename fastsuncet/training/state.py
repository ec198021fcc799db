"""Checkpoints of a run on several ranks: rank 0 writes and chooses them, and all ranks agree on the outcome."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastsuncet.checkpoint import manager
from fastsuncet.checkpoint.format import LoadedCheckpoint
from fastsuncet.checkpoint.run_folder import on_rank_0
from fastsuncet.console import Say
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import NumericalError

FOLDER = "checkpoints"  # in the run's folder


def require_finite_weights(model: nn.Module, step: int) -> None:
    """Raise NumericalError for weights that must not be saved. Waits for the device once.

    A gradient can overflow under a finite loss. Its update must not become what every restart begins from.
    """
    norms = nn.utils.get_total_norm([p.detach() for p in model.parameters()])
    if not torch.isfinite(norms):
        raise NumericalError(
            f"a weight is not a finite number after step {step:,}, though the losses are: a gradient overflowed. "
            "Nothing has been saved since; earlier checkpoints are good. Try a lower lr or meta.precision=fp32."
        )


def save(
    folder: Path,
    step: int,  # updates done
    *,
    place: Place,
    model: nn.Module,
    state: dict[str, Any],
    meta: dict[str, Any],
    keep: int,
    say: Say,
) -> None:
    """Write `folder`/checkpoints/step_... from rank 0. Every rank leaves together, with or without an error."""

    def write() -> None:
        weights = model.state_dict()
        manager.save(folder / FOLDER, step, model=weights, state=state, meta=meta, keep=keep, say=say)

    on_rank_0(place, write)


def load(
    folder: Path, *, place: Place, check: Callable[[dict[str, Any]], None], say: Say
) -> LoadedCheckpoint | None:
    """Return the newest good checkpoint in `folder`/checkpoints, the same on every rank; None if there is none.

    Rank 0 chooses it, verifies it and calls `check(meta)`; the other ranks read what it chose. Raises CheckpointError
    on every rank where all checkpoints are damaged, and what `check` raises.
    """
    loaded: LoadedCheckpoint | None = None

    def newest() -> str | None:
        nonlocal loaded
        loaded = manager.load_newest(folder / FOLDER, expect=check, say=say)
        return None if loaded is None else str(loaded.path)

    path = on_rank_0(place, newest)
    if path is None:
        return None
    if loaded is None:
        return manager.load(path)
    say(f"continuing from {loaded.path.name}: {loaded.step:,} updates done")
    return loaded
