"""Runs as curves: from the results that evaluations wrote into their folders, and from their own metrics lines."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastsuncet.commands.report.comparability import FINETUNED, several_ways, tuned, variant
from fastsuncet.commands.report.curves import (
    COSTS,
    KNN,
    ONLINE,
    Curve,
    Evaluation,
    Point,
    labels_text,
)
from fastsuncet.config import FREE_ON_RESUME, Config, load_config
from fastsuncet.metrics import writer
from fastsuncet.metrics.results import read_results
from fastsuncet.training import methods
from fastsuncet.training.state import FOLDER as CHECKPOINTS
from pipelines.data_errors import DataError

# What of a config makes no other experiment of a run, beside its seeds. (Other labels do.)
FREE = tuple(key for key in FREE_ON_RESUME if key not in ("data.split.file", "data.csv"))


def read_runs(runs: Sequence[Path]) -> list[Curve]:
    """The curves of the runs in these folders, one for each encoder's run and evaluation; none where nothing was yet.

    Raises DataError where there is no such run, ConfigError for a config.yaml that is not one, ResultError for a
    damaged result.
    """
    for run in runs:
        if not (run / "config.yaml").is_file():
            what = (
                "holds no config.yaml, so it is not the folder of a run" if run.is_dir() else "is not there"
            )
            raise DataError(
                f"{run} {what}. `fastsuncet train` makes one: <logging.folder>/<logging.write_tag>"
            )
    records = {run: read_results(run) for run in runs}
    # Over all runs: evaluated in two ways, one run's results are two evaluations, and so are everybody's.
    ways = several_ways(record for found in records.values() for record in found)
    return merge(curve for run, found in records.items() for curve in _curves(run, found, ways))


def merge(curves: Iterable[Curve]) -> list[Curve]:
    """Curves of one run in one evaluation as one: its encoders may have been evaluated into several folders."""
    merged: dict[tuple[Path, Evaluation], Curve] = {}
    for curve in curves:
        key = (Path(curve.run).resolve(), curve.evaluation)
        before = merged.get(key, curve)
        points = {(p.step is None, p.step or 0): p for p in (*before.points, *curve.points)}
        merged[key] = replace(before, points=tuple(points[place] for place in sorted(points)))
    return list(merged.values())


def _curves(run: Path, records: list[dict[str, Any]], ways: dict[Evaluation, set[str]]) -> list[Curve]:
    """The curves of one folder. An encoder of another run that was evaluated here keeps its own name and method."""
    config = load_config(run / "config.yaml")
    found: dict[tuple[str, Evaluation], dict[Any, Point]] = {}
    homes = {str(run): (methods.name(config), config)}
    for record in records:
        alike = Evaluation(record["kind"], labels_text(record["labels"]))
        parts = [tuned(record), variant(record, ways[alike])]
        evaluation = alike._replace(variant=", ".join(filter(None, parts)))
        home = home_of(record, run)
        if home not in homes:
            homes[home] = _other(home, record)
        point = of_record(record)
        place = record["encoder"].get("source") if point.step is None else point.step
        found.setdefault((home, evaluation), {})[place] = point
    lines = writer.read(run / writer.JSONL, KNN) if (run / writer.JSONL).is_file() else []
    online = Evaluation(ONLINE, online_labels(config))
    for line in lines:
        found.setdefault((str(run), online), {})[line["step"]] = of_line(line)
    curves = []
    for (home, evaluation), points in found.items():
        method, own = homes[home]
        curves.append(
            Curve(
                run=home,
                method=method,
                seed=own.meta.seed if own else None,
                evaluation=evaluation,
                points=tuple(sorted(points.values(), key=lambda p: (p.step is None, p.step or 0))),
                supervised=own.criterion.supervised
                if own
                else True,  # not known: never taken for the baseline
                settings=experiment(own) if own else (("encoder", home),),
            )
        )
    return curves


def home_of(record: dict[str, Any], run: Path) -> str:
    """The run whose encoder was evaluated, or the file it came from: `run` itself, unless its source says otherwise."""
    source = record["encoder"].get("source")
    if not source:
        return str(run)
    parents = Path(source).parts
    if CHECKPOINTS not in parents:
        return source if record["encoder"].get("step") is None else str(run)
    home = Path(*parents[: len(parents) - 1 - parents[::-1].index(CHECKPOINTS)])
    if home.parent.name == FINETUNED:  # RUN/finetune/TAG: the encoder is the run's, see `tuned`
        home = home.parent.parent
    # A run that was moved since is known by its name.
    same = home.resolve() == run.resolve() or (home.name == run.resolve().name and not home.is_dir())
    return str(run) if same else str(home)


def _other(home: str, record: dict[str, Any]) -> tuple[str, Config | None]:
    """(method, config if it can still be read) of an encoder that is not the evaluated folder's own."""
    path = Path(home) / "config.yaml"
    if path.is_file():
        config = load_config(path)
        return methods.name(config), config
    return record["encoder"].get("method") or Path(home).name, None


def of_record(record: dict[str, Any]) -> Point:
    """A result as a point."""
    encoder = record["encoder"]
    ledger = encoder.get("ledger") or {}
    return Point(
        encoder.get("step"), _costs({**ledger, "epochs": encoder.get("epoch")}), dict(record["metrics"])
    )


def of_line(line: dict[str, Any]) -> Point:
    """A "knn" line of metrics.jsonl as a point."""
    return Point(line["step"], _costs({**line, "epochs": line.get("epoch")}), {KNN: line["knn_accuracy"]})


def _costs(ledger: dict[str, Any]) -> dict[str, float]:
    seconds = ledger.get("seconds")
    known = {**ledger, "hours": None if seconds is None else seconds / 3600}
    return {name: known[name] for name in COSTS if known.get(name) is not None}


def online_labels(config: Config) -> str:
    """What nearest neighbours vote with during training: the split's labels, or all where a run uses none."""
    split = config.data.split
    if split.kind in ("none", "all") or split.fraction == 1:
        return "all labels"
    if split.fraction is not None:
        return f"{100 * split.fraction:g} % labels"
    return f"labels of {Path(split.file or config.data.csv or split.kind).name}"


def experiment(config: Config) -> tuple[tuple[str, Any], ...]:
    """The keys and values that tell experiments apart: all but seeds, places, and what is only written down."""
    return tuple(
        (key, str(value))
        for key, value in sorted(_flatten(config.canonical()), key=lambda item: item[0])
        if not key.endswith("seed") and not any(key == free or key.startswith(f"{free}.") for free in FREE)
    )


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
