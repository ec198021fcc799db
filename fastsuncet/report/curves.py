"""A run's accuracies beside what each had cost: read from its results, and from its metrics lines while it trained."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fastsuncet import methods, metrics
from fastsuncet.config import FREE_ON_RESUME, Config, load_config
from fastsuncet.results import read_results
from pipelines.errors import DataError

COSTS = ("epochs", "updates", "petaflops", "hours", "joules")
ONLINE = "online knn"  # the kind of the "knn" lines in metrics.jsonl; its one metric is KNN
KNN = "knn"
KINDS = {
    "finetune": "fine-tuning",
    "linear": "a linear classifier",
    "knn": "nearest neighbours",
    "npi": "SuNCEt's own classifier",
    "transfer": "transfer",
    ONLINE: "KNN while training",
}
# What of a config makes no other experiment of a run, beside its seeds.
FREE = tuple(key for key in FREE_ON_RESUME if key not in ("data.split.file", "data.csv"))


class Evaluation(NamedTuple):
    """What was measured. Numbers of one evaluation can be compared, of two they cannot."""

    kind: str  # "finetune", "linear", ...
    labels: str  # "10 % labels"
    variant: str = ""  # "k=20", where one run was evaluated in several ways

    def __str__(self) -> str:
        """As a person says it: "fine-tuning, 10 % labels"."""
        return ", ".join(part for part in (KINDS.get(self.kind, self.kind), *self[1:]) if part)


@dataclass(frozen=True)
class Point:
    """One evaluated encoder."""

    step: int | None  # updates done; None for an encoder from a file, which is on no curve
    costs: dict[str, float]  # those of COSTS that are known
    metrics: dict[str, float]  # shares, 0 to 1


@dataclass(frozen=True)
class Curve:
    """One run in one evaluation, its points by step."""

    run: str
    method: str
    seed: int | None
    evaluation: Evaluation
    points: tuple[Point, ...]
    supervised: bool = False  # did pre-training use labels
    settings: tuple[
        tuple[str, Any], ...
    ] = ()  # of the config, without seeds: equal in runs that seeds alone set apart
    published: bool = False  # the paper's own


def read_run(run: Path) -> list[Curve]:
    """The curves of the run in folder `run`, one an evaluation; none where nothing was evaluated yet.

    Raises DataError where there is no such run, ConfigError for a config.yaml that is not one, ResultError for a
    damaged result.
    """
    path = run / "config.yaml"
    if not path.is_file():
        what = "holds no config.yaml, so it is not the folder of a run" if run.is_dir() else "is not there"
        raise DataError(f"{run} {what}. `fastsuncet train` makes one: <logging.folder>/<logging.write_tag>")
    config = load_config(path)
    found: dict[Evaluation, dict[Any, Point]] = {}
    records = read_results(run)
    ways = several_ways(records)
    for record in records:
        evaluation = Evaluation(record["kind"], labels_text(record["labels"]), variant(record, ways))
        point = of_record(record)
        place = record["encoder"].get("source") if point.step is None else point.step
        found.setdefault(evaluation, {})[place] = point
    lines = metrics.read(run / metrics.JSONL, KNN) if (run / metrics.JSONL).is_file() else []
    online = Evaluation(ONLINE, online_labels(config))
    for line in lines:
        found.setdefault(online, {})[line["step"]] = of_line(line)
    return [
        Curve(
            run=str(run),
            method=methods.name(config),
            seed=config.meta.seed,
            evaluation=evaluation,
            points=tuple(sorted(points.values(), key=lambda p: (p.step is None, p.step or 0))),
            supervised=config.criterion.supervised,
            settings=experiment(config),
        )
        for evaluation, points in found.items()
    ]


def of_record(record: dict[str, Any]) -> Point:
    """A result as a point."""
    encoder = record["encoder"]
    ledger = encoder.get("ledger") or {}
    costs = {**ledger, "epochs": encoder.get("epoch")}
    return Point(encoder.get("step"), _costs(costs), dict(record["metrics"]))


def of_line(line: dict[str, Any]) -> Point:
    """A "knn" line of metrics.jsonl as a point."""
    return Point(line["step"], _costs({**line, "epochs": line.get("epoch")}), {KNN: line["knn_accuracy"]})


def _costs(ledger: dict[str, Any]) -> dict[str, float]:
    seconds = ledger.get("seconds")
    known = {**ledger, "hours": None if seconds is None else seconds / 3600}
    return {name: known[name] for name in COSTS if known.get(name) is not None}


def labels_text(labels: dict[str, Any]) -> str:
    """The labels an evaluation learned from: "10 % labels", or their number, or "all labels"."""
    if labels.get("kind") == "all":
        return "all labels"
    if labels.get("fraction") is not None:
        return f"{100 * labels['fraction']:g} % labels"
    return f"{labels['count']:,} labels" if labels.get("count") is not None else ""


def online_labels(config: Config) -> str:
    """What nearest neighbours vote with during training: the split's labels, or all where a run uses none."""
    split = config.data.split
    if split.kind in ("none", "all"):
        return "all labels"
    if split.fraction is not None:
        return f"{100 * split.fraction:g} % labels"
    return f"labels of {Path(split.file or config.data.csv or split.kind).name}"


def several_ways(records: Iterable[dict[str, Any]]) -> set[str]:
    """The keys of "setting" in which two results of one encoder differ: they make evaluations of their own."""
    first: dict[tuple, dict[str, Any]] = {}
    keys: set[str] = set()
    for record in records:
        place = (record["kind"], labels_text(record["labels"]), str(record["encoder"].get("source")))
        before = first.setdefault(place, record["setting"])
        both = before.keys() | record["setting"].keys()
        keys |= {key for key in both if before.get(key) != record["setting"].get(key)}
    return keys - {"seed"}


def variant(record: dict[str, Any], ways: set[str]) -> str:
    """The settings among `ways` that `record` was made with: "k=20"."""
    shown = {key: record["setting"][key] for key in sorted(ways) if key in record["setting"]}
    return ", ".join(
        f"{key}={value:g}" if type(value) is float else f"{key}={value}" for key, value in shown.items()
    )


def experiment(config: Config) -> tuple[tuple[str, Any], ...]:
    """The keys and values that tell experiments apart: all but seeds, places, and what is only written down."""
    flat = dict(_flatten(config.canonical()))
    kept = [
        (key, str(value))
        for key, value in sorted(flat.items())
        if not key.endswith("seed") and not any(key == free or key.startswith(f"{free}.") for free in FREE)
    ]
    return tuple(kept)


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
