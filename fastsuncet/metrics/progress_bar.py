"""A run as its watcher sees it: a bar at a terminal, lines in a batch log. Fed with the metrics' records."""

import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

# key of a metrics record -> how a line writes its value, how the bar does
FIELDS: dict[str, tuple[str, Callable[[float], str]]] = {
    "nt_xent": (".4f", lambda loss: f"nt_xent {loss:.2f}"),
    "swav": (".4f", lambda loss: f"swav {loss:.2f}"),
    "suncet": (".4f", lambda loss: f"suncet {loss:.2f}"),
    "cross_entropy": (".4f", lambda loss: f"cross-entropy {loss:.2f}"),
    "sup_con": (".4f", lambda loss: f"L_sup_out {loss:.2f}"),
    "lr": (".4g", lambda lr: f"lr {lr:.3g}"),
    "views_per_second": (".1f", lambda rate: f"{_short(rate)} views/s"),
    "data_wait": (".1%", lambda share: f"wait {share:.0%}"),  # share of the time spent waiting for pixels
    "petaflops": (".4g", lambda spent: f"{spent:.3g} PF"),
}
# A batch job may have a terminal too, but its output mostly ends in a file: there a bar is one endless line.
BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "KUBERNETES_SERVICE_HOST", "CI")
WIDE = 110  # columns from which there is room for a bar beside the numbers


class ProgressBar:
    """`progress.update(record)` once a metrics line; `progress.say(line)` for all else there is to tell.

    `record` is what MetricsWriter.write returned: "step" and any of FIELDS. A bar is drawn on standard error
    if that is a terminal and no batch system started the run; else one line of key=value pairs, in columns,
    on standard output. `stream` takes the place of both.
    """

    def __init__(
        self,
        total: int,  # updates in the whole run
        start: int = 0,  # updates done before this process
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,  # seconds
    ):
        self.total = total
        self._clock, self._last = clock, (start, clock())
        self._pace, self._intervals = 0.0, 0  # seconds per update, smoothed over the intervals between lines
        self._widths: dict[str, int] = {}  # of each column of the plain lines so far
        self._bar = None
        terminal = stream or sys.stderr
        dull = os.environ.get("TERM") == "dumb" or any(name in os.environ for name in BATCH)
        # A terminal that knows no width (docker run -t without one) gets lines: tqdm would draw nothing.
        if columns(terminal) and not dull:
            self._bar = tqdm(total=total, initial=start, file=terminal, dynamic_ncols=True)
        self._stream = terminal if stream or self._bar is not None else sys.stdout

    def update(self, record: dict[str, Any]) -> None:
        """Shows a training record."""
        left = self._time_left(record["step"])
        if self._bar is not None:
            self._draw(record, left)
            return
        values = {"step": f"{record['step']}/{self.total}"}
        values |= {key: _write(record[key], form) for key, (form, _) in FIELDS.items() if key in record}
        self._line(values | {"left": left})

    def say(self, line: str) -> None:
        """Prints `line` without breaking the bar."""
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves the bar as it is, with the cursor below it."""
        if self._bar is not None:
            self._bar.close()

    def _draw(self, record: dict[str, Any], left: str) -> None:
        wide = columns(self._stream) >= WIDE
        shown = [show(record[key]) for key, (_, show) in FIELDS.items() if record.get(key) is not None]
        text = " ".join([f"left {left}" if wide else f"<{left}", *shown])
        self._bar.bar_format = ("{percentage:3.0f}%|{bar}| " if wide else "") + "{n_fmt}/{total_fmt} {desc}"
        self._bar.set_description_str(text, refresh=False)
        self._bar.n = record["step"]
        self._bar.refresh()

    def _line(self, values: dict[str, str]) -> None:
        cells = []
        for key, value in values.items():
            cell = f"{key}={value}"
            self._widths[key] = max(self._widths.get(key, 0), len(cell))
            cells.append(cell.ljust(self._widths[key]))
        print(" ".join(cells).rstrip(), file=self._stream, flush=True)

    def _time_left(self, step: int) -> str:
        """Updates left, at the pace of late. The first interval, with the start-up, counts only alone."""
        (before, then), now = self._last, self._clock()
        self._last = (step, now)
        if step > before:
            self._intervals += 1
            weight = 1.0 if self._intervals <= 2 else 0.2  # 0.2: half of a change is seen after three lines
            self._pace += weight * ((now - then) / (step - before) - self._pace)
        if self._intervals == 0:
            return "?"
        return tqdm.format_interval((self.total - step) * self._pace)


def columns(stream: TextIO) -> int:
    """The width of the terminal behind `stream` in characters, 0 where there is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError, AttributeError):  # closed, or an object in memory
        return 0


def _write(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _short(number: float) -> str:
    """Three digits and a letter: 1234 -> 1.23k."""
    return tqdm.format_sizeof(number) if math.isfinite(number) else str(number)
