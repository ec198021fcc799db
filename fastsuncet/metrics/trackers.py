"""Send the numbers of the metrics files to TensorBoard, Weights & Biases and MLflow, each imported on request."""

import hashlib
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from fastsuncet.config import Config
from fastsuncet.console import Say
from fastsuncet.errors import ConfigError


class Tracker(Protocol):
    """What MetricsWriter calls, with at least one scalar. What a call raises ends the tracker and no run."""

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
            id=_run_id(folder),
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


class MLflow:
    """One MLflow run of `experiment`, the same over all restarts in `folder`; a step can then have two values.

    A file FOLDER/mlflow.db unless MLFLOW_TRACKING_URI names a server. A thread of MLflow's sends, so that a slow server
    delays no step; what it could not send is reported at the end.
    """

    def __init__(self, experiment: str, folder: Path, say: Say):
        # Without this MLflow 3 sends usage data to its makers.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            from mlflow import MlflowClient  # pyright: ignore[reportMissingImports] - an optional extra
            from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise _missing(f"logging.mlflow is {experiment!r}", "mlflow", error) from error
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        self._client, self._metric = MlflowClient(tracking_uri=uri), Metric
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        mark = _run_id(folder)
        found = self._client.search_runs([number], f"tags.fastsuncet_folder = '{mark}'", max_results=1)
        run = (
            found[0]
            if found
            else self._client.create_run(number, tags={"fastsuncet_folder": mark}, run_name=folder.name)
        )
        self._id, self._sent = run.info.run_id, []
        self._client.update_run(self._id, status="RUNNING")
        say(f"metrics: also to MLflow, experiment {experiment}, {uri}")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(name, float(value), now, step) for name, value in scalars.items()]
        self._sent.append(self._client.log_batch(self._id, metrics, synchronous=False))

    def flush(self) -> None:
        """Do nothing: a checkpoint must not wait for a server."""

    def close(self) -> None:
        """Wait until all is sent. Raises MlflowException for what could not be sent."""
        for sent in self._sent:
            sent.wait()
        self._client.set_terminated(self._id)


def require_packages(config: Config) -> None:
    """Raise ConfigError for a tracker in `config` whose package is not installed."""
    for package, asked in (
        ("tensorboard", config.logging.tensorboard),
        ("wandb", config.logging.wandb),
        ("mlflow", config.logging.mlflow),
    ):
        if asked and find_spec(package) is None:
            raise config.error(
                f"logging.{package}",
                f"needs a package that is not installed: `pip install {package}`. Or remove the setting: "
                "metrics.jsonl and metrics.csv are always written",
            )


def _run_id(folder: Path) -> str:
    """Return 16 hexadecimal digits that are the same at every restart of the run in `folder`."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def _missing(setting: str, package: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"{setting}, but its package is not installed ({error}). Run `pip install {package}`, or remove the "
        "setting: metrics.jsonl and metrics.csv are always written."
    )
