"""Show a run's progress: a bar at a terminal, lines in a batch log. Both show the records of the metrics files."""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from tqdm import tqdm

from pipelines.output import printable, say_line, survive_lost_output

# Key of a metrics record -> the format of its value in a line, and its text in the bar.
FIELDS = {
    "lr": (".4g", "lr {:.3g}"),
    "views_per_second": (".1f", "{:,.0f} views/s"),
    "data_wait": (".1%", "wait {:.0%}"),  # fraction of the time spent waiting for pixels
    "peak_memory_gb": (".3g", "{:.3g} GB"),
    "petaflops": (".4g", "{:.3g} PF"),
}
# A batch job can have a terminal, but its output mostly ends in a file, where a bar is one endless line.
BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "KUBERNETES_SERVICE_HOST", "CI")
LOOK = "{percentage:3.0f}%|{bar}| {n}/{total} {elapsed}<{remaining}{postfix}"
BAR: dict[str, Any] = {"bar_format": LOOK, "dynamic_ncols": True, "mininterval": 0.5, "miniters": 1}


class ProgressBar:
    """`at(step)` moves the bar, `update(record)` shows a metrics line, `say(line)` prints anything else.

    `record` is what MetricsWriter.write returned: "step" and any of `losses` and FIELDS. The bar is drawn on standard
    error if that is a terminal and no batch system started the run. Otherwise each record is a line of key=value pairs
    on standard output, and every line begins with the date and the time.
    """

    def __init__(
        self,
        total: int,  # updates in the whole run
        start: int = 0,  # updates done before this process
        losses: Sequence[str] = (),
    ):
        self.total = total
        self._fields = {loss: (".4f", f"{loss} {{:.2f}}") for loss in losses} | FIELDS
        self._last = start, time.monotonic()  # step and time of the last record
        # Seconds per update, smoothed over the intervals between records.
        self._pace, self._intervals = 0.0, 0
        batch = os.environ.get("TERM") == "dumb" or any(name in os.environ for name in BATCH)
        # A terminal without a size (docker run -t can give one) gets lines: tqdm would draw nothing.
        terminal = _width(sys.stderr) and not batch
        self._stream = sys.stderr if terminal else sys.stdout
        self._bar = tqdm(total=total, initial=start, file=sys.stderr, **BAR) if terminal else None

    def at(self, step: int) -> None:
        """Note the updates done."""
        if self._bar is not None:
            with survive_lost_output(self._stream):
                self._bar.update(step - self._bar.n)

    def update(self, record: dict[str, Any]) -> None:
        """Show a training record."""
        step, known = record["step"], {key: both for key, both in self._fields.items() if key in record}
        if self._bar is not None:
            # Whole numbers only, as many as fit beside ten columns of a bar and hours of three digits.
            room = _width(self._stream) - len(f"100%|| {self.total}/{self.total} 000:00:00<000:00:00") - 10
            shown = [text.format(record[key]) for key, (_, text) in known.items()]
            while shown and len(", ".join(["", *shown])) > room:
                shown.pop()
            self._bar.set_postfix_str(", ".join(shown), refresh=False)
            self.at(step)
            return
        values = {"step": f"{step}/{self.total}"}
        values |= {key: format(record[key], form) for key, (form, _) in known.items()}
        values["left"] = self._time_left(step)
        self.say(" ".join(f"{key}={value}" for key, value in values.items()))

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
            with survive_lost_output(self._stream):
                self._bar.close()

    def _time_left(self, step: int) -> str:
        """Return the time for the remaining updates at the recent pace, "?" before the first update.

        The first interval includes the start-up, so it counts only until there is a second one.
        """
        (before, then), self._last = self._last, (step, time.monotonic())
        if step > before:
            self._intervals += 1
            pace = (self._last[1] - then) / (step - before)
            # A fifth: half of a change shows after three lines.
            self._pace += (pace - self._pace) * (1 if self._intervals <= 2 else 0.2)
        return tqdm.format_interval((self.total - step) * self._pace) if self._intervals else "?"


def _width(stream: TextIO) -> int:
    """Return the width of the terminal behind `stream` in characters, 0 if it is none or has no size."""
    try:
        size = os.get_terminal_size(stream.fileno())
        return size.columns if stream.isatty() and size.lines else 0
    except (OSError, ValueError, AttributeError):  # closed, or an object in memory
        return 0
