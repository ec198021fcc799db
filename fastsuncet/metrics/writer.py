"""The numbers of a run as files: one JSON object a line, and the training rows as a table.

    metrics.jsonl              {"step": 200, "kind": "train", "nt_xent": 5.21, ...}; other kinds: "knn", ...
    metrics.csv                the rows of kind "train", the same columns from first to last
    metrics.superseded.jsonl   lines that a restart undid: nothing is thrown away

`step` is the number of updates done when the line was written, and the lines of a step are written before its
checkpoint. So a run that continues from the checkpoint of step k keeps every line up to k and will write the
others again; both files then are, byte for byte, what an undisturbed run writes (but for the columns that
measure time).

Floats are written with the digits that give the same float back. JSON has no NaN: such a value is null, and
"nonfinite": {"suncet": "nan"} says which it was; the table has nan, inf and -inf. `read` puts them back.
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fastsuncet.checkpoint import atomic_files
from fastsuncet.console import Say, say_line
from fastsuncet.errors import CheckpointError
from fastsuncet.metrics.trackers import TensorBoard, WeightsAndBiases

JSONL, CSV, SUPERSEDED = "metrics.jsonl", "metrics.csv", "metrics.superseded.jsonl"
RESERVED = ("step", "kind", "nonfinite")


def plain(record: dict[str, Any]) -> dict[str, int | float | str | bool | None]:
    """`record` with tensors and NumPy scalars as Python numbers. Here, and only here, the host waits."""
    result = {}
    for key, value in record.items():
        value = value.item() if hasattr(value, "item") else value
        if not isinstance(value, (int, float, str, bool, type(None))):
            raise TypeError(f"metric {key!r} is a {type(value).__name__}: a number, a str or None is wanted")
        result[key] = value
    return result


class MetricsWriter:
    """Appends records to the files in `folder`, a line each, on the disk's side of this process at once.

    `columns` are the keys a training record may have, in the table's order, without "step". With
    `resume_step` the files continue from there: lines of later steps, and a line torn by a kill, are moved
    aside and it is said. None is a fresh start: every line of an earlier life is moved aside. `tensorboard`
    and `wandb` (a project's name) add those, which need their extras: ConfigError says which. A full disk is
    a CheckpointError.
    """

    def __init__(
        self,
        folder: str | Path,
        columns: Sequence[str],
        *,
        resume_step: int | None = None,
        tensorboard: bool = False,
        wandb: str | None = None,
        say: Say = say_line,
    ):
        self.folder = Path(folder)
        self.columns = tuple(columns)
        if taken := [name for name in RESERVED if name in self.columns]:
            raise ValueError(f"columns name {', '.join(taken)}: every line has these")
        try:
            atomic_files.make_folder(self.folder)
            # Before the files are touched: a missing extra must not leave a run half set back.
            self._sinks = [TensorBoard(self.folder, resume_step)] if tensorboard else []
            if wandb:
                self._sinks.append(WeightsAndBiases(wandb, self.folder, say))
            kept = _set_back(self.folder, resume_step, say)
            rows = [self._row(record) for record in kept if record["kind"] == "train"]
            atomic_files.replace(self.folder / CSV, _table([["step", *self.columns], *rows]))
            self._jsonl = open(self.folder / JSONL, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
            self._csv = open(self.folder / CSV, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._refused(error) from error

    def write(self, record: dict[str, Any], kind: str = "train") -> dict[str, Any]:
        """Appends `record`, which has "step"; returns it in plain numbers, for Progress to show the same.

        Raises KeyError for a training record with a key that is no column: a table cannot grow one half way.
        """
        record = plain(record)
        step = record["step"]
        if type(step) is not int:
            raise TypeError(f"step is {step!r}: the number of updates done, an int, is wanted")
        if unknown := [key for key in record if kind == "train" and key not in ("step", *self.columns)]:
            raise KeyError(f"{', '.join(unknown)}: not among the columns {', '.join(self.columns)}")
        if taken := [key for key in RESERVED[1:] if key in record]:
            raise KeyError(f"{', '.join(taken)}: every line has its own")
        line = {"step": step, "kind": kind, **{key: value for key, value in record.items() if key != "step"}}
        nonfinite = {key: str(value) for key, value in line.items() if _is_nonfinite(value)}
        if nonfinite:
            line |= dict.fromkeys(nonfinite) | {"nonfinite": nonfinite}
        try:
            _append(self._jsonl, json.dumps(line, allow_nan=False).encode() + b"\n")
            if kind == "train":
                _append(self._csv, _table([self._row(record)]))
        except OSError as error:
            raise self._refused(error) from error
        for sink in self._sinks:
            sink.write(step, kind, record)
        return record

    def sync(self) -> None:
        """Waits until every line is on the disk. Call it before a checkpoint, which promises them."""
        try:
            atomic_files.sync(self._jsonl.fileno())
            atomic_files.sync(self._csv.fileno())
        except OSError as error:
            raise self._refused(error) from error
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        """Closes everything; the lines are in the files already."""
        for resource in (self._jsonl, self._csv, *self._sinks):
            resource.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _row(self, record: dict[str, Any]) -> list[Any]:
        return [record["step"], *(record.get(name) for name in self.columns)]

    def _refused(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"metrics cannot be written in {self.folder}: {error}. {atomic_files.advice(error)} The same command "
            "continues from the last checkpoint."
        )


def read(path: str | Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl (of one kind), NaN and infinities put back. Torn lines are left out."""
    records = [record for record in map(_parse, Path(path).read_bytes().splitlines()) if record is not None]
    return [record for record in records if kind in (None, record["kind"])]


def _parse(line: bytes) -> dict[str, Any] | None:
    """One line as a record, None if it is not what a writer finished writing."""
    try:
        record = json.loads(line)
        record |= {key: float(text) for key, text in record.pop("nonfinite", {}).items()}
        return record if type(record["step"]) is int and isinstance(record["kind"], str) else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _set_back(folder: Path, resume_step: int | None, say: Say) -> list[dict[str, Any]]:
    """Moves the lines after `resume_step` (None: all) and torn ones aside; returns the records that stay."""
    path = folder / JSONL
    content = path.read_bytes() if path.exists() else b""
    kept_lines, kept, moved, torn = [], [], [], 0
    for line in content.splitlines(keepends=True):
        record = _parse(line) if line.endswith(b"\n") else None  # the last line of a process that was killed
        if record is None:
            torn += 1
            moved.append(json.dumps({"torn": line.decode("utf-8", "backslashreplace")}).encode() + b"\n")
        elif resume_step is None or record["step"] > resume_step:
            moved.append(line)
        else:
            kept_lines.append(line)
            kept.append(record)
    if moved:
        # First there, then gone from here: a kill in between leaves them twice in the file nobody plots.
        with open(folder / SUPERSEDED, "ab", buffering=0) as stream:
            _append(stream, b"".join(moved))
            atomic_files.sync(stream.fileno())
        where = "a fresh start" if resume_step is None else f"continuing from step {resume_step}"
        note = f", {torn} of them torn" if torn else ""
        say(f"metrics: {where}; {len(moved)} later lines{note} moved to {folder / SUPERSEDED}")
    atomic_files.replace(path, b"".join(kept_lines))
    return kept


def _append(stream: BinaryIO, payload: bytes) -> None:
    rest = memoryview(payload)
    while rest:  # a disk that fills up takes a part, then none: the next call raises
        rest = rest[stream.write(rest) :]


def _table(rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)  # floats by repr, None as an empty cell
    return text.getvalue().encode()


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
