"""Show a run's progress: a bar at a terminal, lines in a batch log. Both show the records of the metrics files."""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TextIO

from tqdm import tqdm

from fastsuncet.console import printable, say_line, survive_lost_output

# Key of a metrics record -> the format of its value in a line, and its text in the bar.
FIELDS: dict[str, tuple[str, Callable[[float], str]]] = {
    "lr": (".4g", lambda lr: f"lr {lr:.3g}"),
    "views_per_second": (".1f", lambda rate: f"{_short(rate)} views/s"),
    "data_wait": (".1%", lambda share: f"wait {share:.0%}"),  # fraction of the time spent waiting for pixels
    "peak_memory_gb": (".3g", lambda size: f"{size:.3g} GB"),
    "petaflops": (".4g", lambda spent: f"{spent:.3g} PF"),
}
# A batch job can have a terminal, but its output mostly ends in a file, where a bar is one endless line.
BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "KUBERNETES_SERVICE_HOST", "CI")
WIDE = 110  # columns from which a bar fits next to the numbers


class ProgressBar:
    """`update(record)` shows a metrics line; `say(line)` prints anything else.

    `record` is what MetricsWriter.write returned: "step" and any of `losses` and FIELDS. The bar is drawn on standard
    error if that is a terminal and no batch system started the run. Otherwise each record is a line of key=value pairs,
    in columns, on standard output. `stream` replaces both.
    """

    def __init__(
        self,
        total: int,  # updates in the whole run
        start: int = 0,  # updates done before this process
        losses: Sequence[str] = (),
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,  # seconds
    ):
        self.total = total
        self._clock, self._last = clock, (start, clock())
        self._pace, self._intervals = 0.0, 0  # seconds per update, smoothed over the intervals between lines
        self._widths: dict[str, int] = {}  # of each column of the lines so far
        self._bar: tqdm | None = None
        of_loss = {loss: (".4f", partial("{} {:.2f}".format, loss)) for loss in losses}
        self._fields: dict[str, tuple[str, Callable[[float], str]]] = of_loss | FIELDS
        terminal = stream or sys.stderr
        batch = os.environ.get("TERM") == "dumb" or any(name in os.environ for name in BATCH)
        # A terminal without a width (docker run -t can give one) gets lines: tqdm would draw nothing.
        if _width(terminal) and not batch:
            # tqdm's own format would begin with "?it/s".
            self._bar = tqdm(
                total=total,
                initial=start,
                file=terminal,
                dynamic_ncols=True,
                desc="starting",
                bar_format="{n_fmt}/{total_fmt} {desc}",
            )
        self._stream = terminal if stream or self._bar is not None else sys.stdout

    def update(self, record: dict[str, Any]) -> None:
        """Show a training record."""
        left = self._time_left(record["step"])
        if self._bar is not None:
            self._draw(self._bar, record, left)
            return
        values = {"step": f"{record['step']}/{self.total}"}
        for key, (form, _) in self._fields.items():
            if key in record:
                values[key] = "-" if record[key] is None else format(record[key], form)
        cells = []
        for key, value in {**values, "left": left}.items():
            cell = f"{key}={value}"
            self._widths[key] = max(self._widths.get(key, 0), len(cell))
            cells.append(cell.ljust(self._widths[key]))
        say_line(" ".join(cells).rstrip(), self._stream)

    def say(self, line: str) -> None:
        """Print `line` without breaking the bar."""
        if self._bar is not None:
            with survive_lost_output(self._stream):
                self._bar.write(printable(line), file=self._stream)
        else:
            say_line(line, self._stream)

    def close(self) -> None:
        """Leave the bar as it is, with the cursor below it."""
        if self._bar is not None:
            self._bar.close()

    def _draw(self, bar: tqdm, record: dict[str, Any], left: str) -> None:
        wide = _width(self._stream) >= WIDE
        shown = [show(record[key]) for key, (_, show) in self._fields.items() if record.get(key) is not None]
        bar.bar_format = ("{percentage:3.0f}%|{bar}| " if wide else "") + "{n_fmt}/{total_fmt} {desc}"
        bar.set_description_str(" ".join([f"left {left}" if wide else f"<{left}", *shown]), refresh=False)
        bar.n = record["step"]
        bar.refresh()

    def _time_left(self, step: int) -> str:
        """Return the time for the remaining updates at the recent pace.

        The first interval includes the start-up, so it counts only until there is a second one.
        """
        (before, then), now = self._last, self._clock()
        self._last = (step, now)
        if step > before:
            self._intervals += 1
            weight = 1.0 if self._intervals <= 2 else 0.2  # 0.2: half of a change shows after three lines
            self._pace += weight * ((now - then) / (step - before) - self._pace)
        if self._intervals == 0:
            return "?"
        return tqdm.format_interval((self.total - step) * self._pace)


def _width(stream: TextIO) -> int:
    """Return the width of the terminal behind `stream` in characters, 0 if it is not a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError, AttributeError):  # closed, or an object in memory
        return 0


def _short(number: float) -> str:
    """Return three digits and a letter: 1234 -> 1.23k."""
    return tqdm.format_sizeof(number) if math.isfinite(number) else str(number)
