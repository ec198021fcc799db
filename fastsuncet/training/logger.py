"""The output of a run while it trains: metrics files and a progress bar with the same numbers, on rank 0 only."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastsuncet.config import Config
from fastsuncet.distributed.place import Place
from fastsuncet.metrics.progress_bar import ProgressBar
from fastsuncet.metrics.writer import MetricsWriter


class RunLogger(contextlib.ExitStack):
    """`write(kind, record)` on every rank; only rank 0 has files and a bar. Leaving the context closes them."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        columns: tuple[str, ...],
        losses: tuple[str, ...],
        steps: int,
        step: int,
        place: Place,
        evaluated: bool = True,
    ):
        super().__init__()
        self.writer = self.progress = None
        if not place.first:
            return
        self.progress = ProgressBar(steps, step, losses)
        self.writer = MetricsWriter(
            folder,
            columns,
            resume_step=step or None,
            evaluated=evaluated,
            config=config,
            say=self.progress.say,
        )
        self.enter_context(self.writer)
        self.callback(self.progress.close)  # before the writer, whose trackers can print when they close

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        """Write a metrics line of that kind. A "train" line moves the bar, any other with numbers is printed too."""
        if self.writer is None or self.progress is None:
            return
        record = self.writer.write(dict(record), kind)
        if kind == "train":
            self.progress.update(record)
        elif values := "  ".join(
            f"{key} {value:.4g}" for key, value in record.items() if isinstance(value, float)
        ):
            self.progress.say(f"{kind}: step {record['step']:,}  {values}")

    def at(self, step: int) -> None:
        """Move the bar to the updates done."""
        if self.progress is not None:
            self.progress.at(step)

    def say(self, line: str) -> None:
        """Print `line` on rank 0, without breaking the bar."""
        if self.progress is not None:
            self.progress.say(line)

    def sync(self) -> None:
        """Wait until every line is on the disk: a checkpoint must not claim a step whose line could still be lost."""
        if self.writer is not None:
            self.writer.sync()
