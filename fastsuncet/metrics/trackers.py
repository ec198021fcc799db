"""Send a run's config, numbers, pictures and results to TensorBoard, Weights & Biases and MLflow, imported on request.

What a tracker raises ends the tracker and no run: the files of the run have everything that it gets.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fastsuncet.config import Config, flat
from fastsuncet.config.reader import as_yaml
from pipelines import atomic_files
from pipelines.output import Say, say_line

PARAMS = 100  # in a call, at most: MLflow refuses more


class Tracker:
    """What every tracker can be given; one that has no use for it does nothing."""

    where: str  # in words for the user

    def __init__(self, asked: Any, folder: Path, name: str, purge_step: int | None):
        """Open the run in `folder` called `name`; `asked` is the value of the config's key."""

    def settings(self, config: Config) -> None:
        """Show the run's config: once at each start."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add scalars, at least one."""

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        """Add a picture, (H, W, 3) uint8."""

    def text(self, name: str, text: str, step: int) -> None:
        """Add a text, a JSON file for example."""

    def flush(self) -> None:
        """Write what is not on the disk yet. W&B and MLflow send from a process or a thread: no step waits for them."""

    def close(self) -> None:
        """Wait until all is written. Raises where something could not be sent."""


class TensorBoard(Tracker):
    """Event files in FOLDER/tensorboard. With `purge_step` the events from that step on are hidden."""

    def __init__(self, _: bool, folder: Path, name: str, purge_step: int | None):
        from torch.utils.tensorboard import SummaryWriter

        self.where = f"TensorBoard, {folder / 'tensorboard'}"
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)
        self._step = max(0, (purge_step or 0) - 1)  # that a continued run begins with
        self.flush, self.close = self._writer.flush, self._writer.close

    def settings(self, config: Config) -> None:
        from torch.utils.tensorboard.summary import hparams

        self.text("config", config.to_yaml(), self._step)
        # Without its first summary: TensorBoard then takes all scalars as the metrics of the table.
        plain = (bool, int, float, str)
        values = {k: v if type(v) in plain else as_yaml(v) for k, v in flat(config.canonical()).items()}
        for summary in hparams(values, {})[1:]:
            self._writer._get_file_writer().add_summary(summary)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, "    " + text.replace("\n", "\n    "), step)  # Markdown for text as it is


class WeightsAndBiases(Tracker):
    """One W&B run of `project`, the same over all restarts in `folder`.

    Offline unless WANDB_MODE says otherwise: a project's name in a config that came with the code is not consent to
    send, and a batch job must not wait for a login. `wandb sync` sends the run later.
    """

    def __init__(self, project: str, folder: Path, name: str, purge_step: int | None):
        # W&B's crash reports would leave the machine even when it is offline.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        mode = os.environ.get("WANDB_MODE", "offline")
        import wandb  # pyright: ignore[reportMissingImports] - an optional extra

        hint = "; WANDB_MODE=online sends during the run, `wandb sync` sends later"
        self.where = f"Weights & Biases, project {project}, {mode}{hint if mode == 'offline' else ''}"
        self._image = wandb.Image
        self._run = wandb.init(
            project=project,
            name=name,
            id=_run_id(folder),
            dir=str(folder),
            mode=mode,
            resume="allow",
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )
        self.close = self._run.finish
        # W&B's own step can only grow; ours goes back after a restart.
        self._run.define_metric("*", step_metric="step")

    def settings(self, config: Config) -> None:
        # A continued run can have other values of the few keys that are free.
        self._run.config.update(config.canonical(), allow_val_change=True)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "step": step})

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        self._run.log({name: self._image(pixels), "step": step})


class MLflow(Tracker):
    """One MLflow run of `experiment`, the same over all restarts in `folder`; a step can then have two values.

    A file FOLDER/mlflow.db, and FOLDER/mlflow for artifacts, unless MLFLOW_TRACKING_URI names a server. A thread of
    MLflow's sends the numbers, so that a slow server delays no step; what it could not send is reported at the end.
    """

    def __init__(self, experiment: str, folder: Path, name: str, purge_step: int | None):
        # Without this MLflow 3 sends usage data to its makers.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports] - an optional extra
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        server, folder = os.environ.get("MLFLOW_TRACKING_URI"), folder.resolve()
        uri = server or f"sqlite:///{folder / 'mlflow.db'}"
        self.where = f"MLflow, experiment {experiment}, {uri}"
        self._client, self._metric, self._param = MlflowClient(tracking_uri=uri), Metric, Param
        known = self._client.get_experiment_by_name(experiment)
        # MLflow's own place for the artifacts of a file is the working directory.
        artifacts = None if server else (folder / "mlflow").as_uri()
        number = known.experiment_id if known else self._client.create_experiment(experiment, artifacts)
        mark = _run_id(folder)
        found = self._client.search_runs([number], f"tags.fastsuncet_folder = '{mark}'", max_results=1)
        tags = {"fastsuncet_folder": mark}
        run = found[0] if found else self._client.create_run(number, tags=tags, run_name=name)
        self._id, self._sent, self._params = run.info.run_id, [], set(run.data.params)
        self._client.update_run(self._id, status="RUNNING")

    def settings(self, config: Config) -> None:
        # A param is written once: of a continued run, config.yaml has the values that changed.
        values = {k: v for k, v in flat(config.canonical()).items() if k not in self._params}
        params = [self._param(key, as_yaml(value)) for key, value in values.items()]
        for first in range(0, len(params), PARAMS):
            self._client.log_batch(self._id, params=params[first : first + PARAMS])
        self._client.log_text(self._id, config.to_yaml(), "config.yaml")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(name, float(value), now, step) for name, value in scalars.items()]
        self._sent.append(self._client.log_batch(self._id, metrics, synchronous=False))

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        self._client.log_image(self._id, pixels, artifact_file=f"{name}-step{step}.png")

    def text(self, name: str, text: str, step: int) -> None:
        self._client.log_text(self._id, text, name)

    def close(self) -> None:
        for sent in self._sent:
            sent.wait()
        self._client.set_terminated(self._id)


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


class Trackers:
    """`tell(call)` calls `call` with each tracker that a config names for the run in `folder`.

    A tracker that fails is left out from then on, and a line says why. TensorBoard hides its events from `purge_step`
    on. Raises ConfigError for a missing package. Leaving the context closes the trackers.
    """

    def __init__(self, config: Config, folder: Path, purge_step: int | None = None, say: Say = say_line):
        self._say = say
        self._open: list[Tracker] = []
        require_packages(config)
        inside = folder.is_relative_to(config.logging.folder)
        name = str(folder.relative_to(config.logging.folder)) if inside else folder.name
        for key, asked in config.logging.trackers.items():
            with self._surviving(TRACKERS[key].__name__):
                atomic_files.make_folder(folder)
                self._open.append(TRACKERS[key](asked, folder, name, purge_step))

    def tell(self, call: Callable[[Tracker], object]) -> None:
        """Call `call` with every tracker, and keep those with which it succeeds."""
        trackers, self._open = self._open, []
        for tracker in trackers:
            with self._surviving(type(tracker).__name__):
                call(tracker)
                self._open.append(tracker)

    @contextlib.contextmanager
    def _surviving(self, tracker: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            self._say(
                f"{tracker} failed and gets nothing more ({type(error).__name__}: {reason}); "
                "the files of the run have it all"
            )

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_: object) -> None:
        self.tell(lambda tracker: tracker.close())


def require_packages(config: Config) -> None:
    """Raise ConfigError for a tracker in `config` whose package is not installed."""
    for package in config.logging.trackers:
        if find_spec(package) is None:
            raise config.error(
                f"logging.{package}",
                f"needs a package that is not installed: `pip install {package}`. Or remove the setting: "
                "metrics.jsonl and metrics.csv are always written",
            )


def _run_id(folder: Path) -> str:
    """Return 16 hexadecimal digits that are the same at every restart of the run in `folder`."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
