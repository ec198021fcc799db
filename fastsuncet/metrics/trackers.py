"""Send the numbers of the metrics files to TensorBoard and Weights & Biases. They are imported only on request."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from fastsuncet.console import Say
from fastsuncet.errors import ConfigError


class Tracker(Protocol):
    """What MetricsWriter calls."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in FOLDER/tensorboard. A restart hides the events after the step it continues from."""

    def __init__(self, folder: Path, resume_step: int | None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("logging.tensorboard is true", "tensorboard", error) from error
        purge_step = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)
        self.flush, self.close = self._writer.flush, self._writer.close

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)


class WeightsAndBiases:
    """One W&B run of `project`, the same over all restarts in `folder`.

    Offline unless WANDB_MODE says otherwise: a project's name in a config that came with the code is not consent to
    send, and a batch job must not wait for a login. `wandb sync` sends the run later.
    """

    def __init__(self, project: str, folder: Path, say: Say):
        # W&B's crash reports would leave the machine even when it is offline.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        mode = os.environ.get("WANDB_MODE", "offline")
        try:
            import wandb  # pyright: ignore[reportMissingImports] - an optional extra
        except ImportError as error:
            raise _missing(f"logging.wandb is {project!r}", "wandb", error) from error
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
            dir=str(folder),
            mode=mode,
            resume="allow",
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )
        self.close = self._run.finish
        # W&B's own step can only grow; ours goes back after a restart.
        self._run.define_metric("*", step_metric="step")
        hint = (
            "; WANDB_MODE=online sends during the run, `wandb sync` sends later" if mode == "offline" else ""
        )
        say(f"metrics: also to Weights & Biases, project {project}, {mode}{hint}")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "step": step})

    def flush(self) -> None:
        """Do nothing: W&B writes from a process of its own and has no such call."""


def _missing(setting: str, extra: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"{setting}, but its package is not installed ({error}). Install the extra, pip install "
        f'"fastsuncet[{extra}]", or remove the setting: metrics.jsonl and metrics.csv are always written.'
    )
