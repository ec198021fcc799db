"""What is done already: a run says so in its status.json, an evaluation by its results in the run's folder."""

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fastsuncet.commands.sweep.runs import Job
from fastsuncet.config import Config, ConfigErrors
from fastsuncet.config.reader import parse
from fastsuncet.errors import CheckpointError
from fastsuncet.metrics.results import asked, read_results
from fastsuncet.paths import steps_in
from pipelines import atomic_files


class JobState(NamedTuple):
    """Whether a job is done, and its state in words."""

    done: bool
    text: str
    damaged: bool = False  # a result, or all checkpoints that are missing: nothing is left to measure
    remedy: str = ""  # for damaged checkpoints; that for a result is in its text


def job_state(job: Job) -> JobState:
    """Return the state of `job` from the files in its run's folder."""
    folder = job.config.run_folder
    status = atomic_files.read_object(folder / "status.json")  # {}: nothing is known to be done
    if job.command == "train":
        return _training_state(job.config, status)
    try:
        steps = {record["encoder"].get("step") for record in _results_of(job)}
    except CheckpointError as error:
        return JobState(False, f"not known to be done: {error}", damaged=True)
    if not steps:
        return JobState(False, "to do")
    wanted = {status.get("step")}
    if "--every-checkpoint" in job.options:
        # Of those that are there: the run's last one can have been moved away, and is then measured by no command.
        wanted = {*steps_in(folder)} or wanted
    if "--encoder" in job.options or wanted <= steps:
        return JobState(True, "done")
    missing = sorted(wanted - steps, key=str)
    if any(_is_good(folder, step) for step in missing):
        return JobState(False, "to do again: the run has gone on")
    names = ", ".join(f"step_{step:08d}" for step in missing)
    remedy = (
        f" in {folder / 'checkpoints'}: move it away, and the rest is all there is. If it is the last one, "
        "`fastsuncet train` then makes it again"
    )
    return JobState(False, f"done but for {names}, damaged", damaged=True, remedy=remedy)


def _is_good(folder: Path, step: Any) -> bool:
    """Return whether a run's checkpoint of a step can be used; True where nobody knows the step, or it is not there."""
    # Imports torch.
    from fastsuncet.checkpoint import format, manager

    path = folder / manager.FOLDER / f"step_{step:08d}" if type(step) is int else None
    if path is None or not path.exists():
        return True
    try:
        format.verify(path, step)
    except format.DamagedCheckpoint:
        return False
    return True


def _results_of(job: Job) -> Iterator[dict[str, Any]]:
    """Yield the results that the job's command wrote with its settings, of its encoder at any step."""
    kind, folder = job.command.split()[-1], job.config.run_folder
    weights = _weights_in(Path(job.options[1])) if "--encoder" in job.options else None
    settings, precision = asked(job.config, kind), job.config.meta.precision
    data_sets = set(job.config.transfer.datasets) if kind == "transfer" else set()
    for record in read_results(folder):
        # The run's own checkpoints by its name, since a run can be moved; a fine-tuning can have the same.
        home = Path(record["encoder"].get("source") or "").parent.parent
        tuned = home.parent.name == "finetune" != folder.absolute().parent.name
        of_encoder = home.name == folder.name and not tuned
        if weights is not None:
            of_encoder = record["encoder"].get("sha256") in weights
        # A transfer's result grows with each data set.
        complete = data_sets <= set(record["metrics"])
        # "auto" took what the hardware has.
        same = precision in ("auto", record["setting"].get("precision", precision))
        given, wanted = ({**each, "transfer.datasets": None} for each in (record.get("asked", {}), settings))
        if of_encoder and complete and same and (record["kind"], given) == (kind, wanted):
            yield record


def _weights_in(encoder: Path) -> set[str]:
    """Return the sha256 of a file of weights, of an export or a checkpoint; of a run's folder those of all its own."""
    found: set[str] = set()
    for path in (*encoder.glob("checkpoints/step_*/meta.json"), encoder / "meta.json"):
        with suppress(KeyError, TypeError, AttributeError):  # another file of that name
            found |= {file["sha256"] for file in atomic_files.read_object(path)["files"].values()}
    if found:
        return found
    # Imports torch.
    from fastsuncet.models.pretrained_weights import digest_of

    return {digest_of(path) for path in (encoder, encoder / "model.safetensors") if path.is_file()}


def _training_state(config: Config, status: dict[str, Any]) -> JobState:
    if _has_other_settings(config):
        return JobState(False, "other settings")  # which `train` refuses, with their names
    if not status:
        return JobState(False, "to do")
    word = status.get("state", "stopped")
    if word == "done":
        return JobState(True, word)
    if _is_running(config.run_folder):
        word = "running"
    elif word == "running":
        word = "stopped"
    return JobState(False, f"{word} at step {status.get('step')}")


def _has_other_settings(config: Config) -> bool:
    """Return whether a run's config.yaml is damaged or differs in what no resumed run can change."""
    written = config.run_folder / "config.yaml"
    if not written.exists():
        return False
    try:
        changed = config.changed_keys(parse(written.read_text(encoding="utf-8"), str(written)).values)
    except (ConfigErrors, UnicodeDecodeError, AttributeError, OSError):
        return True
    # The run's file has what "auto" meant; training refuses it where it means something else.
    return any((key, new) != ("meta.precision", "auto") for key, _, new in changed)


def _is_running(folder: Path) -> bool:
    """Return whether a living process holds a run's folder."""
    lock = folder / ".running"
    try:
        with atomic_files.exclusive(lock) if lock.exists() else nullcontext(True) as free:
            return not free
    except OSError:
        return False  # the lock is another user's: status.json is all there is to know
