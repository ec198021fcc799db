"""Send a run's config, numbers, pictures and results to TensorBoard, Weights & Biases and MLflow, imported on request.

What a tracker raises ends the tracker and no run, and no step waits for one: each is called in a thread of its own. The
files of the run have everything that it gets.
"""

import contextlib
import hashlib
import os
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from typing_extensions import Self

from fastsuncet.config import Config, flat
from fastsuncet.config.reader import as_yaml
from fastsuncet.errors import Preempted
from pipelines import atomic_files
from pipelines.output import Say, counted, say_line

PARAMS = 100  # in a call, at most: MLflow refuses more
# Seconds that a run waits for a tracker at its start, and for all at its end. Schedulers kill a stopped job after 30.
PATIENCE = 20.0
TRACKED = ".tracked"  # in the folder of a run: where it was first


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

    def close(self, failure: BaseException | None) -> None:
        """Wait until all is written; `failure` has ended the run. Raises where something could not be sent."""

    @staticmethod
    def abandon() -> None:
        """Take back what would stop or delay this process at its end, after a failure of the package or a hang."""


class TensorBoard(Tracker):
    """Event files in FOLDER/tensorboard. With `purge_step` the events from that step on are hidden."""

    def __init__(self, _: bool, folder: Path, name: str, purge_step: int | None):
        from torch.utils.tensorboard import SummaryWriter

        self.where = f"TensorBoard, {folder / 'tensorboard'}"
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)
        self._step = max(0, (purge_step or 0) - 1)  # that a continued run begins with

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
        self._writer.flush()  # or a kill could lose those of two minutes

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, "    " + text.replace("\n", "\n    "), step)  # Markdown for text as it is

    def close(self, failure: BaseException | None) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """One W&B run of `project`, the same over all restarts.

    Offline unless WANDB_MODE says otherwise: a project's name in a config that came with the code is not consent to
    send, and a batch job must not wait for a login. `wandb sync` sends the run later.
    """

    def __init__(self, project: str, folder: Path, name: str, purge_step: int | None):
        # W&B's crash reports would leave the machine even when it is offline.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # In seconds. After W&B's own 15 a kill loses lines that the checkpoint has: none comes again.
        os.environ.setdefault("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", "1")
        mode = os.environ.get("WANDB_MODE", "offline")
        import wandb  # pyright: ignore[reportMissingImports] - an optional extra

        hint = "; WANDB_MODE=online sends during the run, `wandb sync` sends later"
        self.where = f"Weights & Biases, project {project}, {mode}{hint if mode == 'offline' else ''}"
        self._image = wandb.Image
        self._run = wandb.init(
            project=project,
            name=name,
            id=_run_id(folder, name),
            dir=str(folder),
            mode=mode,
            resume="allow",
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )
        # W&B's own step can only grow; ours goes back after a restart.
        self._run.define_metric("*", step_metric="step")

    def settings(self, config: Config) -> None:
        # A continued run can have other values of the few keys that are free.
        self._run.config.update(config.canonical(), allow_val_change=True)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "step": step})

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        self._run.log({name: self._image(pixels), "step": step})

    def close(self, failure: BaseException | None) -> None:
        self._run.finish(exit_code=0 if failure is None else getattr(failure, "exit_code", 1))

    @staticmethod
    def abandon() -> None:
        # W&B's hooks at imports and at the end of the process would raise, or wait, where W&B's own process is gone or
        # hangs. They are removed before this can raise or wait too.
        with contextlib.suppress(Exception, SystemExit):
            import wandb  # pyright: ignore[reportMissingImports]

            wandb.teardown(1)


class MLflow(Tracker):
    """One MLflow run of `experiment`, the same over all restarts; a step can then have two values.

    A file FOLDER/mlflow.db, and FOLDER/mlflow for artifacts, unless MLFLOW_TRACKING_URI names a server. Lines that it
    did not take, after MLflow's own attempts of some minutes, are counted at the end: the server can come back.
    """

    def __init__(self, experiment: str, folder: Path, name: str, purge_step: int | None):
        # Without this MLflow 3 sends usage data to its makers.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports] - an optional extra
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        server, folder = os.environ.get("MLFLOW_TRACKING_URI"), folder.resolve()
        uri = server or f"sqlite:///{folder / 'mlflow.db'}"
        self.where = f"MLflow, experiment {experiment}, {uri}"
        if not server and not (folder / "mlflow.db").exists():
            # MLflow makes its tables one by one, and refuses a file in which a kill left some.
            part = folder / "mlflow.db.part"
            atomic_files.remove(part)
            MlflowClient(tracking_uri=f"sqlite:///{part}").search_experiments(max_results=1)
            part.replace(folder / "mlflow.db")
        self._client, self._metric, self._param = MlflowClient(tracking_uri=uri), Metric, Param
        known = self._client.get_experiment_by_name(experiment)
        # MLflow's own place for the artifacts of a file is the working directory. The file keeps absolute paths, which
        # lead to the old place of a folder that was moved or copied.
        artifacts = None if server else (folder / "mlflow").as_uri()
        if known and artifacts and artifacts != known.artifact_location:
            import sqlite3

            moved = (known.artifact_location, artifacts)
            with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as file, file:
                file.execute(
                    "UPDATE experiments SET artifact_location = replace(artifact_location, ?, ?)", moved
                )
                file.execute("UPDATE runs SET artifact_uri = replace(artifact_uri, ?, ?)", moved)
        number = known.experiment_id if known else self._client.create_experiment(experiment, artifacts)
        mark = _run_id(folder, name)
        found = self._client.search_runs([number], f"tags.fastsuncet_folder = '{mark}'", max_results=1)
        tags = {"fastsuncet_folder": mark}
        run = found[0] if found else self._client.create_run(number, tags=tags, run_name=name)
        self._id, self._params = run.info.run_id, set(run.data.params)
        self._unsent: list[str] = []
        self._ends = not found  # an evaluation leaves a run of before as it is: it can be in training

    def settings(self, config: Config) -> None:
        self._ends = True
        self._client.update_run(self._id, status="RUNNING")
        # A param is written once: of a continued run, config.yaml has the values that changed.
        values = {k: v for k, v in flat(config.canonical()).items() if k not in self._params}
        params = [self._param(key, as_yaml(value)) for key, value in values.items()]
        for first in range(0, len(params), PARAMS):
            self._client.log_batch(self._id, params=params[first : first + PARAMS])
        self._client.log_text(self._id, config.to_yaml(), "config.yaml")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(name, float(value), now, step) for name, value in scalars.items()]
        try:
            self._client.log_batch(self._id, metrics)
        except Exception as error:
            self._unsent.append(str(error))  # not itself: its traceback holds a call

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        self._client.log_image(self._id, pixels, artifact_file=f"{name}-step{step}.png")

    def text(self, name: str, text: str, step: int) -> None:
        self._client.log_text(self._id, text, name)

    def close(self, failure: BaseException | None) -> None:
        if self._ends:
            status = "KILLED" if isinstance(failure, Preempted) else "FAILED" if failure else "FINISHED"
            self._client.set_terminated(self._id, status)
        if self._unsent:
            lost = counted(len(self._unsent), "line")
            raise OSError(f"{lost} of numbers not sent; the first: {self._unsent[0]}")


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


class Caller:
    """Makes the calls of one tracker, in their order, in a thread: its server or its process can hang."""

    def __init__(self, kind: type[Tracker], say: Say, *arguments: Any):
        self._kind, self._say = kind, say
        self._calls: SimpleQueue[Callable[[Tracker], object] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._opened = threading.Event()
        self._given_up = False
        self._thread = threading.Thread(target=self._work, args=arguments, daemon=True)
        self._thread.start()
        # While it imports its package, this thread should import nothing.
        self._opened.wait(PATIENCE)

    def tell(self, call: Callable[[Tracker], object]) -> None:
        """Let `call` be made after those before it."""
        if self._thread.is_alive():
            self._calls.put(call)

    def end(self, failure: BaseException | None) -> None:
        """Let the tracker close after the calls before; `failure` has ended the run."""
        self._failure = failure
        self._calls.put(None)

    def wait(self, until: float) -> None:
        """Wait until the tracker has closed, at most until that time of `time.monotonic`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._given_up = True
            unsent = f"{self._calls.qsize():,} messages were not sent"
            self._say(
                f"{self._kind.__name__} did not answer for {PATIENCE:.0f} s at the end of the run, {unsent}; "
                "the files of the run have it all"
            )
            abandoned = threading.Thread(target=self._kind.abandon, daemon=True)
            abandoned.start()
            abandoned.join(1.0)

    def _work(self, asked: Any, folder: Path, *arguments: Any) -> None:
        try:
            atomic_files.make_folder(folder)
            tracker = self._kind(asked, folder, *arguments)
            self._opened.set()
            while call := self._calls.get():
                call(tracker)
            tracker.close(self._failure)
        except (Exception, SystemExit) as error:  # W&B can exit
            if not self._given_up:
                # The first line of pydantic's errors and SQLAlchemy's does not have the reason.
                reason = textwrap.shorten(str(error), 300)
                self._say(
                    f"{self._kind.__name__} failed and gets nothing more ({type(error).__name__}: {reason}); "
                    "the files of the run have it all"
                )
            self._kind.abandon()
        finally:
            self._opened.set()


class Trackers:
    """`tell(call)` calls `call` with each tracker that a config names for the run in `folder`, and waits for none.

    A tracker that fails is left out from then on, and a line says why. TensorBoard hides its events from `purge_step`
    on; 0, a fresh start in the folder, is a new run of the others. Raises ConfigError for a missing package. Leaving
    the context waits until the trackers have everything, for PATIENCE seconds in all.
    """

    def __init__(self, config: Config, folder: Path, purge_step: int | None = None, say: Say = say_line):
        asked = config.logging.trackers
        require_packages(config)
        if asked and purge_step == 0:
            first_place = f"{folder.resolve()} {time.time()}"
            atomic_files.replace(folder / TRACKED, os.fsencode(first_place))
        runs = config.run_folder.parent
        name = str(folder.relative_to(runs)) if folder.is_relative_to(runs) else folder.name
        self._callers = [
            Caller(TRACKERS[key], say, value, folder, name, purge_step) for key, value in asked.items()
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, failure: BaseException | None, traceback: Any) -> None:
        for caller in self._callers:
            caller.end(failure)
        until = time.monotonic() + PATIENCE
        for caller in self._callers:
            caller.wait(until)

    def tell(self, call: Callable[[Tracker], object]) -> None:
        """Let `call` be made with every tracker that has not failed."""
        for caller in self._callers:
            caller.tell(call)


def require_packages(config: Config) -> None:
    """Raise ConfigError for a tracker in `config` whose package is not installed."""
    for package in config.logging.trackers:
        if find_spec(package) is None:
            raise config.error(
                f"logging.{package}",
                f"needs a package that is not installed: `pip install {package}`. Or remove the setting: "
                "metrics.jsonl and metrics.csv are always written",
            )


def _run_id(folder: Path, name: str) -> str:
    """Return 16 hexadecimal digits of the run `name` in `folder`: the same at every restart, also once it was moved.

    A copy that is continued under another name gets others, and so does a fresh start.
    """
    first_place = folder / TRACKED
    if not first_place.exists():
        atomic_files.replace(first_place, os.fsencode(folder.resolve()))
    return hashlib.sha256(first_place.read_bytes() + name.encode()).hexdigest()[:16]
