"""Read runs as curves: from the results of evaluations in their folders, and from their own metrics lines.

Two results are one measurement if they were made with the same settings, except for those that belong to the encoder or
the machine: these are named in a note. Their labels are one list, or draws of one kind that differ in their seed.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from fastsuncet.checkpoint.manager import FOLDER as CHECKPOINTS
from fastsuncet.commands.report.curves import COSTS, KNN, ONLINE, Curve, Measurement, Point, labels_text
from fastsuncet.config import FREE_ON_RESUME, Config, flat, load_config
from fastsuncet.config.rules import FILES
from fastsuncet.metrics import writer
from fastsuncet.metrics.rankme import RANKS
from fastsuncet.metrics.results import read_results, tuning_of
from fastsuncet.training import methods
from pipelines.data_errors import DataError
from pipelines.output import counted, first_five

FINETUNED, EXPORTS = "finetune", "export"  # the folders of a run's fine-tuned and of its exported encoders
# In a result's "setting", but not chosen for the evaluation.
OUTCOMES = ("seed", "converged", "chosen_strength", "finetuned")
# May differ within a measurement, since it belongs to the encoder or the machine. A note names it.
MAY_DIFFER = (
    *("mean", "std", "support_scale", "support_ratio", "temperature"),
    *("precision", "accumulate", "batchnorm_images", "processes"),
)
# Of the machine: seeds that differ in them are averaged, and a note names them.
MACHINE = ("meta.device", "meta.threads")
# Settings of a run that make no other experiment of it. (Other labels and initial weights do.)
NO_MATTER = tuple(
    f"{key}."
    for key in (*FREE_ON_RESUME, *MACHINE)
    if key not in ("data.split.file", "data.csv", "model.init")
)
Json = dict[str, Any]


def read_runs(runs: Sequence[Path]) -> tuple[list[Curve], list[str]]:
    """Return the curves of the runs in these folders, one for each encoder's run and measurement, and notes on them.

    An encoder of another run that was evaluated here keeps its own name and method. Several results of one checkpoint
    in one measurement differ in their seed: their mean is taken. A run without results gives a note, and so does what
    is no run. Raises DataError for what does not exist and where nothing is a run, ConfigError for a config.yaml that
    is not one, CheckpointError for a damaged result.
    """
    others = [run for run in runs if run.exists() and not (run / "config.yaml").is_file()]
    # `runs/*` names the folder of the indices too.
    configs = {run: read_config(run) for run in runs if run not in others or others == list(runs)}
    images = {run: data_set(config) for run, config in configs.items()}
    several = len(set(images.values())) > 1
    records = {run: read_results(run) for run in configs}
    for run, found in records.items():
        for record in (record for record in found if record["kind"] != "transfer"):
            held_out = record["setting"].pop("validation", images[run])
            # A share of the labels is another draw with each seed.
            share = type(record.get("asked", {}).get("data.validation")) is float
            record["setting"]["data"] = images[run] if share else held_out
    # Over all runs: a setting that differs in one of them makes two measurements in all of them.
    splitting, notes = compare_settings([record for found in records.values() for record in found])
    homes: dict[Path, tuple[str, str, Config | None]] = {
        run.resolve(): (str(run), methods.name(config), config) for run, config in configs.items()
    }
    table: dict[tuple[Path, Measurement], dict[int | None, list[Point]]] = defaultdict(
        lambda: defaultdict(list)
    )
    draws: dict[tuple[Measurement, int], dict[Path, set[Any]]] = defaultdict(lambda: defaultdict(set))
    for run, found in records.items():
        for record in found:
            kind, name, one = measurement_of(record), home_of(record, run, configs[run]), record["encoder"]
            if (home := Path(name).resolve()) not in homes:
                other = load_config(path) if (path := home / "config.yaml").is_file() else None
                method = methods.name(other) if other else one.get("method") or home.name
                homes[home] = (name, method, other)
            tag = tuning_of(record) if "finetuned" in record["setting"] else None
            tuned = "" if tag is None else f"fine-tuned first ({tag})" if tag else "fine-tuned first"
            parts = ", ".join(filter(None, [tuned, variant(setting_of(record), splitting[kind])]))
            made = point(one.get("step"), one.get("epoch"), one.get("ledger") or {}, dict(record["metrics"]))
            measurement = kind._replace(variant=parts)
            table[home, measurement][made.step].append(made)
            if other := homes[home][2]:
                labels = (record["labels"].get("count"), record["labels"].get("names"))
                draws[measurement, other.meta.seed][home].add(labels)
        for measurement, made in _online(run, configs[run], f"data={images[run]}" if several else ""):
            table[run.resolve(), measurement][made.step].append(made)
    curves = []
    for (home, measurement), by_step in table.items():
        name, method, config = homes[home]
        steps = sorted(by_step, key=lambda step: (step is None, step or 0))
        for same in by_step.values():
            if len(same) > 1:
                text = f"{len(same)} results of one checkpoint that differ in their seed at most: their mean"
                notes.append(f"{name}, {measurement}: {text}")
        curves.append(
            Curve(
                run=name,
                method=method,
                seed=config.meta.seed if config else None,
                measurement=measurement,
                points=tuple(mean_of(by_step[step]) for step in steps),
                # True where it is not known: such a run is never taken as the baseline.
                supervised=config.criterion.supervised if config else True,
                settings=experiment(config) if config else (("encoder", name),),
                stopped=stopped_at(config, by_step[steps[-1]][0]) if config else "",
            )
        )
    notes += [
        f"{measurement}: not all runs of seed {seed} were evaluated on the same draw of labels"
        for (measurement, seed), by_run in draws.items()
        if len(set(map(frozenset, by_run.values()))) > 1
    ]
    machines = [{key: flat(config.canonical())[key] for key in MACHINE} for config in configs.values()]
    if machine := sorted(differing(machines, missing=True)):
        notes.append(
            f"not all runs were trained with the same {', '.join(machine)}: their hours can differ by that"
        )
    stopped: dict[Measurement, list[str]] = defaultdict(list)
    for curve in curves:
        if curve.stopped:
            stopped[curve.measurement].append(f"{curve.run} ({curve.stopped})")
    notes += [
        f"{what}: the last measured checkpoint is taken for the end, and left out with --lengths: {', '.join(each)}"
        for what, each in stopped.items()
    ]
    if begun := dict.fromkeys(curve.run for curve in curves if curve.from_weights):
        notes.append(f"the cost of the initial weights (model.init) is not counted: {', '.join(begun)}")
    evaluated = {home for home, _ in table}
    silent = [f"{run}: nothing was evaluated yet" for run in records if run.resolve() not in evaluated]
    beside = [f"left out, no folder of a run: {first_five([str(path) for path in others])}"] if others else []
    return curves, beside + silent + notes


def _online(run: Path, config: Config, data: str) -> Iterator[tuple[Measurement, Point]]:
    """Yield the k-NN accuracies of a run's own metrics lines; `data` belongs to the variant of the measurement."""
    split = config.data.split
    kind = "all" if split.kind == "none" else split.kind
    count = drawn(split.images, config.data.validation)
    known = labels_text({"kind": kind, "fraction": split.fraction, "count": count})
    labels = known or f"labels of {Path(split.file or config.data.csv or split.kind).name}"
    lines = writer.read(run / writer.JSONL, KNN) if (run / writer.JSONL).is_file() else []
    for line in map(numbers, lines):
        if not {"knn_accuracy", "knn_supports"} <= line.keys():
            continue
        metrics = {KNN: line["knn_accuracy"], **{key: line[key] for key in RANKS if key in line}}
        # Of a draw of labels, the number differs from seed to seed, and seeds must stay comparable.
        supports = f"{line['knn_supports']:,} supports" if split.kind in ("none", "all") else ""
        measurement = Measurement(ONLINE, labels, ", ".join(filter(None, [supports, data])))
        yield measurement, point(line["step"], line.get("epoch"), line, metrics)


def numbers(line: Json) -> Json:
    """Return the finite numbers of a metrics line: another program can have written anything else in their place."""
    return {key: v for key, v in line.items() if type(v) in (int, float) and abs(v) <= sys.float_info.max}


def data_set(config: Config) -> str:
    """Return the name of the images: a built-in data set's, or that of their folder."""
    data = config.data
    return Path(data.pack or data.root or "").name if data.kind in FILES else data.kind


def read_config(folder: Path) -> Config:
    """Return the config of a run. Raises DataError for a folder that is no run's."""
    if not (folder / "config.yaml").is_file():
        exists = "holds no config.yaml, so it is not the folder of a run"
        what = exists if folder.exists() else "does not exist"
        raise DataError(
            f"{folder} {what}. `fastsuncet train` makes one: <logging.folder>/<logging.write_tag>"
        )
    return load_config(folder / "config.yaml")


def measurement_of(record: Json) -> Measurement:
    """Return what was measured, without its variant."""
    # As `_online` does: data.validation can have taken some of the images that were drawn.
    asked = record.get("asked", {})
    count = drawn(asked.get("data.split.images"), asked.get("data.validation"))
    return Measurement(record["kind"], labels_text(record["labels"] | ({"count": count} if count else {})))


def drawn(images: Any, validation: Any) -> int | None:
    """Return the labels to learn from of a draw of `images`, None without one; data.validation can be a share of it."""
    if type(images) is not int:
        return None
    return images - round(validation * images) if type(validation) is float else images


def setting_of(record: Json) -> Json:
    """Return the settings of an evaluation, the kind of its labels, and the digest of a list of them."""
    labels = record["labels"]
    kind = "all" if measurement_of(record).labels == "all labels" else labels.get("kind")
    listed = {"names": labels.get("names")} if kind in ("names", "csv") else {}
    return {**record["setting"], "split": kind, **listed}


def compare_settings(records: list[Json]) -> tuple[dict[Measurement, set[str]], list[str]]:
    """Return the keys of `setting_of` that split each kind and share of labels into several measurements, and notes.

    For one encoder all keys that differ between its results split; between encoders, all but MAY_DIFFER, and a note
    names those. Another one counts the results on labels that were learned from.
    """
    kinds: dict[Measurement, dict[str, list[Json]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        kinds[measurement_of(record)][str(record["encoder"].get("source"))].append(setting_of(record))
    known = Counter(measurement_of(record) for record in records if record.get("learned"))
    splitting, notes = {}, []
    for kind, encoders in kinds.items():
        if count := known[kind]:
            high = "too high, on labels that the network has learned from"
            notes.append(f"{kind}: {counted(count, 'result')} {high}")
        within = set().union(*(differing(settings, missing=True) for settings in encoders.values()))
        # An older result can lack newer keys.
        between = differing([*chain(*encoders.values())], missing=False)
        splitting[kind] = (within | between.difference(MAY_DIFFER)).difference(OUTCOMES)
        if own := sorted(between.intersection(MAY_DIFFER)):
            notes.append(f"{kind}: not all runs were evaluated with the same {', '.join(own)}")
    return splitting, notes


def differing(settings: list[Json], *, missing: bool) -> set[str]:
    """Return the keys with different values; `missing`: a missing key is a value too."""

    def values(key: str) -> list[Any]:
        return [setting.get(key) for setting in settings if missing or key in setting]

    return {key for key in set().union(*settings) if any(value != values(key)[0] for value in values(key))}


def variant(setting: Json, splitting: set[str]) -> str:
    """Return those of `setting` that are among `splitting`: "k=20"."""
    shown = {key: setting[key] for key in sorted(splitting) if key in setting}
    return ", ".join(
        f"{key}={value:g}" if type(value) is float else f"{key}={value}" for key, value in shown.items()
    )


def home_of(record: Json, run: Path, config: Config) -> str:
    """Return the run whose encoder was evaluated, or the file of the encoder; `run` if the record names no other.

    `config` is that of `run`.
    """
    source = record["encoder"].get("source")
    if not source:
        return str(run)
    # A file of another program's weights has no step, and can lie in a folder of any name.
    ours = record["encoder"].get("step") is not None
    folders = (CHECKPOINTS, EXPORTS) if ours else (CHECKPOINTS,)
    home = next((parent.parent for parent in Path(source, "-").parents if parent.name in folders), None)
    if home is None:
        inside = ours and Path(source).resolve().is_relative_to(run.resolve())
        return str(run) if inside else source
    if home.parent.name == FINETUNED:  # RUN/finetune/TAG: the encoder is the run's
        home = home.parent.parent
    # A run that was moved, copied or renamed is recognized by its name, now or when it was evaluated. Another run can
    # have taken its place since.
    free = not home.is_dir() or home == config.run_folder
    known = free and home.name in (run.resolve().name, record["run"])
    return str(run) if known or home.resolve() == run.resolve() else str(home)


def point(step: int | None, epoch: float | None, ledger: Json, metrics: dict[str, float]) -> Point:
    """Return an evaluation with the costs that its ledger knows."""
    seconds = ledger.get("seconds")
    known = {**ledger, "epochs": epoch, "hours": None if seconds is None else seconds / 3600}
    return Point(step, {name: known[name] for name in COSTS if (known.get(name) or 0) > 0}, metrics)


def stopped_at(config: Config, last: Point) -> str:
    """Return "20 of 40 updates" if the last measured checkpoint of a run is before its end, "" where it is not."""
    o = config.optimization
    done, planned, form, unit = last.step, o.steps, ",", "updates"
    if planned is None:
        done, planned, form, unit = last.costs.get("epochs"), o.epochs, "g", "epochs"
    if done is None or planned is None or done >= planned:
        return ""
    return f"{done:{form}} of {planned:{form}} {unit}"


def mean_of(evaluations: Sequence[Point]) -> Point:
    """Return evaluations of one encoder as one, with the mean of each metric over those that have it."""
    found = [each.metrics for each in evaluations]
    names = dict.fromkeys(chain(*found))
    metrics = {name: fmean(each[name] for each in found if name in each) for name in names}
    return replace(evaluations[0], metrics=metrics)


def experiment(config: Config) -> tuple[tuple[str, Any], ...]:
    """Return the keys and values that define an experiment: without seeds, places, and what changes no result."""
    values, model = flat(config.canonical()), config.model
    if model.init and model.init_sha256:  # the same file can lie elsewhere on another machine
        values["model.init"] = f"{Path(model.init).name} {model.init_sha256[:8]}"
    return tuple(
        (key, str(value))
        for key, value in [*sorted(values.items()), ("data", data_set(config))]
        if not key.endswith("seed") and not f"{key}.".startswith(NO_MATTER)
    )
