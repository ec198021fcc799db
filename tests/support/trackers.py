"""Read back what TensorBoard, W&B and MLflow hold of a run, and stand-ins for W&B and MLflow where they are missing.

`held[name](folder)` is {"config", "numbers": {name: [(step, value)]}, "pictures", "texts"}, read by the package itself.
A stand-in refuses what the package refuses: `tests/metrics/test_trackers.py` gives the same on both.
"""

import json
import re
import struct
import sys
from collections import defaultdict, namedtuple
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

Held = dict[str, Any]


def tensorboard(folder: Path) -> Held:
    """Return what TensorBoard shows of FOLDER/tensorboard, without what a restart hides."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data as parsed

    events = EventAccumulator(str(folder / "tensorboard"), {"tensors": 0, "images": 0, "scalars": 0}).Reload()
    tags, config = events.Tags(), {}
    if "config/text_summary" in tags["tensors"]:
        info = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
        values = parsed(info).hparams.items()
        config = {key: getattr(value, value.WhichOneof("kind")) for key, value in values}
    numbers = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags["scalars"]}
    pictures = [tag for tag in tags["images"] if events.Images(tag)]
    texts = [tag.removesuffix("/text_summary") for tag in tags["tensors"] if events.Tensors(tag)]
    return {"config": config, "numbers": numbers, "pictures": pictures, "texts": texts}


def mlflow(folder: Path) -> Held:
    """Return what the one run in FOLDER/mlflow.db has."""
    client = sys.modules["mlflow"].MlflowClient(tracking_uri=f"sqlite:///{folder.resolve()}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    numbers = {key: [(each.step, each.value) for each in values] for key, values in history.items()}
    files = (path for path in (folder / "mlflow").rglob("*") if path.is_file())
    names = [str(path).split("/artifacts/")[1] for path in files]
    pictures = [name for name in names if name.endswith(".png")]
    texts = [name for name in names if not name.endswith(".png")]
    held = {"config": run.data.params, "numbers": numbers, "pictures": pictures, "texts": texts}
    return held | {"status": run.info.status}


def wandb(folder: Path) -> Held:
    """Return what all offline runs in FOLDER/wandb hold, which `wandb sync` would send as one run."""
    package = sys.modules["wandb"]
    package.teardown()  # waits for the process that writes
    if isinstance(package, FakeWandb):
        ids, records = {each["id"] for each in package.begun}, package.records
    else:
        files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
        ids, records = {file.name for file in files}, chain.from_iterable(map(_records, files))
    assert len(ids) == 1
    config, numbers, pictures = {}, defaultdict(list), []
    for update, history, media in records:
        config |= update
        pictures += media
        step = history.pop("step", None)
        for key, value in history.items():
            if not key.startswith("_") and isinstance(value, (int, float)):
                numbers[key].append((step, value))
    return {"config": config, "numbers": dict(numbers), "pictures": pictures, "texts": []}


def forget(name: str) -> None:
    """Forget what a package keeps of a run in this process: a run that was moved is continued by another one."""
    if (kept := sys.modules.get("mlflow.tracking._tracking_service.utils")) and name == "mlflow":
        kept._artifact_repos_cache.clear()


def _records(file: Path):
    """Yield (config, history, media files) of each record of a .wandb file: protobuf in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    data, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768  # a block
        size, kind = struct.unpack_from("<HB", data, at + 4)  # behind 4 bytes of a checksum
        if room < 7 or not kind:
            at += room
            continue
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record, part = Record.FromString(part), b""
            history = {each.key or "/".join(each.nested_key): json.loads(each.value_json)
                       for each in record.history.item}  # fmt: skip
            update = {each.key: json.loads(each.value_json) for each in record.config.update}
            yield update, history, [each.path for each in record.files.files if "media" in each.path]


held = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


# ------------------------------------------------------------------------------------------------------- stand-ins
class FakeWandb(ModuleType):
    """`import wandb`, as far as it is used: all runs are in memory."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict] = []
        self.records: list[tuple[dict, dict, list]] = []  # as `_records` reads them

    Settings = SimpleNamespace

    def teardown(self) -> None: ...

    class Image:
        def __init__(self, pixels: Any):
            assert pixels.ndim == 3 and str(pixels.dtype) == "uint8"

    def init(self, *, project, name, id, dir, mode, resume, settings):
        assert re.fullmatch(r"[A-Za-z0-9_-]+", id) and Path(dir).is_dir() and resume == "allow"
        self.begun.append({"project": project, "name": name, "id": id, "mode": mode})

        def log(values: dict[str, Any]) -> None:
            media = [f"media/{key}" for key, value in values.items() if isinstance(value, self.Image)]
            numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
            self.records.append(({}, numbers, media))

        def update(values: dict, allow_val_change: bool) -> None:
            self.records.append((json.loads(json.dumps(values)), {}, []))

        def finish(exit_code: int) -> None:
            self.begun[-1]["exit_code"] = exit_code

        nothing, config = lambda *_, **__: None, SimpleNamespace(update=update)
        return SimpleNamespace(config=config, log=log, finish=finish, define_metric=nothing)


class FakeMlflow(ModuleType):
    """`import mlflow`, `mlflow.entities` and MlflowClient, as far as they are used: one store, in memory.

    A param has one value for ever, a call takes 100 of them, a name has few characters.
    """

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.uris: set[str] = set()
        self.runs: dict[str, Any] | None = None  # None: no experiment yet
        self.unsent: Iterator[Exception] = iter(())  # what the next calls with numbers raise

    Metric = namedtuple("Metric", "key value timestamp step")
    Param = namedtuple("Param", "key value")

    def MlflowClient(self, tracking_uri):  # noqa: N802 - MLflow's name
        self.uris.add(tracking_uri)
        file = tracking_uri.removeprefix("sqlite:///")
        self.place = Path(file).with_name("mlflow") if file != tracking_uri else None  # a file can be moved
        if self.place:
            Path(file).touch()
        return self

    def search_experiments(self, max_results): ...

    def get_experiment_by_name(self, name):
        location = self.place and self.place.as_uri()
        return None if self.runs is None else SimpleNamespace(experiment_id=name, artifact_location=location)

    def create_experiment(self, name, artifact_location=None):
        assert artifact_location == (self.place and self.place.as_uri())
        self.runs = {}
        return name

    def search_runs(self, experiments, query="", max_results=1000):
        mark = re.fullmatch(r"(?:tags\.(\w+) = '(\w+)')?", query)
        return [run for run in self.runs.values() if not query or run.data.tags.get(mark[1]) == mark[2]]

    def create_run(self, experiment, *, tags, run_name):
        info = SimpleNamespace(run_id=f"run{len(self.runs)}", run_name=run_name, status="RUNNING")
        data = SimpleNamespace(params={}, metrics={}, tags=tags, history=defaultdict(list))
        self.runs[info.run_id] = SimpleNamespace(info=info, data=data)
        return self.runs[info.run_id]

    def update_run(self, number, status):
        self.runs[number].info.status = status

    set_terminated = update_run

    def log_batch(self, number, metrics=(), params=()):
        if metrics and (error := next(self.unsent, None)):
            raise error
        data = self.runs[number].data
        assert len(params) <= 100
        for each in (*metrics, *params):
            assert re.fullmatch(r"[\w./ :-]+", each.key), each.key
        for each in params:
            assert isinstance(each.value, str) and len(each.value) <= 6000
            assert data.params.setdefault(each.key, each.value) == each.value, f"{each.key} is written twice"
        for each in metrics:
            assert isinstance(each.value, float) and isinstance(each.timestamp, int)
            data.history[each.key].append(each)
            data.metrics[each.key] = each.value

    def log_text(self, number, text, artifact_file):
        if self.place:
            path = self.place / number / "artifacts" / artifact_file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def log_image(self, number, image, artifact_file):
        assert str(image.dtype) == "uint8"
        self.log_text(number, "a picture", artifact_file)

    def get_metric_history(self, number, key):
        return self.runs[number].data.history[key]


def stand_in(monkeypatch, name: str) -> ModuleType:
    """Put the stand-in for a package in its place."""
    fake = FakeWandb() if name == "wandb" else FakeMlflow()
    # As of a module that was imported: `find_spec` looks at this.
    fake.__spec__ = SimpleNamespace(name=name)  # pyright: ignore[reportAttributeAccessIssue]
    for module in (name, f"{name}.entities"):
        monkeypatch.setitem(sys.modules, module, fake)
    return fake


def package(monkeypatch, name: str) -> None:
    """Import a tracker's package, or put its stand-in in its place."""
    if find_spec(name) is None:
        stand_in(monkeypatch, name)
    __import__(name)
