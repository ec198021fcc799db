"""`fastsuncet data check`: decode every image once with the decoder that trains, and keep the index for the runs."""

from dataclasses import replace
from pathlib import Path

import torch

from fastsuncet.config import Config
from fastsuncet.config.rules import FILES
from fastsuncet.data.dataset import in_memory
from fastsuncet.data.image_files import image_root, index_path, kept_index, packed_index, scanned, with_labels
from pipelines.backend import Backend, choose_backend, decode_threads
from pipelines.data_errors import BadImage
from pipelines.datasets.folders import image_tree
from pipelines.datasets.index import ImageIndex, require_index, save_index, with_classes
from pipelines.output import say_line
from pipelines.verify import check, note_on_copies


def check_config(config: Config) -> None:
    """Check the training and the validation images of `config`, and keep the index of both for its runs.

    Training images in a pack are checked there, checksums first; the folder that they came from is not checked. Raises
    BadImage, which names them all, for more bad images than data.bad_images; DataError for missing folders, a CSV that
    does not fit, and other reasons why images cannot be found.
    """
    data = config.data
    if data.kind not in FILES:
        train, test = (in_memory(config, train=part, download=data.download) for part in (True, False))
        name = data.root or data.kind
        say_line(f"{name}: {len(train):,} training and {len(test):,} test images, decoded and held in memory")
        return
    device = "cpu" if config.meta.device == "cpu" or data.backend == "torchvision" else _device()
    options = {"backend": data.backend, "device": device, "threads": decode_threads(data.decode_threads)}
    options["megapixels"] = data.max_megapixels
    kept = kept_index(config)
    train = scanned(config, train=True) if data.pack is None else packed_index(config, scan=True)
    if data.pack is not None and not kept.exists():
        kept = None  # the pack holds its index; those of other programs' shards are kept here
    # The index of a CSV's images is kept without its labels, which can change while the pixels do not.
    labeled = with_labels(config, train)
    parts = [(train, kept)]
    if data.validation_folder is not None and data.root is not None and data.kind != "images":
        folder = image_root(config, train=False)
        if folder.is_dir() or config.evaluation.knn_every_epochs is not None:
            validation = scanned(config, train=False)
            with_classes(validation, labeled.classes)  # raises; the index keeps the folder's own names
            parts.append((validation, index_path(config, folder, False)))
        else:
            say_line(f"{folder}: skipped, the folder does not exist and no evaluation needs it")
    checked = [_checked(index, kept, **options) for index, kept in parts]
    for note in note_on_copies(replace(labeled, bad=checked[0].bad)):
        say_line(f"note: {note}")
    bad = [each for index in checked for each in index.bad_files()]
    if len(bad) > data.bad_images:
        raise BadImage(bad, allowed=data.bad_images)
    for path, reason in bad:
        say_line(f"{path}: {reason} (data.bad_images allows {data.bad_images})")


def check_folder(folder: Path) -> None:
    """Check every image below `folder`, whatever its layout. Raises BadImage, which names every bad file."""
    checked = _checked(image_tree(folder), None, device=_device())
    if checked.bad:
        raise BadImage(checked.bad_files())


def _device() -> str:
    return "gpu" if torch.cuda.is_available() else "cpu"


def _checked(
    index: ImageIndex, kept: Path | None, megapixels: float = 100, backend: Backend = "auto", **options
) -> ImageIndex:
    """Check the images, and keep the index in `kept`."""
    if kept is not None:
        require_index(kept)  # before hours of decoding
    whole = check(index, backend, **options)
    checked = whole.within(megapixels)
    state = f"{len(checked.bad):,} bad" if checked.bad else "all good"
    decoder = "DALI" if choose_backend(backend) == "dali" else "PIL"
    say_line(f"{index.root}: {len(index):,} images decoded with {decoder}, {state}")
    if kept is not None:
        save_index(whole, kept)
        say_line(f"{index.root}: index kept in {kept}")
    return checked
