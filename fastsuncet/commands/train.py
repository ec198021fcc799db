"""`fastsuncet train`: from a config to a finished run, or to a message and an exit code.

A run is a folder, <logging.folder>/<logging.write_tag>; the same command continues what is there.

    config.yaml     the resolved config               checkpoints/    step_00012345/ ..., latest
    metrics.jsonl   one line per metrics interval     metrics.csv     the same as a table
    status.json     running, done (trained and exported), preempted or failed; the step, and the exit code
    learned.csv     the labels it learns from         held_out.csv    those of data.validation, taken out
    export/         the encoder for other programs, at the end of the run
"""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from fastsuncet.checkpoint import manager
from fastsuncet.checkpoint.run_folder import RunStatus, disk_errors, exclusive_run_folder, on_rank_0
from fastsuncet.commands.ranks import as_rank
from fastsuncet.config import Config, ConfigErrors
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed.collectives import any_rank
from fastsuncet.distributed.place import Place, expected_ranks, pick_device, should_start_ranks
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import ConfigError, Preempted
from fastsuncet.metrics.cost import open_energy_meter
from fastsuncet.models import export_formats
from fastsuncet.models.resnet import build_model, width_of
from fastsuncet.paths import typed_path
from fastsuncet.training.determinism import resolve_precision
from fastsuncet.training.pretraining import Pretraining
from fastsuncet.training.summary import speed_on_cpu, summary
from fastsuncet.training.trainer import Trainer
from pipelines import atomic_files
from pipelines.data_errors import DataError
from pipelines.datasets.index import ImageIndex
from pipelines.output import say_line

# Training images of a plan without data: class folders are taken for ImageNet's.
IMAGES = {"image_folder": 1_281_167, "cifar10": 50_000, "cifar100": 50_000, "digits": 1_442}


def run(
    config: Config, arguments: list[str], *, dry_run: bool | str = False, show_config: bool = False
) -> int:
    """Train as `config` says and return the exit code; `arguments` start the same command on further ranks.

    `dry_run` finds and checks everything a run needs, prints the plan, with `show_config` the resolved config behind
    it, and trains nothing. If it is "step", a few updates are made and thrown away.
    """
    is_rank_0 = not should_start_ranks(config.meta.device) and os.environ.get("RANK", "0") == "0"
    if dry_run is True or (dry_run and is_rank_0):
        print_plan(config, show_config)
    if dry_run is True:
        say_line("dry run: all checks passed, nothing was trained")
        return 0
    with as_rank(config, arguments, config.run_folder / "status.json") as place:
        if dry_run:
            make_first_steps(config, place)
        else:
            train(config, place)
    return 0


def train(config: Config, place: Place, index: ImageIndex | None = None) -> Trainer[Pretraining]:
    """Do one rank's whole run. Raises what ends it before its last step; status.json says it too.

    `index` has the training images, for a config whose `data.index` is to name them. A run that is refused (another
    config, other images, a second process in its folder) changes nothing on the disk.
    """
    check_before_images(config)
    folder = config.run_folder
    # From here on a signal only sets a flag, which is read before the first step and at the end of each step.
    with SignalFlag() as signals, exclusive_run_folder(folder, place):
        trainer, lines = start(config, place, folder, lambda: signals.requested is not None, index)
        # Only now: a refused run must not overwrite the config of the run that is in the folder.
        if place.first:
            if index is not None:
                from pipelines.datasets.index_file import save_index

                save_index(index, typed_path(config.data.index))
            note = f"# chosen for this hardware: {json.dumps(trainer.task.chosen)}\n"
            with disk_errors(folder / "config.yaml"):
                text = trainer.task.config.written.to_yaml() + note
                atomic_files.replace(folder / "config.yaml", text.encode())
            for line in lines:
                say_line(line)
            if trainer.step == 0:
                from fastsuncet.data.learned_labels import write_learned_labels  # a continued run needs none

                for warning in write_learned_labels(folder, trainer.task.images, config):
                    say_line(f"note: {warning}")
                # The config.yaml of a run that was moved, or is trained from elsewhere, names another folder.
                other = config.file.parent
                ran = config.file.name == "config.yaml" and (other / manager.FOLDER).is_dir()
                if ran and (arguments := config.arguments_for(other)):
                    say_line(f"note: a new run begins in {folder}. Add{arguments} to continue {other}")
        with RunStatus(folder / "status.json", place).recording(lambda: trainer.step):
            if any_rank(signals.requested is not None):
                asked = signals.requested or "another rank"
                raise Preempted(f"{asked}: stopped before the first step; the same command starts it")
            # A notebook would hold what was read ahead on the GPU, after an error in its traceback.
            with closing(trainer.task.stream):
                trainer.run(signals)
            from fastsuncet.commands import export  # not before the first step, which need not wait for it

            # Before the status is "done": sweeps and launchers take that for the end of the command.
            export.export_at_end(config, place)
        if place.first:
            say_line(f"{'weights':<9}{folder / manager.FOLDER}/step_{trainer.step:08d}")
            for name, command in zip(("next", ""), export.next_commands(folder, config)):
                say_line(f"{name:<9}{command}")
        return trainer


def start(
    config: Config,
    place: Place,
    folder: Path,
    stopped: Callable[[], bool] = lambda: False,
    index: ImageIndex | None = None,
) -> tuple[Trainer[Pretraining], list[str]]:
    """Return a trainer that stands where the run in `folder` was stopped, and lines that say what it will do.

    The last line is that of the fast paths. `index` is that of `train`. `stopped` ends the trials of fast paths.
    Collective. Nothing is written but the index of the images and verdicts on fast paths. Raises what refuses the run.
    """
    evaluate, evaluates = None, config.evaluation.knn_every_epochs is not None
    if evaluates:
        from fastsuncet.evaluation.knn import online_knn as evaluate
    images = open_images(config, place, validation=evaluates, index=index)
    config, why = resolve_precision(config, place.device)
    arithmetic = config.resolve(place.world_size, *images.counts())
    meta = on_rank_0(place, lambda: manager.newest_meta(folder / manager.FOLDER)) or {}
    chosen, speed = {}, speed_on_cpu(config)
    if place.on_gpu:
        from fastsuncet.tuning import paths  # and with it every kernel

        per_class = images.split.per_class.tolist()
        chosen = paths.choose(config, arithmetic, place, per_class, meta.get("paths", {}), stopped)
        config = paths.resolved(config, chosen)
        speed = paths.describe(config, chosen)
    stream = PairedStream(config, images.train, images.split.indices, arithmetic, place)
    task = Pretraining(config, place, arithmetic, stream, images, evaluate, chosen)
    trainer = Trainer(task, place, folder, open_energy_meter(place.device))
    lines = summary(config, place, images, arithmetic, stream, why)
    lines.append(f"{'groups':<9}{describe_groups(task.optimizer)}")
    if task.init is not None:
        lines.append(f"{'init':<9}{task.init['note']}")
    return trainer, [*lines, *stream.notes(), f"{'speed':<9}{speed}"]


def make_first_steps(config: Config, place: Place) -> None:
    """Make the first updates of the run of `config` with its own images and ranks, and print what they took.

    It keeps nothing on the disk but what `start` does. Raises ConfigError for a GPU without enough memory, and
    otherwise as `train`.
    """
    from fastsuncet.training.first_steps import first_steps

    with tempfile.TemporaryDirectory() as empty:
        trainer, lines = start(config, place, Path(empty))
        if place.first:
            say_line(lines[-1])
        with closing(trainer.task), closing(trainer.task.stream):
            end = first_steps(trainer)
    if place.first:
        say_line(end)


def print_plan(config: Config, show_config: bool) -> None:
    """Print what a run would do here, and with `show_config` its config with the precision that it has here.

    Without the data the plan is for the number of images in IMAGES, if it has one, and their DataError is raised at
    the end. Raises anything else that would end the run before its first step.
    """
    check_before_images(config)
    device = pick_device(config.meta.device, 0)
    config, why = resolve_precision(config, device)
    world_size = expected_ranks(config.meta.device)
    place = Place(0, 1, device)
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
        notes += PairedStream(config, images.train, images.split.indices, arithmetic, place).notes()
    lines = summary(config, Place(0, world_size, device), images, arithmetic, None, why)
    m = config.model
    model = build_model(m.name, m.stem, *m.head, device="cpu" if m.init else "meta")
    if m.init is not None:
        from fastsuncet.training import initial_weights

        lines.append(f"{'init':<9}{initial_weights.load(config, model, place)['note']}")
    for line in [*lines, *notes, "", *([config.to_yaml()] if show_config else [])]:
        say_line(line)
    if problem is not None:
        say_line("dry run: the data are missing or wrong, nothing was trained")
        raise problem


def check_before_images(config: Config) -> None:
    """Raise ConfigError for a network that timm lacks or an export cannot hold, and a tracker without its package."""
    width_of(config.model.name)
    if config.logging.trackers:
        from fastsuncet.metrics.trackers import require_packages

        require_packages(config)
    try:
        for to in export_formats.exports(config):
            export_formats.check(config, to)
    except ConfigError as error:
        raise config.error("checkpoint.export", str(error)) from error


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
