"""`fastsuncet evaluate`: measure a checkpoint, print the numbers and write them into the run's results."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from fastsuncet.checkpoint.run_folder import on_rank_0, require_writable
from fastsuncet.commands.ranks import as_rank
from fastsuncet.config import Config
from fastsuncet.data.dataset import Images, open_images, validates
from fastsuncet.data.learned_labels import learned, left_to_judge
from fastsuncet.errors import ConfigError
from fastsuncet.evaluation import scoring
from fastsuncet.evaluation.confusion import write_with_picture, written
from fastsuncet.evaluation.encoder import Encoder, load_chosen
from fastsuncet.evaluation.features import view_size
from fastsuncet.evaluation.protocols import accuracy, cross_validated, knn, linear, npi
from fastsuncet.metrics.results import FOLDER, send_results
from fastsuncet.metrics.trackers import require_packages
from pipelines.data_errors import DataError
from pipelines.datasets.index import as_class_numbers, class_numbers, with_classes
from pipelines.output import first_five

KINDS = {
    "knn": (knn, "nearest neighbors"),
    "npi": (npi, "SuNCEt's non-parametric inference"),
    "linear": (linear, "linear classifier on frozen representations"),
    "accuracy": (accuracy, "the network's own classifier"),
}

WITHOUT_VALIDATION = ("knn", "linear")  # are cross-validated on the labels where data.validation is null


def evaluate(
    config: Config,
    kind: str,  # of KINDS
    arguments: list[str],  # start the same command on further ranks
    *,
    encoder: Path | None = None,  # None: the config's own run
    step: int | None = None,
    every: bool = False,
) -> None:
    """Measure the chosen checkpoints on the config's images, print each number and write each result.

    Raises what loading, reading and counting raise: ConfigError, CheckpointError, DataError.
    """
    config.require_data(validation=kind not in WITHOUT_VALIDATION)
    require_packages(config)  # before hours of features
    alone = kind in WITHOUT_VALIDATION and not validates(config)
    layout = torch.channels_last if config.meta.channels_last else torch.preserve_format
    files = []
    # Nothing is resumed, so there is no status to read after a signal.
    with as_rank(config, arguments) as place:
        encoders = load_chosen(place, config, encoder, step, every)
        first = next(encoders)
        # A wrong file or folder is refused before a million images are opened.
        _network(first, kind, config)
        on_rank_0(place, lambda: require_writable(config.run_folder / FOLDER / "result.json"))
        images = open_images(config, place, validation=not alone)
        for found in chain([first], encoders):
            # Torch's stubs lack memory_format together with a device.
            network = _network(found, kind, config).to(place.device, memory_format=layout)  # pyright: ignore[reportCallIssue]
            shown, known = left_to_judge(images, found.lies_at, found.supervised, place)
            if kind == "accuracy":
                shown = _with_its_classes(shown, found)
            if alone:
                of_train = learned(found.lies_at, images.train, found.supervised)
                measured = cross_validated(kind, network, images, config, place, of_train)
            else:
                measured = KINDS[kind][0](network, shown, config, place)
            if known:
                measured = replace(measured, learned=known, notes=(*measured.notes, scoring.LEARNED))
            if place.first:
                if not files:
                    place.say(*_heading(kind, measured, shown, config, found))
                place.say(f"{_name(found)}  {_accuracy(measured)}")
                files.append(
                    write_with_picture(config.run_folder, _record(config, kind, measured, found, shown))
                )
        if place.first:
            send_results(config, files)
            several = [f"written  {files[0].parent}, {len(files)} results"]
            place.say(*(written(files[0]) if len(files) == 1 else several))


def _network(encoder: Encoder, kind: str, config: Config) -> nn.Module:
    """Return what `kind` measures. Raises ConfigError where the encoder has no classifier or projection head for it."""
    if kind == "npi" and config.npi.features == "projection":
        head = encoder.projection()
        if head is None:
            text = (
                f"projection cannot be compared: {encoder.source} holds no projection head; set it to encoder"
            )
            raise config.error("npi.features", text)
        return nn.Sequential(encoder.module, head)
    if kind != "accuracy":
        return encoder.module
    if encoder.classifier is None:
        raise ConfigError(
            f"{encoder.source} has no classifier. Set --encoder to a folder that `fastsuncet finetune` wrote, or to a "
            "file of torchvision or timm with its fc layer. An encoder without a classifier is measured by "
            "`fastsuncet evaluate knn`, npi and linear"
        )
    return nn.Sequential(encoder.module, encoder.classifier)


def _with_its_classes(images: Images, encoder: Encoder) -> Images:
    """Return the images with the classifier's numbers of their classes. Raises DataError for classes of other names."""
    then, now = encoder.classes, images.train.classes
    if not then or now == then:
        return images
    if len(now) != len(then) or class_numbers(len(now)) not in (now, then):
        other = first_five(sorted({*now}.symmetric_difference(then)))
        raise DataError(
            f"the classifier of {encoder.source} has other classes than the images: {other}. Give classes the names of "
            "then, or train it again"
        )
    if as_class_numbers(now) == as_class_numbers(then):
        return images
    train, held_out = (with_classes(index, then) for index in (images.train, images.validation))
    return replace(images, train=train, held_out=held_out)


def _record(config: Config, kind: str, measured: scoring.Measured, encoder: Encoder, images: Images) -> dict:
    a = config.data.augmentation
    size, resize = view_size(a.size)
    setting = measured.setting | {"size": size, "resize": resize}
    if not _unnormalized(config):
        setting |= {"mean": list(a.mean), "std": list(a.std)}
    if encoder.tuned is not None:
        setting["finetuned"] = encoder.tuned  # updates: an encoder before and after them has two results
    return scoring.result_record(kind, replace(measured, setting=setting), encoder, images, config)


def _unnormalized(config: Config) -> bool:
    """Return whether the network sees pixels in [0, 1]."""
    a = config.data.augmentation
    return not any(a.mean) and set(a.std) == {1.0}


def _heading(
    kind: str, measured: scoring.Measured, images: Images, config: Config, encoder: Encoder
) -> list[str]:
    """Return what the numbers are of, in the columns of a run's summary."""
    of_one = ("converged", "chosen_strength")  # of one checkpoint: its own line has them
    setting = [
        f"{key.replace('_', ' ')} {value}" for key, value in measured.setting.items() if key not in of_one
    ]
    lines = [f"{kind:<9}{', '.join([KINDS[kind][1], *setting])}"]
    if kind != "accuracy":
        lines.append(f"labels   {images.split}")
    shown = "for validation, each once"
    if images.held_out is None:
        shown = "labeled ones, each left out once in every repeat; there are no validation images"
    lines.append(f"images   {measured.images:,} {shown}")
    if encoder.step is None and _unnormalized(config):
        lines.append(
            "pixels   0 to 1; the weights of torchvision and timm expect data.augmentation.mean=[0.485,0.456,0.406] "
            "data.augmentation.std=[0.229,0.224,0.225]"
        )
    return lines


def _name(encoder: Encoder) -> str:
    tuned = "" if encoder.tuned is None else f", fine-tuned for {encoder.tuned:,} updates"
    if encoder.step is None:
        return f"encoder  {encoder.source} ({encoder.name}, {encoder.stem} stem{tuned})\ntop 1  "
    epoch = "" if encoder.epoch is None else f"epoch {encoder.epoch:.4g}, "
    return f"step {encoder.step:,} ({epoch}{encoder.method}{tuned})"


def _accuracy(measured: scoring.Measured) -> str:
    """Return the accuracies in percent, with the binomial standard error."""
    top1 = measured.metrics["top1"]
    parts = [f"{100 * top1:.2f} %, standard error {100 * scoring.standard_error(top1, measured.images):.2f}"]
    if "top5" in measured.metrics:
        parts.append(f"top 5 {100 * measured.metrics['top5']:.2f} %")
    if "top1_weighted" in measured.metrics:
        parts.append(f"{100 * measured.metrics['top1_weighted']:.2f} % with weighted votes")
    return "; ".join([*parts, *measured.notes])
