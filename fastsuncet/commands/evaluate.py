"""`fastsuncet evaluate`: from a config and a checkpoint to numbers on the screen and in the run's results."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fastsuncet.checkpoint.format import versions
from fastsuncet.config import Config
from fastsuncet.console import say_line
from fastsuncet.data.dataset import Images, open_images
from fastsuncet.distributed import launch
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import ConfigError
from fastsuncet.evaluation.accuracy import accuracy
from fastsuncet.evaluation.encoder import (
    Encoder,
    choose_on_one_rank,
    load_encoder,
    load_unless_gone,
)
from fastsuncet.evaluation.features import view_size
from fastsuncet.evaluation.knn import knn
from fastsuncet.evaluation.linear import linear
from fastsuncet.evaluation.npi import npi
from fastsuncet.evaluation.scoring import Measured, labels_record, standard_error
from fastsuncet.metrics.results import write_result
from fastsuncet.training.determinism import set_determinism

KINDS: dict[str, Callable[[nn.Module, Images, Config, Place], Measured]] = {
    "knn": knn,
    "npi": npi,
    "linear": linear,
    "accuracy": accuracy,
}
TITLES = {
    "knn": "nearest neighbours",
    "npi": "SuNCEt's non-parametric inference",
    "linear": "linear classifier on frozen representations",
    "accuracy": "the network's own classifier",
}


def evaluate(
    config: Config,
    kind: str,  # of KINDS
    arguments: list[str],  # start the same command on further ranks
    *,
    encoder: Path | None = None,  # None: the config's own run
    step: int | None = None,
    every: bool = False,
) -> int:
    """Measures the chosen checkpoints, says each number, writes each result; returns the exit code."""
    if config.data.kind in ("image_folder", "csv") and config.data.validation is None:
        raise config.error(
            "data.validation", "an evaluation needs validation images: the name of their folder"
        )
    if launch.should_start_ranks(config.meta.device):
        # Nothing is resumed, so there is no status to read after a signal.
        return launch.start_ranks(arguments, Path(os.devnull))
    with launch.join(config.meta.device) as place:
        try:
            set_determinism(config, place)
            chosen = choose_on_one_rank(place, encoder or config.run_folder, step, every)
            measure(config, kind, chosen, place)
        except RuntimeError as error:
            raise launch.explain_error(error) from error
    return 0


def measure(config: Config, kind: str, chosen: list[Path], place: Place) -> list[Measured]:
    """Evaluates each of `chosen` on the config's images. Collective; rank 0 writes and talks.

    Raises what loading, reading and counting raise: ConfigError, CheckpointError, DataError.
    """
    first = load_encoder(chosen[0], config)  # a file that is none is found before a million images are
    _require_classifier(first, kind)
    images = open_images(config, place, validation=True)
    told = []
    for path in chosen:
        encoder = first if path == chosen[0] else load_unless_gone(place, path, config)
        if encoder is None:
            continue
        _require_classifier(encoder, kind)
        measured = KINDS[kind](_network(encoder, kind, config, place), images, config, place)
        if len(images.train.classes) <= 5:
            measured.metrics.pop("top5", None)  # all of them are right
        told.append(measured)
        if place.first:
            foreign = encoder.step is None and _as_stored(config)
            for line in _heading(kind, measured, images, foreign) if len(told) == 1 else []:
                say_line(line)
            say_line(f"{_name(encoder)}  {_number(measured)}")
            written = write_result(config.run_folder, _record(config, kind, measured, encoder, images))
    if place.first:
        say_line(f"written  {written if len(chosen) == 1 else f'{written.parent}, {len(told)} files'}")
    return told


def _require_classifier(encoder: Encoder, kind: str) -> None:
    if kind == "accuracy" and encoder.classifier is None:
        raise ConfigError(
            f"{encoder.source} has no classifier, so there is nothing to count: --encoder names a folder that "
            "`fastsuncet finetune` wrote, or a file of torchvision or timm with its fc. Representations without one "
            "are measured by `fastsuncet evaluate knn`, npi and linear"
        )


def _network(encoder: Encoder, kind: str, config: Config, place: Place) -> nn.Module:
    network = nn.Sequential(encoder.module, encoder.classifier) if kind == "accuracy" else encoder.module
    return network.to(place.device, memory_format=torch.channels_last if config.meta.channels_last else None)


def _record(config: Config, kind: str, measured: Measured, encoder: Encoder, images: Images) -> dict:
    a = config.data.augmentation
    size, resize = view_size(a.size)
    setting = measured.setting | {"size": size, "resize": resize}
    if config.data.kind in ("image_folder", "csv"):  # of two folders of images each has its own number
        setting["validation"] = images.validation.fingerprint()[:12]
    if not _as_stored(config):
        setting |= {"mean": list(a.mean), "std": list(a.std)}
    if encoder.tuned is not None:
        setting["finetuned"] = encoder.tuned  # updates: the same encoder before and after is two evaluations
    return {
        "kind": kind,
        "metrics": measured.metrics,
        "images": measured.images,
        "labels": labels_record(images, config),
        "encoder": encoder.record(),
        "setting": setting,
        "run": config.run_folder.name,
        "versions": versions(),
    }


def _as_stored(config: Config) -> bool:
    """Whether a network is shown pixels in [0, 1]."""
    a = config.data.augmentation
    return not any(a.mean) and set(a.std) == {1.0}


def _heading(kind: str, measured: Measured, images: Images, foreign: bool) -> list[str]:
    """What the numbers are of, in the columns of a run's summary."""
    setting = [
        f"{key.replace('_', ' ')} {value}" for key, value in measured.setting.items() if key != "converged"
    ]
    lines = [f"{kind:<9}{', '.join([TITLES[kind], *setting])}"]
    if kind != "accuracy":
        lines.append(f"labels   {images.split}")
    lines.append(f"images   {measured.images:,} for validation, each once")
    if foreign:
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


def _number(measured: Measured) -> str:
    """The accuracy as a person would quote it, and how far chance alone would move it."""
    top1 = measured.metrics["top1"]
    parts = [f"{100 * top1:.2f} %, standard error {100 * standard_error(top1, measured.images):.2f}"]
    if "top5" in measured.metrics:
        parts.append(f"top 5 {100 * measured.metrics['top5']:.2f} %")
    if "top1_weighted" in measured.metrics:
        parts.append(f"{100 * measured.metrics['top1_weighted']:.2f} % with weighted votes")
    return "; ".join([*parts, *measured.notes])
