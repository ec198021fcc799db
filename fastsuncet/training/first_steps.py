"""The first steps of a run, made and thrown away by `fastsuncet train --dry-run=step` to see what a step takes."""

import time

from fastsuncet.models.flops import run_macs
from fastsuncet.training.pretraining import Pretraining
from fastsuncet.training.trainer import Trainer, require_finite_weights, within_memory
from pipelines.output import duration

TIMED = 2  # steps


def first_steps(trainer: Trainer[Pretraining]) -> str:
    """Make the first steps of a run; return what the first took, and the hours that all would take. Collective.

    The images of the steps that are read ahead come in part from the time of the first step. So as many steps are made
    before the TIMED ones. Raises ConfigError for a GPU without enough memory, NumericalError for a loss or a weight
    that is not finite.
    """
    task, interval = trainer.task, trainer.interval
    steps, ahead = task.steps, task.config.data.prefetch

    def make(first: int, last: int) -> float:
        """Make the steps from `first` up to `last`, as far as the run has them; return the seconds of each."""
        began, numbers = time.perf_counter(), range(first, min(last, steps))
        for step in numbers:
            batch = task.batch(step, interval.data_timer)
            images, _ = task.cost(step)
            interval.add(task.train_step(batch, task.lr(step)), step, images)
        trainer.require_finite(interval.read().first_bad)  # waits for the device
        return (time.perf_counter() - began) / max(1, len(numbers))

    with within_memory(task):
        seconds = make(0, 1)
        sums, _, wait, memory = interval.read()
        make(1, 1 + ahead)
        later = make(1 + ahead, 1 + ahead + TIMED) if steps > 1 + ahead else seconds
    require_finite_weights(task.model, 1)
    losses = (f"{name} {loss:.4f}" for name, loss in zip(task.terms, sums.mean(0).tolist()) if name != "none")
    kind = "memory of the GPU" if task.place.device.type == "cuda" else "resident memory"
    # By FLOPs: an update without labels costs less than these.
    whole = later * run_macs(task.config, task.arithmetic) / task.cost(0)[1]
    return (
        f"dry run: the first step took {seconds:.2f} s ({wait:.2f} s of it waiting for images) and at most "
        f"{memory / 1e9:.3g} GB of {kind} on a process; {', '.join(losses)}. Later steps take {later:.3g} s, so that "
        f"the run takes about {duration(whole)} without its evaluations. Nothing was saved"
    )
