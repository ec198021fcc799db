"""`fastsuncet data check`: decode every image once with the decoder that trains, and keep the index for the runs.

A truncated file can pass for weeks, until a crop reaches the missing rows; this finds it in one pass.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from fastsuncet.config import Config
from fastsuncet.data.cpu_count import decode_threads
from fastsuncet.data.dataset import index_path, pack_index_path, packed_index
from pipelines.data_errors import BadImage
from pipelines.datasets import cifar
from pipelines.datasets import folders as datasets
from pipelines.datasets.in_memory import digits
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.index_io import save_index
from pipelines.verify import CheckReport, check

Write = Callable[[str], object]


def check_config(config: Config, write: Write = print) -> None:
    """Check the training and the validation images of `config`, and keep the index of both for its runs.

    Training images in a pack are checked there, checksums first; the pack holds its own index.

    Raises BadImage, which names them all, for more bad images than data.bad_images; DataError for missing folders, a
    CSV that does not fit, and other reasons why images cannot be found.
    """
    data = config.data
    if data.kind == "digits":
        _held("digits", digits(train=True), digits(train=False), write)
        return
    if data.kind in cifar.CLASSES:
        root = Path(data.root).expanduser()
        train = cifar.cifar(data.kind, root, download=data.download)
        _held(str(root), train, cifar.cifar(data.kind, root, train=False), write)
        return
    device = "cpu" if config.meta.device == "cpu" or data.backend == "torchvision" else _device()
    folder = Path(data.root).expanduser() / data.train
    # As in a run, the index of a CSV's images is kept without its labels, which can change while the pixels do not. A
    # run reads a pack instead of the folder that it was made from, so that folder is not checked.
    if data.pack is not None:
        train = packed_index(config)
    else:
        train = datasets.image_tree(folder) if data.kind == "csv" else datasets.image_folder(folder)
    if data.kind == "csv":
        classes = datasets.with_csv_labels(train, Path(data.csv).expanduser()).classes
    else:
        classes = train.classes
    threads = decode_threads(data.decode_threads)
    reports = [_checked(train, data.backend, device, threads, write)]
    if data.pack is None:
        _keep(reports[0], index_path(config, folder, True), write)
    elif pack_index_path(config).exists():  # shards of another program, whose index is kept here
        _keep(reports[0], pack_index_path(config), write)
    if data.validation is not None:
        folder = Path(data.root).expanduser() / data.validation
        if folder.is_dir() or config.evaluation.knn_every_epochs is not None:
            validation = datasets.with_classes(datasets.image_folder(folder), classes)
            reports.append(_checked(validation, data.backend, device, threads, write))
            _keep(reports[1], index_path(config, folder, False), write)
        else:
            write(f"{folder}: skipped, the folder does not exist and no evaluation needs it")
    bad = [image for report in reports for image in report.bad]
    if len(bad) > data.bad_images:
        raise BadImage(bad, allowed=data.bad_images)
    for path, reason in bad:
        write(f"{path}: {reason} (data.bad_images allows {data.bad_images})")


def check_folder(folder: Path, write: Write = print) -> None:
    """Check every image below `folder`, whatever its layout. Raises BadImage, which names every bad file."""
    report = _checked(datasets.image_tree(folder), "auto", _device(), 2, write)
    if report.bad:
        raise BadImage(report.bad)


def _device() -> str:
    return "gpu" if torch.cuda.is_available() else "cpu"


def _held(name: str, train: ImageIndex, test: ImageIndex, write: Write) -> None:
    write(f"{name}: {len(train):,} training and {len(test):,} test images, decoded and held in memory")


def _checked(index: ImageIndex, backend: str, device: str, threads: int, write: Write) -> CheckReport:
    terminal = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if terminal:
            print(f"\r{index.root}: {done:,} of {total:,}", end="" if done < total else "\n", file=sys.stderr)

    report = check(index, backend, device=device, threads=threads, progress=progress)
    state = f"{len(report.bad):,} bad" if report.bad else "all good"
    write(f"{index.root}: {len(index):,} images decoded with {report.decoder}, {state}")
    return report


def _keep(report: CheckReport, path: Path, write: Write) -> None:
    save_index(report.index, path)
    write(f"{report.index.root}: index kept in {path}")
