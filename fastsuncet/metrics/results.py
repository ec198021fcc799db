"""One evaluation's numbers as one JSON file in the run's folder, RUN/results/NAME.json.

The name follows from what was evaluated, so that doing it again replaces the number instead of adding a second one.

    {"kind": "knn",                                    what was done: finetune knn npi linear accuracy transfer
     "metrics": {"top1": 0.61, "top5": 0.85},          shares from 0 to 1
     "images": 10000,                                  evaluated, each once
     "labels": {"kind": "bernoulli", "fraction": 0.1, "count": 5006},
     "encoder": {"source", "step", "epoch", "method", "ledger"},      of Encoder.record
     "setting": {"k": 10},                             the numbers that define the evaluation
     "run": "cifar10_suncet",
     "versions": {"torch": "2.15.0", ...}}
"""

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from fastsuncet.checkpoint import atomic_files, serialization
from fastsuncet.errors import FastSuncetError

FOLDER = "results"  # in the run's folder
KINDS = ("finetune", "knn", "npi", "linear", "accuracy", "transfer")
# Key -> the type of its value; what else a record holds is its writer's.
FIELDS = {
    "kind": str,
    "metrics": dict,
    "images": int,
    "labels": dict,
    "encoder": dict,
    "setting": dict,
    "run": str,
    "versions": dict,
}


class ResultError(FastSuncetError):
    """A result cannot be read or written: the text names the file."""

    exit_code = 5


def write_result(run: Path, record: dict[str, Any]) -> Path:
    """Writes `record` into the folder of results of `run` and returns its file, which exists whole or not at all.

    Raises ValueError or TypeError for a record that `read_results` would refuse, ResultError if the disk refuses.
    """
    record = serialization.plain_json(record, "result")
    if fault := _fault(record):
        raise ValueError(f"write_result: {fault}")
    path = Path(run) / FOLDER / f"{name_of(run, record)}.json"
    try:
        atomic_files.make_folder(path.parent)
        atomic_files.replace(path, json.dumps(record, indent=1).encode() + b"\n")
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error}. {atomic_files.advice(error)}") from error
    return path


def read_results(run: Path) -> list[dict[str, Any]]:
    """The records of `run` in order of their names; none where nothing was evaluated yet.

    Raises ResultError, which names the file and what is wrong with it, for a damaged one.
    """
    records = []
    for path in sorted((Path(run) / FOLDER).glob("[!.]*.json")):
        try:
            record = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ResultError(
                f"the result {path} cannot be read ({error}): remove it and evaluate again"
            ) from error
        if fault := _fault(record):
            raise ResultError(f"the result {path} is not what an evaluation writes: {fault}. Remove it")
        records.append(record)
    return records


def name_of(run: Path, record: dict[str, Any]) -> str:
    """The file's name without its suffix: kind, labels, step, and a digest of all that makes it another evaluation."""
    labels, encoder = record["labels"], record["encoder"]
    parts = [record["kind"], str(labels.get("kind", "none"))]
    if labels.get("fraction") is not None:
        parts.append(f"{labels['fraction']:g}")
    if encoder.get("step") is not None:
        parts.append(f"step{encoder['step']:08d}")
    # Two encoders of one step, two settings of one encoder: without the digest one would overwrite the other.
    source = Path(encoder.get("source") or "").resolve()
    home = Path(run).resolve()
    if source.is_relative_to(home):  # a run that was moved, or is named from elsewhere, keeps its names
        source = source.relative_to(home)
    identity = [record["kind"], labels, str(source), encoder.get("step"), record["setting"]]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    return re.sub(r"[^A-Za-z0-9._-]", "-", "-".join([*parts, digest]))


def _fault(record: Any) -> str:
    """What is wrong with a record, or an empty string."""
    if not isinstance(record, dict):
        return f"it holds a {type(record).__name__} and no record"
    for key, kind in FIELDS.items():
        if key not in record:
            return f"it has no {key}"
        if not isinstance(record[key], kind) or isinstance(record[key], bool):
            return f"its {key} is {record[key]!r}, where a {kind.__name__} is wanted"
    if record["kind"] not in KINDS:
        return f"its kind is {record['kind']!r}, which is not one of {', '.join(KINDS)}"
    numbers = record["metrics"].items()
    wrong = [key for key, value in numbers if type(value) not in (int, float) or not math.isfinite(value)]
    if wrong or not record["metrics"]:
        return f"its metrics {wrong} are not numbers" if wrong else "it has no metrics"
    if record["images"] < 1:
        return f"its images are {record['images']}, where 1 or more are wanted"
    return ""
