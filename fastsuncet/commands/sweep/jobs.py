"""What is done already: a run that says so itself, and the evaluations a sweep has seen end well.

An evaluation's mark is RUN/jobs/COMMAND-DIGEST.json, the digest of all that its numbers depend on. It counts while the
run stands where it stood, and every result it names is still there.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fastsuncet.checkpoint import atomic_files
from fastsuncet.commands.sweep.runs import Job
from fastsuncet.errors import CheckpointError

FOLDER, RESULTS = "jobs", "results"  # in the run's folder
# What a number does not depend on: where things lie, how fast they are read, what is written down.
PLACES = (
    "data.root",
    "data.index",
    "data.download",
    "data.decode_threads",
    "data.prefetch",
    "data.decoder_buffers",
    "logging",
    "checkpoint",
    "transfer.root",
    "transfer.download",
)


@dataclass(frozen=True)
class State:
    """How far a job is: done or not, and in words."""

    done: bool
    words: str
    refused: str = ""  # why it can never be done like this, where that is known


def state(job: Job) -> State:
    """How far `job` is, from what lies in its run's folder. Changes nothing there."""
    folder = job.config.run_folder
    status = _json(folder / "status.json")
    if job.command == "train":
        return _training(job, folder, status)
    mark = _json(_mark(job))
    if not mark:
        return State(False, "to do")
    if mark.get("step") != status.get("step"):
        return State(False, "to do again: the run has moved on")
    missing = [name for name in mark.get("results", []) if not (folder / RESULTS / str(name)).is_file()]
    if missing:
        return State(False, f"to do again: {missing[0]} is gone")
    return State(True, "done")


def _training(job: Job, folder: Path, status: Mapping[str, Any]) -> State:
    written = folder / "config.yaml"
    if written.is_file():
        try:
            began = yaml.safe_load(written.read_bytes())
            changed = job.config.changed_keys(began)
        except (yaml.YAMLError, UnicodeDecodeError, AttributeError, OSError) as error:
            return State(False, "damaged", f"{written} cannot be read: {error}")
        if changed:
            key, old, new = changed[0]
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            text = f"{folder} holds a run with {key}: {old}, and this one has {new}{more}"
            return State(
                False, "other settings", f"{text}. Give the sweep another name, or move that folder away"
            )
    if not status:
        return State(False, "to do")
    if status.get("state") == "done":
        return State(True, "done")
    word = (
        "running"
        if _held(folder / ".running")
        else {"running": "stopped"}.get(status.get("state"), status.get("state", "stopped"))
    )
    return State(False, f"{word} at step {status.get('step')}")


def results_of(run: Path) -> dict[str, tuple[int, int]]:
    """Name of each result of a run, with what tells that it was written again."""
    return {
        path.name: (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in (run / RESULTS).glob("[!.]*.json")
    }


def mark_done(job: Job, before: Mapping[str, tuple[int, int]]) -> None:
    """Writes that `job` ended well; `before` are the results there were when it began. CheckpointError if it cannot."""
    if job.command == "train":
        return  # says so itself
    folder = job.config.run_folder
    after = results_of(folder)
    kind = job.command.split()[-1]
    written = sorted(name for name in after if name.startswith(kind) and after[name] != before.get(name))
    record = {
        "arguments": list(job.arguments),
        "step": _json(folder / "status.json").get("step"),
        "results": written,
    }
    path = _mark(job)
    try:
        atomic_files.make_folder(path.parent)
        atomic_files.replace(path, json.dumps(record, indent=1).encode() + b"\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}. {atomic_files.advice(error)}") from error


def _mark(job: Job) -> Path:
    folder = job.config.run_folder
    options = [option.removeprefix(f"{folder}/") for option in job.options]
    identity = [job.command, options, _without(job.config.canonical(), PLACES)]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    return folder / FOLDER / f"{job.command.replace(' ', '-')}-{digest}.json"


def _without(values: dict[str, Any], keys: tuple[str, ...], above: str = "") -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        key = f"{above}{name}"
        if key not in keys:
            kept[name] = _without(value, keys, f"{key}.") if isinstance(value, dict) else value
    return kept


def _json(path: Path) -> dict[str, Any]:
    """A small JSON object, {} where there is none that can be read: then nothing is known to be done."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _held(lock: Path) -> bool:
    """Whether a living process holds a run's folder."""
    if not lock.exists():
        return False
    try:
        with atomic_files.exclusive(lock) as free:
            return not free
    except OSError:
        return False  # another user's: status.json has been read, that must do
