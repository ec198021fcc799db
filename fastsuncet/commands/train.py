"""`fastsuncet train`: from a config to a finished run, or to a message and an exit code.

A run is a folder, <logging.folder>/<logging.write_tag>; the same command continues what is there.

    config.yaml     the resolved config               checkpoints/    step_00012345/ ..., latest
    metrics.jsonl   one line per metrics interval     metrics.csv     the same as a table
    status.json     running, done, preempted or failed, and at which step
    export/         the encoder for other programs, at the end of the run
"""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from fastsuncet.checkpoint import manager, same_start
from fastsuncet.checkpoint.run_folder import RunStatus, disk_errors, exclusive_run_folder, on_rank_0
from fastsuncet.config import Config, ConfigErrors
from fastsuncet.console import say_line
from fastsuncet.data.dataset import Images, open_images
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed import launch
from fastsuncet.distributed.collectives import any_rank
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import Preempted
from fastsuncet.metrics.cost import open_energy_meter
from fastsuncet.metrics.trackers import require_packages
from fastsuncet.models import export_formats
from fastsuncet.models.resnet import build_model, width_of
from fastsuncet.training import initial_weights, kernel_choice
from fastsuncet.training.determinism import resolve_precision, set_determinism
from fastsuncet.training.first_steps import first_steps
from fastsuncet.training.pretraining import Pretraining
from fastsuncet.training.summary import summary
from fastsuncet.training.trainer import Trainer
from fastsuncet.tuning import verdicts
from pipelines import atomic_files
from pipelines.data_errors import DataError

# Training images of a plan without data; ImageNet's for every other data.kind.
IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "digits": 1_442}
IMAGENET = 1_281_167


def run(
    config: Config, arguments: list[str], *, dry_run: bool | str = False, show_config: bool = False
) -> int:
    """Train as `config` says and return the exit code; `arguments` start the same command on further ranks.

    `dry_run` finds and checks everything a run needs, prints the plan, with `show_config` the resolved config behind
    it, and trains nothing. If it is "step", a few updates are made and thrown away.
    """
    if dry_run is not True and launch.should_start_ranks(config.meta.device):
        return launch.start_ranks(arguments, config.run_folder / "status.json")
    if not dry_run:
        train_here(config)
        return 0
    first = os.environ.get("RANK", "0") == "0"
    if first or dry_run is True:
        lines, resolved, problem = plan(config)
        for line in [*lines, resolved.to_yaml()] if show_config else lines:
            say_line(line)
        if problem is not None:
            say_line("dry run: the data are missing or wrong, nothing was trained")
            raise problem
    end = "dry run: all checks passed, nothing was trained" if dry_run is True else one_step(config)
    if first:
        say_line(end)
    return 0


def train_here(config: Config) -> None:
    """Train as one rank, among those that the launcher has started. Raises as `train` and `require_network`."""
    require_network(config)
    with same_start.join(config) as place:
        train(config, place)


def train(config: Config, place: launch.Place) -> Trainer:
    """Do one rank's whole run. Raises what ends it before its last step; status.json says it too.

    A run that is refused (another config, other images, a second process in its folder) changes nothing on the disk.
    """
    set_determinism(config, place)
    folder = config.run_folder
    # From here on a signal only sets a flag, which is read before the first step and at the end of each step.
    with SignalFlag() as signals, exclusive_run_folder(folder, place):
        validation = config.evaluation.knn_every_epochs is not None
        images = open_images(config, place, validation=validation)
        trainer = start(config, place, images, folder, lambda: signals.requested is not None)
        with RunStatus(folder / "status.json", place).recording(lambda: trainer.step):
            if any_rank(signals.requested is not None):
                asked = signals.requested or "another rank"
                raise Preempted(f"{asked}: stopped before the first step; the same command starts it")
            trainer.run(signals)
        from fastsuncet.commands import export  # not before the first step, which need not wait for it

        export.export_at_end(config, place)  # after the status: a disk that is full now has not lost the run
        if place.first:
            say_line(f"{'weights':<9}{folder / manager.FOLDER}/step_{trainer.step:08d}")
            for name, command in zip(("next", ""), export.next_commands(folder, config)):
                say_line(f"{name:<9}{command}")
        return trainer


def plan(config: Config) -> tuple[list[str], Config, DataError | None]:
    """Return what a run would do here, its config with the precision that it has here, and what is wrong with the data.

    Without the data the plan is for the number of images in IMAGES, or in ImageNet. Raises anything else that would
    end the run before its first step.
    """
    require_network(config)
    device = launch.pick_device(config.meta.device, 0)
    config, why = resolve_precision(config, device)
    world_size = launch.expected_ranks(config.meta.device)
    place = launch.Place(0, 1, 0, device)
    notes: list[str] = []
    images = problem = None
    try:
        images = open_images(config, place, validation=config.evaluation.knn_every_epochs is not None)
    except DataError as error:
        problem = error
        number = IMAGES.get(config.data.kind, IMAGENET)
        notes.append(f"The data were not checked. This is the plan for {number:,} images.")
        try:
            arithmetic = config.resolve(world_size, number)
        except ConfigErrors:
            raise error from None  # the config may well fit the data that are not here
    else:
        arithmetic = config.resolve(world_size, *images.counts())
        notes += PairedStream(config, images.train, images.split.indices, arithmetic, place).notes()
    lines = summary(config, launch.Place(0, world_size, 0, device), images, arithmetic, None, why)
    m = config.model
    model = build_model(m.name, m.library, m.stem, *m.head, device="cpu" if m.init else "meta")
    if init := initial_weights.load(config, model, place):
        lines.append(f"{'init':<9}{init['note']}")
    return [*lines, *notes, ""], config, problem


def one_step(config: Config) -> str:
    """Make the first updates of the run of `config` with its own images and ranks; return what they took. Collective.

    It keeps nothing on the disk but the index of the images, as `plan` does, and verdicts on fast paths. Raises
    ConfigError for a GPU without enough memory, and otherwise as `train`.
    """
    from fastsuncet.evaluation.knn import online_knn

    with (
        same_start.join(config) as place,
        tempfile.TemporaryDirectory() as empty,
    ):
        set_determinism(config, place)
        images = open_images(config, place, validation=False)
        config, _ = resolve_precision(config, place.device)
        arithmetic = config.resolve(place.world_size, *images.counts())
        paths = verdicts.settle(config, arithmetic, place, images.split.per_class.tolist(), {})
        config = kernel_choice.resolved(config, paths)
        if place.first:
            say_line(f"{'speed':<9}{kernel_choice.describe(config, paths)}")
        stream = PairedStream(config, images.train, images.split.indices, arithmetic, place)
        task = Pretraining(config, place, arithmetic, stream, images, online_knn, paths=paths)
        with closing(stream), closing(task):
            trainer = Trainer(task, place, Path(empty))
            return first_steps(task, trainer)


def require_network(config: Config) -> None:
    """Refuse, before the images are read, a network that timm does not have or that an export cannot hold, and a
    tracker without its package.

    Raises ConfigError.
    """
    width_of(config.model.name)
    require_packages(config)
    for to in export_formats.exports(config):
        export_formats.check(config, to)


def start(
    asked: Config,
    place: launch.Place,
    images: Images,
    folder: Path,
    stopped: Callable[[], bool] = lambda: False,
) -> Trainer:
    """Return a trainer that stands where the run was stopped; write config.yaml and print the summary."""
    from fastsuncet.evaluation.knn import online_knn

    config, why = resolve_precision(asked, place.device)
    arithmetic = config.resolve(place.world_size, *images.counts())
    meta = on_rank_0(place, lambda: manager.newest_meta(folder / manager.FOLDER)) or {}
    per_class = images.split.per_class.tolist()
    paths = verdicts.settle(config, arithmetic, place, per_class, meta.get("paths", {}), stopped)
    fast = kernel_choice.resolved(config, paths)
    stream = PairedStream(fast, images.train, images.split.indices, arithmetic, place)
    task = Pretraining(fast, place, arithmetic, stream, images, online_knn, config, paths)
    trainer = Trainer(task, place, folder, open_energy_meter(place.device))
    # Only now: a refused run must not overwrite the config of the run that is in the folder.
    if place.first:
        note = f"# chosen for this hardware: {json.dumps(task.chosen)}\n"
        with disk_errors(folder / "config.yaml"):
            atomic_files.replace(folder / "config.yaml", (config.to_yaml() + note).encode())
        lines = summary(fast, place, images, arithmetic, stream, why)
        lines.append(f"{'groups':<9}{describe_groups(task.optimizer)}")
        if task.init is not None:
            lines.append(f"{'init':<9}{task.init['note']}")
        lines.append(f"{'speed':<9}{kernel_choice.describe(fast, paths)}")
        for line in [*lines, *stream.notes()]:
            say_line(line)
    return trainer


def describe_groups(optimizer: torch.optim.Optimizer) -> str:
    """Return what the optimizer does with how many parameters: "27,966,656 in 161 tensors scaled and decayed; ..."."""
    name = type(optimizer).__name__
    done, plain = ("scaled and decayed", "plain SGD") if name == "LARS" else ("decayed", name)

    def text(number: int, group: dict) -> str:
        size, count = sum(p.numel() for p in group["params"]), len(group["params"])
        # The second group is that of optimization.exclude_bias_and_norm.
        how = f"{plain}, no decay" if number else f"{done} by {name}"
        return f"{size:,} parameters in {count} tensors {how}"

    return "; ".join(text(number, group) for number, group in enumerate(optimizer.param_groups))
