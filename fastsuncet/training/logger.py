"""What a run says while it trains: metrics files and a progress bar, fed with the same records, on rank 0 alone."""

from pathlib import Path

from fastsuncet.config import Config
from fastsuncet.distributed.launch import Place
from fastsuncet.metrics.progress_bar import ProgressBar
from fastsuncet.metrics.writer import MetricsWriter
from fastsuncet.training import methods


def columns(config: Config) -> tuple[str, ...]:
    """The keys of a training line, in the table's order."""
    losses = (term for term in methods.terms(config) if term != "none")
    return (
        *("epoch", "loss", *losses, "lr", "views_per_second", "data_wait", "replaced_images"),
        *("images", "updates", "petaflops", "seconds", "joules"),
    )


class Reporter:
    """`write(kind, record)` on every rank; only rank 0 has files and a bar. A context manager: leaving closes them."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        steps: int,
        step: int,
        place: Place,
        names: tuple[str, ...] | None = None,  # columns of a training line; None: those of pre-training
    ):
        self.writer = self.progress = None
        if not place.first:
            return
        self.progress = ProgressBar(steps, step)
        self.writer = MetricsWriter(
            folder,
            columns(config) if names is None else names,
            resume_step=step or None,
            tensorboard=config.logging.tensorboard,
            wandb=config.logging.wandb,
            say=self.progress.say,
        )

    def write(self, kind: str, record: dict[str, int | float]) -> None:
        """A metrics line of that kind; a "train" line moves the bar, any other is said in a sentence."""
        if self.writer is None:
            return
        record = self.writer.write(record, kind)
        if kind == "train":
            self.progress.update(record)
        else:
            told = "  ".join(
                f"{key} {value:.4g}" for key, value in record.items() if isinstance(value, float)
            )
            self.progress.say(f"{kind}: step {record['step']:,}  {told}")

    def say(self, line: str) -> None:
        """Tells a person, once and without breaking the bar: what all ranks know, rank 0 says."""
        if self.progress is not None:
            self.progress.say(line)

    def sync(self) -> None:
        """Waits until every line is on the disk: a checkpoint must not claim a step whose line could still be lost."""
        if self.writer is not None:
            self.writer.sync()

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_: object) -> None:
        for part in (self.progress, self.writer):
            if part is not None:
                part.close()
