"""`fastsuncet train`: from a config to a finished run, or to a message and an exit code.

A run is a folder, <logging.folder>/<logging.write_tag>, whose files docs/watching.md lists; the same command continues
what is there.
"""

import json
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

import torch

from fastsuncet.checkpoint import manager
from fastsuncet.checkpoint.run_folder import RunStatus, disk_errors, exclusive_run_folder, on_rank_0
from fastsuncet.commands.ranks import as_rank
from fastsuncet.config import Config
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed.collectives import any_rank
from fastsuncet.distributed.place import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import ConfigError, Preempted
from fastsuncet.metrics.cost import open_energy_meter
from fastsuncet.metrics.trackers import require_packages
from fastsuncet.models import export_formats
from fastsuncet.models.resnet import width_of
from fastsuncet.paths import typed_path
from fastsuncet.training.determinism import resolve_precision
from fastsuncet.training.pretraining import Pretraining
from fastsuncet.training.step import require_norm
from fastsuncet.training.summary import speed_on_cpu, summary
from fastsuncet.training.trainer import Trainer
from pipelines import atomic_files
from pipelines.datasets.index import ImageIndex, save_index
from pipelines.output import counted, say_line


def run(config: Config, arguments: list[str]) -> None:
    """Train as `config` says; `arguments` start the same command on further ranks."""
    with as_rank(config, arguments, config.run_folder / "status.json") as place:
        train(config, place)


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
            old = _results_of_earlier_weights(folder, config) if trainer.step == 0 else []
            if index is not None:
                save_index(index, typed_path(config.data.index))
            note = f"# chosen for this hardware: {json.dumps(trainer.task.chosen)}\n"
            with disk_errors(folder / "config.yaml"):
                text = trainer.task.config.written.to_yaml() + note
                atomic_files.replace(folder / "config.yaml", text.encode())
            if old:
                _move_aside(old, folder)
            place.say(*lines)
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
                stands = f"step {trainer.step + 1:,}" if trainer.step else "the first step"
                raise Preempted(f"{asked}: stopped before {stands}; the same command continues")
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


def _results_of_earlier_weights(folder: Path, config: Config) -> list[Path]:
    """Return the results of weights that the run in `folder` had before a fresh start; not those of other encoders."""
    from fastsuncet.metrics.results import read_result, result_files  # a continued run needs neither

    if not (found := result_files(folder)):
        return []
    from fastsuncet.commands.report.reading import home_of

    return [path for path in found if home_of(read_result(path), folder, config) == str(folder)]


def _move_aside(results: list[Path], folder: Path) -> None:
    aside = next(path for n in count(1) if not (path := folder / f"results.superseded-{n}").exists())
    with disk_errors(aside):
        atomic_files.make_folder(aside)
        for path in results:
            for file in (path.with_suffix(".png"), path):
                if file.exists():
                    file.rename(aside / file.name)
    say_line(f"results: a fresh start; {counted(len(results), 'earlier result')} moved to {aside}")


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
    require_norm(config, arithmetic)
    meta = on_rank_0(place, lambda: manager.newest_meta(folder / manager.FOLDER)) or {}
    chosen, speed = {}, speed_on_cpu(config)
    if place.on_gpu:
        from fastsuncet.tuning import fast_paths  # and with it every kernel

        per_class = images.split.per_class.tolist()
        chosen = fast_paths.choose(config, arithmetic, place, per_class, meta.get("paths", {}), stopped)
        config = fast_paths.resolved(config, chosen)
        speed = fast_paths.describe(config, chosen)
    stream = PairedStream(config, images.train, images.split.indices, arithmetic, place)
    task = Pretraining(config, place, arithmetic, stream, images, evaluate, chosen)
    trainer = Trainer(task, place, folder, open_energy_meter(place.device))
    lines = summary(config, place, images, arithmetic, stream, why)
    lines.append(f"{'groups':<9}{describe_groups(task.optimizer)}")
    if task.init is not None:
        lines.append(f"{'init':<9}{task.init['note']}")
    return trainer, [*lines, *stream.notes(), f"{'speed':<9}{speed}"]


def check_before_images(config: Config) -> None:
    """Raise ConfigError for a network that timm lacks or an export cannot hold, and a tracker without its package."""
    width_of(config.model.name)
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
