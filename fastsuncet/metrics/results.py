"""Write and read the result of one evaluation: a JSON file in the run's folder, RUN/results/NAME.json.

The name follows from what was evaluated, so that a repeated evaluation replaces its result.

    {"kind": "knn",                                    finetune, knn, npi, linear, accuracy or transfer
     "metrics": {"top1": 0.61, "top5": 0.85},          from 0 to 1
     "images": 10000,                                  evaluated, each once
     "labels": {"kind": "bernoulli", "fraction": 0.1, "count": 5006},
     "encoder": {"source", "step", "epoch", "method", "ledger", "sha256"},      of Encoder.record
     "setting": {"k": 10},                             the numbers that define the evaluation
     "asked": {"evaluation.knn_k": 10, ...},           what the config says about it, where that is not a default
     "run": "cifar10_suncet",
     "versions": {"torch": "2.15.0", ...}}
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from pydantic import BaseModel, Field, FiniteFloat, PositiveInt, ValidationError

from fastsuncet.config import Config, flat
from fastsuncet.config.schema import DEFAULTS
from fastsuncet.errors import CheckpointError
from fastsuncet.metrics.trackers import Tracker, Trackers
from pipelines import atomic_files

FOLDER = "results"  # in the run's folder
# Kind -> the sections that are its own.
SECTIONS = {
    "finetune": ("finetune", "linear"),
    "knn": ("evaluation",),
    "npi": ("npi",),
    "linear": ("linear",),
    "transfer": ("transfer", "finetune"),
}
# Keys that no number depends on: paths, how fast pixels are made, what is written.
FREE = (
    *(f"data.{key}" for key in ("root", "index", "download", "decode_threads", "prefetch")),
    *("transfer.root", "transfer.download", "logging.", "checkpoint."),
)


class EncoderRecord(BaseModel, strict=True, extra="allow"):
    """What a record can say of its encoder: nothing but the source of a file of another program."""

    source: str | None = None
    step: int | None = None
    epoch: FiniteFloat | None = None
    method: str | None = None
    ledger: dict[str, FiniteFloat] | None = None
    sha256: str | None = None


class LabelsRecord(BaseModel, strict=True, extra="allow"):
    """What a record can say of the labels that were learned from."""

    fraction: FiniteFloat | None = None
    count: int | None = None
    names: str | None = None


class Record(BaseModel, strict=True, extra="allow"):
    """The required keys of a record, which can hold further ones."""

    kind: Literal["finetune", "knn", "npi", "linear", "accuracy", "transfer"]
    metrics: dict[str, FiniteFloat] = Field(min_length=1)
    images: PositiveInt
    labels: LabelsRecord
    encoder: EncoderRecord
    setting: dict
    asked: dict = {}
    run: str
    versions: dict


def write_result(run: Path, record: dict[str, Any]) -> Path:
    """Write `record` atomically into the results folder of `run`; return its file.

    Raises ValueError or TypeError for a record that `read_results` would refuse, CheckpointError if the disk refuses.
    """
    # Imports torch, which the states of a sweep do without.
    from fastsuncet.checkpoint.run_folder import disk_errors

    Record.model_validate(record)
    payload = json.dumps(record, indent=1, allow_nan=False).encode() + b"\n"
    path = Path(run) / FOLDER / f"{name_of(run, record)}.json"
    with disk_errors(path):
        atomic_files.make_folder(path.parent)
        atomic_files.replace(path, payload)
    return path


def read_results(run: Path) -> list[dict[str, Any]]:
    """Return the records of `run` in order of their names, an empty list if there is none.

    Raises CheckpointError, which names the file and the problem, for a damaged one.
    """
    return list(map(read_result, result_files(run)))


def result_files(run: Path) -> list[Path]:
    """Return the files of the records of `run` in order of their names."""
    return sorted((Path(run) / FOLDER).glob("[!.]*.json"))


def read_result(path: Path) -> dict[str, Any]:
    """Return the record in one file. Raises CheckpointError as `read_results`."""
    try:
        record = json.loads(path.read_bytes())
        Record.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the record"
        raise CheckpointError(
            f"the result {path} was not written by an evaluation: {where}: {first['msg']}. Remove it"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the result {path} cannot be read ({error}): remove it and evaluate again"
        ) from error
    return record


def send_results(config: Config, paths: Sequence[Path]) -> None:
    """Send the results in some files to the trackers that `config` names, as "results/KIND/METRIC" of the run."""
    if not config.logging.trackers:
        return
    # An evaluation with a classifier draws its confusion matrix.
    drawn = {path: path.with_suffix(".png") for path in paths if path.with_suffix(".png").is_file()}
    pictures = {path: np.asarray(Image.open(picture).convert("RGB")) for path, picture in drawn.items()}
    records = [(f"results/{path.name}", read_result(path), pictures.get(path)) for path in paths]

    def send(tracker: Tracker) -> None:
        for name, record, picture in records:
            step = record["encoder"].get("step") or 0
            series = "/".join(filter(None, ["results", record["kind"], tuning_of(record)]))
            tracker.write(step, {f"{series}/{key}": value for key, value in record["metrics"].items()})
            tracker.text(name, json.dumps(record, indent=1), step)
            if picture is not None:
                tracker.picture(name.removesuffix(".json"), picture, step)

    with Trackers(config, config.run_folder) as trackers:
        trackers.tell(send)


def asked(config: Config, kind: str) -> dict[str, Any]:
    """Return the settings that decide a result of `kind`, by dotted keys, where they are not the defaults.

    Without those of other evaluations, paths, and `meta.precision: auto`, whose meaning is in the result's setting.
    """
    others = {section for each in SECTIONS.values() for section in each}.difference(SECTIONS.get(kind, ()))
    free = (*FREE, *(f"{section}." for section in others), "meta.precision")
    values = flat(config.canonical()).items()
    return {key: value for key, value in values if value != DEFAULTS.get(key) and not key.startswith(free)}


def tuning_of(record: Mapping[str, Any]) -> str:
    """Return the name of the fine-tuning that a result is of, or that was before it, without its step; "" for none."""
    folder = record.get("finetuned", {}).get("folder", record["encoder"].get("source"))
    found = re.search(r"/finetune/([^/]+)", f"/{folder}")
    return re.sub(r"-?(tuned|step)_\d{8}.*", "", found[1]) if found else ""


def name_of(run: Path, record: dict[str, Any]) -> str:
    """Return the file's name without its suffix: kind, labels, step, and a digest of what identifies the evaluation."""
    labels, encoder = record["labels"], record["encoder"]
    parts = [record["kind"], str(labels.get("kind", "none"))]
    if labels.get("fraction") is not None:
        parts.append(f"{labels['fraction']:g}")
    if encoder.get("step") is not None:
        parts.append(f"step{encoder['step']:08d}")
    # Relative to the run, so that a run that was moved, or is named from elsewhere, keeps its names.
    source, home = Path(encoder.get("source") or "").resolve(), Path(run).resolve()
    if source.is_relative_to(home):
        source = source.relative_to(home)
    # Without the digest, two encoders of one step, or two settings of one encoder, would overwrite each other.
    identity = [record["kind"], labels, str(source), encoder.get("step"), record["setting"]]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    return re.sub(r"[^A-Za-z0-9._-]", "-", "-".join([*parts, digest]))
