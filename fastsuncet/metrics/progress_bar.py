"""Show a run's progress: a bar at a terminal, lines in a batch log. Both show the records of the metrics files."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TextIO

from tqdm import tqdm

from pipelines.output import printable, say_line, survive_lost_output

# Key of a metrics record -> the format of its value in a line, and its text in the bar.
FIELDS: dict[str, tuple[str, Callable[[float], str]]] = {
    "lr": (".4g", lambda lr: f"lr {lr:.3g}"),
    "views_per_second": (".1f", lambda rate: f"{tqdm.format_sizeof(rate)} views/s"),
    "data_wait": (".1%", lambda share: f"wait {share:.0%}"),  # fraction of the time spent waiting for pixels
    "peak_memory_gb": (".3g", lambda size: f"{size:.3g} GB"),
    "petaflops": (".4g", lambda spent: f"{spent:.3g} PF"),
}
# A batch job can have a terminal, but its output mostly ends in a file, where a bar is one endless line.
BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "KUBERNETES_SERVICE_HOST", "CI")
# The bar is last: it gets the columns that the numbers leave, and a narrow terminal cuts it off.
FORM = "{percentage:3.0f}% {n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix} {bar}|"


class ProgressBar:
    """`at(step)` moves the bar, `update(record)` shows a metrics line, `say(line)` prints anything else.

    `record` is what MetricsWriter.write returned: "step" and any of `losses` and FIELDS. The bar is drawn on standard
    error if that is a terminal and no batch system started the run. Otherwise each record is a line of key=value pairs,
    in columns, on standard output, and every line begins with the date and the time. `stream` replaces both.

    The time left assumes the average pace since the first update of this process. That update includes the start-up,
    so it does not count.
    """

    def __init__(
        self,
        total: int,  # updates in the whole run
        start: int = 0,  # updates done before this process
        losses: Sequence[str] = (),
        *,
        stream: TextIO | None = None,
    ):
        self.total = total
        self._first: int | None = None  # updates done when the first one of this process ended
        self._began = 0.0  # the time of that end, in seconds
        self._widths: dict[str, int] = {}  # of each column of the lines so far
        self._bar: tqdm | None = None
        of_loss = {loss: (".4f", partial("{} {:.2f}".format, loss)) for loss in losses}
        self._fields: dict[str, tuple[str, Callable[[float], str]]] = of_loss | FIELDS
        self._stream = stream or sys.stderr
        batch = os.environ.get("TERM") == "dumb" or any(name in os.environ for name in BATCH)
        if _has_size(self._stream) and not batch:
            self._bar = tqdm(
                total=total,
                initial=start,
                file=self._stream,
                dynamic_ncols=True,
                bar_format=FORM,
                mininterval=0.5,
                miniters=1,  # by default a bar that was fast waits for as many updates when they become slow
                smoothing=0,  # the average pace: the recent one is far off after an evaluation
            )
        elif stream is None:
            self._stream = sys.stdout

    def at(self, step: int) -> None:
        """Move the bar to the updates done. It is drawn at most twice a second."""
        bar, first = self._bar, self._first is None
        if first:
            self._first, self._began = step, time.monotonic()
        if bar is None:
            return
        with survive_lost_output(self._stream):
            if first:
                bar.n = bar.initial = step
                bar.unpause()
                bar.refresh()
            bar.update(step - bar.n)

    def update(self, record: dict[str, Any]) -> None:
        """Show a training record."""
        step = record["step"]
        self.at(step)
        if self._bar is not None:
            found = ((show, record.get(key)) for key, (_, show) in self._fields.items())
            self._show([show(value) for show, value in found if value is not None], self._bar)
            return
        values = {"step": f"{step}/{self.total}"}
        for key, (form, _) in self._fields.items():
            if key in record:
                values[key] = "-" if record[key] is None else format(record[key], form)
        elapsed = time.monotonic() - self._began
        values["left"] = tqdm.format_meter(
            step, self.total, elapsed, initial=self._first, bar_format="{remaining}"
        )
        cells = []
        for key, value in values.items():
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
            with survive_lost_output(self._stream):
                self._bar.close()

    def _show(self, numbers: list[str], bar: tqdm) -> None:
        """Show as many of the numbers as fit: tqdm would cut one, and its first digits read as another number."""
        bar.set_postfix_str(" ".join(numbers), refresh=False)
        while bar.postfix not in str(bar):
            numbers.pop()
            bar.set_postfix_str(" ".join(numbers), refresh=False)
        with survive_lost_output(self._stream):
            bar.refresh()


def _has_size(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that has a size: tqdm draws nothing on others (`docker run -t`)."""
    try:
        return all(os.get_terminal_size(stream.fileno()))
    except (OSError, ValueError, AttributeError):  # no terminal, closed, or an object in memory
        return False
