"""`fastsuncet train`: from a config to a finished run, or to a message and an exit code.

A run is a folder, <logging.folder>/<logging.write_tag>; the same command continues what is there.

    config.yaml     the resolved config           checkpoints/    step_00012345/ ..., latest
    metrics.jsonl   one line an interval          metrics.csv     the same for a spreadsheet
    status.json     running, done, preempted or failed, and at which step
"""

from pathlib import Path

from fastsuncet.checkpoint import atomic_files
from fastsuncet.checkpoint.run_folder import RunStatus, exclusive_run_folder
from fastsuncet.config import Config
from fastsuncet.console import say_line
from fastsuncet.data.dataset import Images, open_images
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed import launch
from fastsuncet.distributed.collectives import any_rank
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import Preempted
from fastsuncet.evaluation.knn import online_knn
from fastsuncet.training.determinism import set_determinism
from fastsuncet.training.summary import summary
from fastsuncet.training.trainer import Trainer


def run(config: Config, arguments: list[str], *, dry_run: bool = False) -> int:
    """Trains as `config` says and returns the exit code; `arguments` start the same command on further ranks.

    `dry_run` finds and checks everything a run needs, prints the resolved config and the plan, and trains nothing.
    """
    if dry_run:
        for line in plan(config):
            say_line(line)
        return 0
    if launch.should_start_ranks(config.meta.device):
        return launch.start_ranks(arguments, config.run_folder / "status.json")
    with launch.join(config.meta.device) as place:
        train(config, place)
    return 0


def train(config: Config, place: launch.Place) -> Trainer:
    """One rank's whole run, on the `place` it has. Raises what ends it other than well; status.json says it too.

    A run that is refused (another config, other images, a second process in its folder) leaves what is there as it is.
    """
    set_determinism(config, place)
    folder = config.run_folder
    # From here on a signal is a wish: it is granted before the first step, or at the end of a step.
    with SignalFlag() as signals, exclusive_run_folder(folder, place):
        images = open_images(config, place, validation=config.evaluation.knn_every_epochs is not None)
        trainer = start(config, place, images, folder)
        status = RunStatus(folder / "status.json", place)
        try:
            if any_rank(signals.requested is not None):
                raise Preempted(
                    f"{signals.requested or 'another rank'}: before a first step; the same command starts it"
                )
            status.write("running", trainer.step)
            trainer.run(signals)
        except Preempted as stop:
            status.write("preempted", trainer.step, str(stop))
            raise
        except BaseException as error:  # whatever ended the run, the file must not go on saying that it runs
            error = launch.explain_error(error)
            status.write("failed", trainer.step, (str(error) or type(error).__name__).splitlines()[0])
            raise error
        status.write("done", trainer.step)
        return trainer


def plan(config: Config) -> list[str]:
    """The resolved config, and what it would do here. Raises what would end the run before its first step."""
    device = launch.pick_device(config.meta.device, 0)
    world_size = launch.expected_ranks(config.meta.device)
    place = launch.Place(0, 1, 0, device)
    images = open_images(config, place, validation=config.evaluation.knn_every_epochs is not None)
    arithmetic = config.resolve(world_size, *images.counts())
    stream_notes = PairedStream(config, images.train, images.split.indices, arithmetic, place).notes()
    lines = summary(config, launch.Place(0, world_size, 0, device), images, arithmetic, None)
    return [
        config.to_yaml().rstrip(),
        "",
        *lines,
        *stream_notes,
        "",
        "dry run: everything checks out, nothing was trained",
    ]


def start(config: Config, place: launch.Place, images: Images, folder: Path) -> Trainer:
    """A trainer that stands where the run left off, with its settings written down and said."""
    arithmetic = config.resolve(place.world_size, *images.counts())
    stream = PairedStream(config, images.train, images.split.indices, arithmetic, place)
    trainer = Trainer(config, place, arithmetic, stream, images, folder, online_knn)
    if place.first:  # only now: a refused run must not overwrite the record of the one it was refused for
        atomic_files.replace(folder / "config.yaml", config.to_yaml().encode())
        for line in [*summary(config, place, images, arithmetic, stream), *stream.notes()]:
            say_line(line)
    return trainer
