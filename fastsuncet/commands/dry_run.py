"""`fastsuncet train --dry-run`: everything that a run needs is found and checked, and its plan printed.

`--dry-run=step` also makes the first steps, and throws them away. Nothing is kept on the disk but what `train.start`
keeps.
"""

import os
import tempfile
import time
from contextlib import closing
from pathlib import Path

from fastsuncet.commands.ranks import as_rank
from fastsuncet.commands.train import check_before_images, start
from fastsuncet.config import Config, ConfigErrors
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed.place import Place, expected_ranks, pick_device, should_start_ranks
from fastsuncet.models.flops import run_macs
from fastsuncet.models.resnet import build_model
from fastsuncet.training import initial_weights
from fastsuncet.training.determinism import resolve_precision
from fastsuncet.training.pretraining import Pretraining
from fastsuncet.training.step import require_norm
from fastsuncet.training.summary import summary
from fastsuncet.training.task import within_memory
from fastsuncet.training.trainer import Trainer, require_finite_weights
from pipelines.data_errors import DataError
from pipelines.output import duration, say_line

# Training images of a plan without data: class folders are taken for ImageNet's.
IMAGES = {"image_folder": 1_281_167, "cifar10": 50_000, "cifar100": 50_000, "digits": 1_442}
TIMED = 2  # steps


def run(config: Config, arguments: list[str], *, steps: bool = False, show_config: bool = False) -> None:
    """Print the plan, with `show_config` the resolved config behind it, and with `steps` what a few updates take.

    `arguments` start the same command on further ranks.
    """
    is_rank_0 = not should_start_ranks(config.meta.device) and os.environ.get("RANK", "0") == "0"
    if is_rank_0 or not steps:
        print_plan(config, show_config)
    if not steps:
        say_line("dry run: all checks passed, nothing was trained")
        return
    with as_rank(config, arguments) as place, tempfile.TemporaryDirectory() as empty:
        trainer, lines = start(config, place, Path(empty))
        place.say(lines[-1])
        with closing(trainer.task), closing(trainer.task.stream):
            end = first_steps(trainer)
        place.say(end)


def print_plan(config: Config, show_config: bool) -> None:
    """Print what a run would do here, and with `show_config` its config with the precision that it has here.

    Without the data the plan is for the number of images in IMAGES, if it has one, and their DataError is raised at
    the end. Raises anything else that would end the run before its first step.
    """
    check_before_images(config)
    device = pick_device(config.meta.device, 0)
    config, why = resolve_precision(config, device)
    world_size = expected_ranks(config.meta.device)
    place, first = Place(0, 1, device), Place(0, world_size, device)  # `first` of the run
    notes: list[str] = []
    images = problem = None
    try:
        images = open_images(config, place, validation=config.evaluation.knn_every_epochs is not None)
    except DataError as error:
        problem = error
        if (number := IMAGES.get(config.data.kind)) is None:
            raise
        notes.append(f"The data were not checked. This is the plan for {number:,} images.")
        try:
            arithmetic = config.resolve(world_size, number)
        except ConfigErrors:
            raise error from None  # the config may well fit the data that are not here
    else:
        arithmetic = config.resolve(world_size, *images.counts())
        notes += PairedStream(config, images.train, images.split.indices, arithmetic, first).notes()
    require_norm(config, arithmetic)
    lines = summary(config, first, images, arithmetic, None, why)
    m = config.model
    model = build_model(m.name, m.stem, *m.head, device="cpu" if m.init else "meta")
    if m.init is not None:
        lines.append(f"{'init':<9}{initial_weights.load(config, model, place)['note']}")
    for line in [*lines, *notes, "", *([config.to_yaml()] if show_config else [])]:
        say_line(line)
    if problem is not None:
        say_line("dry run: the data are missing or wrong, nothing was trained")
        raise problem


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
