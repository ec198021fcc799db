"""Show a run's progress: a bar at a terminal, lines in a batch log. Both show the records of the metrics files."""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TextIO

from tqdm import tqdm

from pipelines.output import printable, say_line, survive_lost_output

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
BAR = 16  # columns: a bar is drawn where as many are left beside the numbers
REDRAWN = 0.5  # seconds


class ProgressBar:
    """`at(step)` moves the bar, `update(record)` shows a metrics line, `say(line)` prints anything else.

    `record` is what MetricsWriter.write returned: "step" and any of `losses` and FIELDS. The bar is drawn on standard
    error if that is a terminal and no batch system started the run. Otherwise each record is a line of key=value pairs,
    in columns, on standard output, and every line begins with the date and the time. `stream` replaces both.
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
        self.total, self._step = total, start
        self._clock, self._last = clock, (start, clock())
        self._began = self._last
        self._pace, self._intervals = 0.0, 0  # seconds per update, smoothed over the intervals between lines
        self._widths: dict[str, int] = {}  # of each column of the lines so far
        self._shown: list[str] = []  # the newest numbers in the bar
        self._bar: tqdm | None = None
        self._closed = threading.Event()
        of_loss = {loss: (".4f", partial("{} {:.2f}".format, loss)) for loss in losses}
        self._fields: dict[str, tuple[str, Callable[[float], str]]] = of_loss | FIELDS
        terminal = stream or sys.stderr
        batch = os.environ.get("TERM") == "dumb" or any(name in os.environ for name in BATCH)
        # A terminal without a size (docker run -t can give one) gets lines: tqdm would draw nothing.
        self._stream = terminal
        if _width(terminal) and not batch:
            self._bar = tqdm(
                total=total, initial=start, file=terminal, dynamic_ncols=True, bar_format="starting"
            )
            # Updates can take minutes, and the time goes on.
            self._thread = threading.Thread(target=self._redraw, args=(self._bar,), daemon=True)
            self._thread.start()
        elif stream is None:
            self._stream = sys.stdout

    def at(self, step: int) -> None:
        """Note the updates done. The bar shows it within REDRAWN seconds."""
        self._step = step

    def update(self, record: dict[str, Any]) -> None:
        """Show a training record."""
        self._step = record["step"]
        self._measure_pace()
        if self._bar is not None:
            found = ((show, record.get(key)) for key, (_, show) in self._fields.items())
            self._shown = [show(value) for show, value in found if value is not None]
            self._draw(self._bar)
            return
        values = {"step": f"{record['step']}/{self.total}"}
        for key, (form, _) in self._fields.items():
            if key in record:
                values[key] = "-" if record[key] is None else format(record[key], form)
        cells = []
        for key, value in {**values, "left": self._time_left()}.items():
            cell = f"{key}={value}"
            self._widths[key] = max(self._widths.get(key, 0), len(cell))
            cells.append(cell.ljust(self._widths[key]))
        self.say(" ".join(cells).rstrip())

    def say(self, line: str) -> None:
        """Print `line` without breaking the bar."""
        if self._bar is not None:
            with survive_lost_output(self._stream):
                self._bar.write(printable(line), file=self._stream)
        else:
            say_line(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", self._stream)

    def close(self) -> None:
        """Leave the bar as it is, with the cursor below it."""
        if self._bar is not None:
            self._closed.set()
            self._thread.join()
            self._draw(self._bar)
            self._bar.close()

    def _redraw(self, bar: tqdm) -> None:
        while not self._closed.wait(REDRAWN):
            self._draw(bar)

    def _draw(self, bar: tqdm) -> None:
        """Draw as many of the numbers as fit, and a bar where there is room for it."""
        # The lock because two threads draw, and an older line must not be the last.
        with survive_lost_output(self._stream), tqdm.get_lock():
            _, began = self._began
            elapsed = tqdm.format_interval(self._clock() - began)
            text, room = f"{self._step}/{self.total} {elapsed}<{self._time_left()}", _width(self._stream) - 1
            for number in self._shown:
                if len(text) + 1 + len(number) > room:
                    break
                text += f" {number}"
            wide = len(text) + len("100%|| ") + BAR <= room
            bar.n = self._step
            # Doubled braces, which a format leaves single: a loss can have any name.
            text = text.replace("{", "{{").replace("}", "}}")
            bar.bar_format = "{percentage:3.0f}%|{bar}| " * wide + text
            bar.refresh()

    def _measure_pace(self) -> None:
        """Take the pace of the updates since the last record.

        The first interval includes the start-up, so it counts only until there is a second one.
        """
        (before, then), now = self._last, self._clock()
        self._last = (self._step, now)
        if self._step > before:
            self._intervals += 1
            weight = 1.0 if self._intervals <= 2 else 0.2  # 0.2: half of a change shows after three lines
            self._pace += weight * ((now - then) / (self._step - before) - self._pace)

    def _time_left(self) -> str:
        """Return the time for the remaining updates at the recent pace, or at that since the start."""
        (start, began), pace = self._began, self._pace
        if self._intervals == 0:
            if self._step == start:
                return "?"
            pace = (self._clock() - began) / (self._step - start)
        return tqdm.format_interval((self.total - self._step) * pace)


def _width(stream: TextIO) -> int:
    """Return the width of the terminal behind `stream` in characters, 0 if it is none or has no size."""
    try:
        size = os.get_terminal_size(stream.fileno())
        return size.columns if stream.isatty() and size.lines else 0
    except (OSError, ValueError, AttributeError):  # closed, or an object in memory
        return 0


def _short(number: float) -> str:
    """Return three digits and a letter: 1234 -> 1.23k."""
    return tqdm.format_sizeof(number) if math.isfinite(number) else str(number)
