"""What `fastsuncet init` looks at: the images with their labels, the machine, and the weights that can be had."""

import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from fastsuncet.commands.init.rules import FEW_IMAGES, Machine, Survey, Weights
from fastsuncet.config.schema import TIMM
from fastsuncet.distributed.place import pick_device
from fastsuncet.errors import CheckpointError, ConfigError
from fastsuncet.evaluation.encoder import load_encoder
from fastsuncet.models import timm_backbone
from fastsuncet.models.flops import network_cost
from fastsuncet.models.resnet import WIDTHS, build_model
from fastsuncet.training.determinism import PRECISIONS, native_precision
from fastsuncet.tuning.trials import seconds
from pipelines import atomic_files
from pipelines.backend import cores
from pipelines.data_errors import DataError
from pipelines.datasets.csv_labels import plain, with_csv_labels
from pipelines.datasets.folders import entries, existing_folder, image_folder, image_tree
from pipelines.datasets.image_headers import EXTENSIONS
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.pack import INDEX, open_pack
from pipelines.output import counted, first_five, say_line, span
from pipelines.verify import note_on_copies

VALIDATION = ("val", "valid", "validation", "test")
SAMPLE = 12  # images that are decoded to time it


def look(folder: Path, labels: Path | None) -> tuple[Survey, ImageIndex]:
    """Print what is in `folder`: shards, train/CLASS/IMAGE, CLASS/IMAGE, or any tree, with a CSV's labels.

    Return it, and the images with their labels. Raises DataError: no folder, no images, a wrong line of the CSV, only
    unreadable images.
    """
    existing_folder(folder.absolute())
    data, validation = {"kind": "images", "root": str(folder)}, None
    if (folder / INDEX).is_file() or any(folder.glob("*.tar")):
        index = open_pack(str(folder), upright=True)
        data = {"kind": "image_folder" if index.classes else "images", "pack": str(folder)}
    elif labels is None and (train := _class_folders(folder)) is not None:
        index = image_folder(folder / train, upright=True)
        validation = next(
            (name for name in VALIDATION if train == "train" and (folder / name).is_dir()), None
        )
        data |= {"kind": "image_folder", "train": train}
    else:
        index = image_tree(folder, upright=True)
    scanned = None if (folder / INDEX).is_file() else index
    if labels is not None:
        index = with_csv_labels(index, labels)
        data |= {"kind": "csv", "csv": str(labels)}
    good = index.good()
    if not len(good):
        raise DataError(f"none of the {len(index):,} images below {folder} can be read: {_first_bad(index)}")
    counts = label_counts(index, good)
    sides = index.sizes[good].min(1)
    for line in _described(index, good, sides, counts):
        say_line(line)
    found = Survey(
        data=data,
        images=len(index),
        labels=int(counts.sum()),
        classes=int((counts > 0).sum()),
        side=int(np.median(sides)),
        read_seconds=_read_seconds(index, good),
        validation=validation,
        bad=len(index.bad),
        index=scanned,
    )
    return found, index


def label_counts(index: ImageIndex, numbers: np.ndarray) -> np.ndarray:
    """Return how many of the images `numbers` have the label of each class, int64 (C,)."""
    labels = index.labels[numbers]
    return np.bincount(labels[labels >= 0], minlength=len(index.classes))


def _class_folders(folder: Path) -> str | None:
    """Return "train" or "." where the folders below that one are classes: two or more, and no image beside them."""
    for name in ("train", "."):
        if not (folder / name).is_dir():
            continue
        shown = list(entries(folder / name))
        # each.is_dir() raises for a link in a loop.
        folders = [each.name for each in shown if os.path.isdir(each)]
        images = any(
            os.path.splitext(each.name)[1].lower() in EXTENSIONS for each in shown if os.path.isfile(each)
        )
        enough = name == "train" or (len(folders) > 1 and not {"train", *VALIDATION} & set(folders))
        if folders and enough and not images:
            return name
    return None


def _read_seconds(index: ImageIndex, good: np.ndarray) -> float:
    """Return the seconds that one thread takes to decode an image; images that cannot be decoded do not count."""
    times = []
    for i in good[np.linspace(0, len(good) - 1, min(SAMPLE, len(good))).astype(int)].tolist():
        began = time.perf_counter()
        try:
            index.rgb(i)
        except RuntimeError:
            continue
        times.append(time.perf_counter() - began)
    return float(np.mean(times)) if times else 0.0


def _described(index: ImageIndex, good: np.ndarray, sides: np.ndarray, counts: np.ndarray) -> list[str]:
    heights, widths = index.sizes[good].T
    upright = np.mean(heights > widths)
    size = f"shorter side {sides.min()} to {sides.max()} pixels, median {int(np.median(sides))}"
    lines = [f"{'images':<9}{len(index):,} below {index.root}; {size}; {upright:.0%} upright"]
    if counts.sum():
        names = ", ".join(index.classes[:6]) + (", ..." if len(index.classes) > 6 else "")
        text = f"{counts.sum():,} of {len(counts):,} classes ({names}), {span(counts.min(), counts.max())} in a class"
    else:
        text = "none"
    lines.append(f"{'labels':<9}{text}")
    alike = Counter(map(plain, index.classes))
    if same := [name for name in index.classes if alike[plain(name)] > 1]:
        text = "classes that differ only in upper and lower case, or in the Unicode form"
        lines.append(f"{'note':<9}{text}: {first_five(same)}. Are they one?")
    if len(index) < FEW_IMAGES:
        lines += [f"{'note':<9}{note}" for note in note_on_copies(index)]
    if index.bad:
        lines.append(f"{'bad':<9}{counted(len(index.bad), 'file')} cannot be read: {_first_bad(index)}")
    return lines


def _first_bad(index: ImageIndex) -> str:
    return first_five([f"{index.name(i)} ({reason})" for i, reason in index.bad.items()])


def machine() -> Machine:
    """Return the GPUs of this machine or its CPU, with the speed of one timed step of a ResNet-18.

    Raises ConfigError for a GPU that torch cannot use: a run would be refused too.
    """
    device = pick_device("auto", 0)
    # Of all cores, also where this process can use only some of them.
    if (load := os.getloadavg()[0]) > (count := os.cpu_count() or 1):
        say_line(
            f"{'note':<9}{load:.0f} processes are running on {count} cores: the timed step and so the hours are long"
        )
    if device.type == "cpu":
        speed = _timed_step(device, 64, 16)
        return Machine("cpu", f"CPU, {cores()} cores", 1, atomic_files.MEMORY, cores(), speed)
    card = torch.cuda.get_device_properties(device)
    speed = _timed_step(device, 224, 128)
    return Machine("cuda", card.name, torch.cuda.device_count(), card.total_memory, cores(), speed)


def _timed_step(device: torch.device, size: int, images: int) -> float:
    """Return the multiply-adds a second of the fastest of three passes, forward and backward, in a run's precision."""
    dtype = PRECISIONS[native_precision(device)[0]]
    network = build_model("resnet18").encoder.to(device).to(memory_format=torch.channels_last)
    pixels = torch.zeros(images, 3, size, size, device=device).to(memory_format=torch.channels_last)

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            network(pixels).float().sum().backward()

    fastest = min(seconds(step, 1, device) for _ in range(3))
    return 3 * images * network_cost("resnet18", "imagenet", size).encoder_macs / fastest


def weights(asked: str | None) -> tuple[Weights | None, str]:
    """Return the weights to start from, and why there are none.

    `asked` is None (timm's published weights of the usual network, if they can be had), "none", a name of timm's or of
    model.name, or a path that model.init takes. Raises ConfigError for a name or a path that cannot be had.
    """
    if asked == "none":
        return None, "--weights none"
    if asked is None:
        say_line(f"{'weights':<9}looking for those that timm has published")
        try:
            timm_backbone.published("resnet50" if torch.cuda.is_available() else "resnet18")
        except ConfigError as error:
            return None, str(error).split("\n")[0].removeprefix("model.init: ").split(": ")[0]
        return Weights("timm"), ""
    if not os.path.exists(os.path.expanduser(asked)):
        name = asked if asked in WIDTHS else TIMM + asked.removeprefix(TIMM)
        _, about = timm_backbone.published(name)
        return Weights("timm", name, mean=about["mean"], std=about["std"]), ""
    try:
        encoder = load_encoder(Path(asked))
    except CheckpointError as error:
        raise ConfigError(f"--weights {asked}: {error}") from error
    if (view := encoder.view) is None:
        return Weights(asked, encoder.name, encoder.stem), ""
    return Weights(asked, encoder.name, encoder.stem, view.mean, view.std, min(96, view.size)), ""
