"""Write a run's numbers to files: one JSON object per line, and the training records as a table.

    metrics.jsonl              {"step": 200, "kind": "train", "nt_xent": 5.21, ...}; other kinds: "knn", ...
                               the first line, of kind "chosen", has what was chosen for the hardware
    metrics.csv                the records of kind "train", with the same columns from first to last
    metrics.superseded.jsonl   lines that a restart undid: nothing is thrown away

`step` is the number of updates done when the line was written, and the lines of a step are written before its
checkpoint. So a run that continues from the checkpoint of step k keeps every line up to k and writes the later ones
again; where the evaluation of step k was still due, only its "train" line stays. Both files then equal those of a run
without a stop, byte for byte, except for columns that measure time or memory.

Floats are written with the digits that give the same float back. JSON has no NaN: such a value is null, and
"nonfinite": {"suncet": "nan"} keeps it; the table has nan, inf and -inf. `read` restores them.
"""

import contextlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastsuncet.checkpoint.run_folder import disk_errors
from fastsuncet.config import Config
from fastsuncet.metrics.trackers import Trackers
from pipelines import atomic_files
from pipelines.output import Say, counted, csv_table, say_line

JSONL, CSV, SUPERSEDED = "metrics.jsonl", "metrics.csv", "metrics.superseded.jsonl"


class MetricsWriter(contextlib.ExitStack):
    """Appends records to the files in `folder`; other programs can read each line at once.

    `columns` are the keys that a training record can have, without "step", in the table's order. With `resume_step` the
    files continue from there: lines of later steps, and a line cut by a kill, are moved aside, and one line reports it.
    If that step is not `evaluated`, so is the line of its evaluation, which will be written again. None is a fresh
    start: all lines are moved aside. The trackers that `config` names get the numbers and the config; ConfigError if
    their packages are missing. Raises CheckpointError if the disk is full. Leaving the context closes all.
    """

    def __init__(
        self,
        folder: Path,
        columns: Sequence[str],
        config: Config,
        *,
        resume_step: int | None = None,
        evaluated: bool = True,
        say: Say = say_line,
    ):
        super().__init__()
        self.folder = folder
        self.columns = tuple(columns)
        with disk_errors(self.folder):
            atomic_files.make_folder(self.folder)
            # A picture of the views can come before the first start, and stays.
            undone = 0 if (self.folder / JSONL).exists() else None
            purge_step = undone if resume_step is None else resume_step + 1
            # Before the files change: a missing package must not leave a run half set back.
            self.trackers = self.enter_context(Trackers(config, self.folder, purge_step, say))
            self.trackers.tell(lambda tracker: say(f"metrics: also to {tracker.where}"))
            self.trackers.tell(lambda tracker: tracker.settings(config))
            self._move_later_lines(resume_step, evaluated, say)
            self._jsonl, self._csv = (
                os.open(self.folder / name, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC) for name in (JSONL, CSV)
            )
            for descriptor in (self._jsonl, self._csv):
                self.callback(os.close, descriptor)

    def write(self, record: dict[str, Any], kind: str = "train") -> dict[str, Any]:
        """Append `record`, which has "step"; return it with plain numbers, for the progress bar to show.

        Tensors and NumPy scalars become Python numbers: here the host waits for the device. Raises KeyError for a
        training record with a key that is not a column, because a table cannot grow one later.
        """
        record = {key: value.item() if hasattr(value, "item") else value for key, value in record.items()}
        if unknown := [key for key in record if kind == "train" and key not in ("step", *self.columns)]:
            raise KeyError(f"{', '.join(unknown)}: not among the columns {', '.join(self.columns)}")
        line: dict[str, Any] = {"step": record["step"], "kind": kind} | record
        nonfinite = {k: str(v) for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)}
        if nonfinite:
            line |= dict.fromkeys(nonfinite) | {"nonfinite": nonfinite}
        with disk_errors(self.folder):
            _append(self._jsonl, json.dumps(line, allow_nan=False).encode() + b"\n")
            if kind == "train":
                _append(self._csv, csv_table([self._row(record)]))
        scalars = {f"{kind}/{k}": v for k, v in record.items() if k != "step" and isinstance(v, (int, float))}
        if scalars:
            self.trackers.tell(lambda tracker: tracker.write(record["step"], scalars))
        return record

    def sync(self) -> None:
        """Wait until every line is on the disk. Call it before a checkpoint, which promises them."""
        with disk_errors(self.folder):
            os.fsync(self._jsonl)
            os.fsync(self._csv)

    def _move_later_lines(self, resume_step: int | None, evaluated: bool, say: Say) -> None:
        """Move lines after `resume_step` (None: all) and damaged ones to SUPERSEDED; make the table of the others."""

        def stays(record: dict[str, Any]) -> bool:
            if resume_step is None or record["step"] > resume_step:
                return False
            return evaluated or record["step"] < resume_step or record["kind"] == "train"

        path, moved, cut = self.folder / JSONL, [], 0
        if resume_step is not None and not path.exists():
            say(f"metrics: {path} is missing, and with it the lines up to step {resume_step}")
        path.touch()
        # A line at a time: a long run has gigabytes of records.
        with (
            open(path, "rb") as lines,
            atomic_files.replacing(self.folder / CSV) as table,
            atomic_files.replacing(path) as kept,
        ):
            table.write(csv_table([["step", *self.columns]]))
            for line in lines:
                # Without its end, it is the last line of a process that was killed.
                record = _parse(line) if line.endswith(b"\n") else None
                if record is None:
                    cut += 1
                    text = line.decode("utf-8", "backslashreplace")
                    moved.append(json.dumps({"torn": text}).encode() + b"\n")
                elif stays(record):
                    kept.write(line)
                    if record["kind"] == "train":
                        table.write(csv_table([self._row(record)]))
                else:
                    moved.append(line)
            if moved:
                # Write them there before removing them here: a kill in between leaves them twice, and loses none.
                with open(self.folder / SUPERSEDED, "ab", buffering=0) as stream:
                    _append(stream.fileno(), b"".join(moved))
                    os.fsync(stream.fileno())
                start = "a fresh start" if resume_step is None else f"continuing from step {resume_step}"
                counts = {"later": len(moved) - cut, "damaged": cut}
                note = " and ".join(counted(each, f"{word} line") for word, each in counts.items() if each)
                say(f"metrics: {start}; {note} moved to {self.folder / SUPERSEDED}")

    def _row(self, record: dict[str, Any]) -> list[Any]:
        return [record["step"], *(record.get(name) for name in self.columns)]


def read(path: str | Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl (of one kind) with NaN and infinities restored. Cut lines are left out."""
    records = [record for record in map(_parse, Path(path).read_bytes().splitlines()) if record is not None]
    return [record for record in records if kind in (None, record["kind"])]


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return one line as a record, None if a writer did not finish it."""
    try:
        record = json.loads(line)
        record |= {key: float(text) for key, text in record.pop("nonfinite", {}).items()}
        return record if type(record["step"]) is int and isinstance(record["kind"], str) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _append(descriptor: int, payload: bytes) -> None:
    rest = memoryview(payload)
    while rest:  # a full disk takes a part, and the next call raises
        rest = rest[os.write(descriptor, rest) :]
