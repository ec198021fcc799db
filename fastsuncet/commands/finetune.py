"""`fastsuncet finetune`: a pre-trained encoder and a new classifier, trained on the labeled images (paper, appendix B).

    RUN/finetune/bernoulli0.1-step_00000400/    checkpoints/    metrics.jsonl    metrics.csv    result.json
    RUN/results/finetune-....json               the accuracy

A finished folder is not trained again, only printed. One that was stopped is continued.
"""

import math
from itertools import chain
from pathlib import Path

from fastsuncet.commands.ranks import as_stoppable_rank
from fastsuncet.config import Config
from fastsuncet.data.dataset import open_images, validates
from fastsuncet.data.learned_labels import learned, left_to_judge
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation.encoder import Encoder, load_chosen
from fastsuncet.evaluation.finetuning.job import FineTuningJob, accuracy_table, resolve_sizes
from fastsuncet.evaluation.finetuning.record import sizes
from fastsuncet.evaluation.scoring import labeled, true_labels
from fastsuncet.metrics.results import asked
from fastsuncet.metrics.trackers import require_packages
from fastsuncet.models.flops import network_cost


def finetune(
    config: Config,
    arguments: list[str],
    *,
    encoder: Path | None = None,
    step: int | None = None,
    every: bool = False,
) -> None:
    """Fine-tune the chosen checkpoints one after the other; print and write each accuracy.

    `encoder` is what `load_encoder` takes, None for the config's own run. `arguments` start the same command on
    further ranks. Raises ConfigError, DataError, NumericalError, CheckpointError, and Preempted once all is saved.
    """
    config.require_data()
    require_packages(config)
    status = config.run_folder / "finetune" / ".preempted.json"
    with as_stoppable_rank(config, arguments, status) as (config, place, signals):
        encoders = load_chosen(place, config, encoder, step, every)
        first = next(encoders)
        images = open_images(config, place, validation=validates(config))
        if images.held_out is not None:
            true_labels(images, place)  # one without a label is refused
        sized = resolve_sizes(config, images, place)
        records = []
        for found in chain([first], encoders):
            shown, known = left_to_judge(images, found.lies_at, found.supervised, place)
            if images.held_out is None:
                known = int(learned(found.lies_at, images.train, found.supervised)[labeled(images)].sum())
            require_norm(sized, place, found)
            if records:
                place.say("")
            job = FineTuningJob(sized, asked(config, "finetune"), place, shown, found, every, known)
            records.append(job.run(signals, brief=bool(records)))
        if len(records) > 1:
            place.say("", *accuracy_table(records))


def require_norm(config: Config, place: Place, encoder: Encoder) -> None:
    """Raise ConfigErrors for a pass of one value a channel, and on a GPU for more than torch's BatchNorm can count.

    `config` is of `resolve_sizes`.
    """
    size = config.data.augmentation.size
    images = sizes(config)[0] // (place.world_size * config.finetune.accumulate)
    cost = network_cost(encoder.name, encoder.stem, size)
    if images == 1 and any(math.prod(shape) == shape[1] for shape in cost.norm_shapes(1)):
        text = (
            f"gives a pass one image of {size} pixels, one value a channel for BatchNorm: give it two or more"
        )
        raise config.error("finetune.batch_size", text)
    if place.on_gpu and config.meta.channels_last:
        from fastsuncet.tuning import fast_paths  # and with it every kernel

        fix = "Set finetune.accumulate, use more GPUs or a smaller batch"
        fast_paths.require_int32("finetune.batch_size", cost.norm_shapes(images), fix)
