"""What is done already: a run says so in its status.json, a finished evaluation has a mark.

The mark is RUN/jobs/COMMAND-DIGEST.json, with the digest of everything that the evaluation's numbers depend on. It
counts as long as the run has not gone on and all results named in it still exist.
"""

import hashlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from fastsuncet.commands.sweep.runs import Job
from fastsuncet.config import Config, ConfigErrors, flat
from fastsuncet.config.reader import parse
from fastsuncet.errors import CheckpointError
from fastsuncet.metrics.results import FOLDER as RESULTS
from pipelines import atomic_files

FOLDER = "jobs"  # in the run's folder
# Keys that no number depends on: paths, how fast pixels are made, what is written.
PLACES = (
    "data.root",
    "data.index",
    "data.download",
    "data.decode_threads",
    "data.prefetch",
    "data.decoder_buffers",
    "logging.",
    "checkpoint.",
    "transfer.root",
    "transfer.download",
)


class JobState(NamedTuple):
    """Whether a job is done, and its state in words."""

    done: bool
    text: str
    refused: str = ""  # why it cannot be done with these settings, where that is known


def job_state(job: Job) -> JobState:
    """Return the state of `job` from the files in its run's folder."""
    folder = job.config.run_folder
    status = _json(folder / "status.json")
    if job.command == "train":
        return _training_state(job.config, status)
    mark = _json(mark_path(job))
    if not mark:
        return JobState(False, "to do")
    if mark.get("step") != status.get("step"):
        return JobState(False, "to do again: the run has gone on")
    missing = [name for name in mark.get("results", []) if not (folder / RESULTS / str(name)).is_file()]
    return JobState(False, f"to do again: {missing[0]} is gone") if missing else JobState(True, "done")


def _training_state(config: Config, status: dict[str, Any]) -> JobState:
    written = config.run_folder / "config.yaml"
    try:
        changed = config.changed_keys(parse(written.read_text(encoding="utf-8"), str(written)).values)
        # The run's file has what "auto" meant; training refuses it where it means something else.
        changed = [row for row in changed if (row[0], row[2]) != ("meta.precision", "auto")]
    except FileNotFoundError:
        changed = []
    except (ConfigErrors, UnicodeDecodeError, AttributeError, OSError) as error:
        return JobState(False, "damaged", f"{written} cannot be read: {error}")
    if changed:
        key, old, new = changed[0]
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        text = f"{written.parent} holds a run with {key}: {old}, and this one has {new}{more}"
        return JobState(False, "other settings", f"{text}. Rename the sweep, or move that folder away")
    if not status:
        return JobState(False, "to do")
    word = status.get("state", "stopped")
    if word == "done":
        return JobState(True, word)
    if _is_running(written.parent):
        word = "running"
    elif word == "running":
        word = "stopped"
    return JobState(False, f"{word} at step {status.get('step')}")


def _is_running(folder: Path) -> bool:
    """Return whether a living process holds a run's folder."""
    lock = folder / ".running"
    try:
        with atomic_files.exclusive(lock) if lock.exists() else nullcontext(True) as free:
            return not free
    except OSError:
        return False  # the lock is another user's: status.json is all there is to know


def results_of(run: Path) -> dict[str, tuple[int, int]]:
    """Return the name of each result of a run, with numbers that change when it is written again."""
    stats = {path.name: path.stat() for path in (run / RESULTS).glob("[!.]*.json")}
    return {name: (stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


def mark_done(job: Job, before: dict[str, tuple[int, int]]) -> None:
    """Write that `job` succeeded; `before` are the results when it began. Raises CheckpointError if it cannot."""
    if job.command == "train":
        return  # status.json says so
    folder, kind = job.config.run_folder, job.command.split()[-1]
    written = [name for name, stat in results_of(folder).items() if stat != before.get(name)]
    record = {
        "arguments": list(job.arguments),
        "step": _json(folder / "status.json").get("step"),
        "results": sorted(name for name in written if name.startswith(kind)),
    }
    path = mark_path(job)
    try:
        atomic_files.make_folder(path.parent)
        atomic_files.replace(path, atomic_files.as_json(record))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}. {atomic_files.advice(error)}") from error


def mark_path(job: Job) -> Path:
    """Return the file that says that an evaluation is done; its name has a digest of all that decides its numbers."""
    folder = job.config.run_folder
    options = [option.removeprefix(f"{folder}/") for option in job.options]
    values = {key: value for key, value in flat(job.config.canonical()).items() if not key.startswith(PLACES)}
    identity = json.dumps([job.command, options, values], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return folder / FOLDER / f"{job.command.replace(' ', '-')}-{digest}.json"


def _json(path: Path) -> dict[str, Any]:
    """Return a small JSON object, {} where none can be read: then nothing is known to be done."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
