"""What this program writes to a disk: for each kind a way to write content number n, and to read the number back."""

import csv
import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import nn

from fastsuncet.checkpoint import manager
from fastsuncet.commands import embed, export, predict
from fastsuncet.errors import FastSuncetError
from fastsuncet.evaluation.encoder import Encoder, load_encoder
from fastsuncet.models.resnet import build_model
from pipelines import code_cache
from pipelines.data_errors import DataError
from pipelines.datasets.index import ImageIndex, load_index, save_index
from pipelines.datasets.pack import open_pack, write_pack
from pipelines.sampling.augmentation import Center
from tests.support.checkpoints import assert_whole, save
from tests.support.colors import ALONE
from tests.support.exports import save_run
from tests.support.pictures import write_pictures

# What a writer or a reader raises, in words for the user, where the disk refuses.
REFUSALS = (FastSuncetError, DataError, OSError)

CLASSES = tuple("abcd")
build_once = functools.cache(build_model)
SCRATCH = tempfile.TemporaryDirectory()  # of the test process, removed at its end


class Writer(NamedTuple):
    """`write(folder, n)` writes, `read(folder)` returns n, or None where there is nothing; what it finds is whole."""

    write: Callable[[Path, int], object]
    read: Callable[[Path], int | None]
    names: set[str]  # what is in the folder after it has written number 3


@functools.cache
def images() -> ImageIndex:
    """Return three images in a folder of their own."""
    return write_pictures(Path(SCRATCH.name, "images"), count=3, side=24)


def read_checkpoint(folder: Path) -> int | None:
    loaded = manager.load_newest(folder)
    if loaded is not None:
        assert_whole(loaded)
    return loaded and loaded.step


def write_index(path: Path, number: int) -> None:
    """Write an index whose first label is `number`."""
    labels = np.array([number, 0, 0])
    save_index(replace(images(), labels=labels, classes=CLASSES), path)


def read_index(path: Path) -> int | None:
    index = load_index(path, own=True)
    return None if index is None else int(index.labels[0])


def read_pack(folder: Path) -> int | None:
    """Return the number of the newest pack, every image of which must have its bytes."""
    found = max((int(name) for name in os.listdir(folder) if name.isdigit()), default=None)
    if found is not None:
        pack = open_pack(folder / str(found))
        for i in range(3):
            if damage := pack.damage(i):
                raise DataError(damage)
            assert pack.content(i) == images().path(i).read_bytes()
    return found


def write_code(folder: Path, number: int) -> None:
    code_cache.write(folder / "code", b"%d" % number * 20_000)


def read_code(folder: Path) -> int | None:
    code = code_cache.read(folder / "code")
    assert code is None or code == code[:1] * 20_000
    return None if code is None else int(code[:1])


@functools.cache
def exported() -> tuple[Encoder, dict]:
    """Return a small encoder and the record of its export."""
    run = Path(SCRATCH.name, "run")
    save_run(run, "model.name=resnet_tiny")
    encoder = load_encoder(run)
    return encoder, export._record(encoder, "timm", run)


def write_export(path: Path, number: int) -> None:
    """Export an encoder as if it had done `number` updates, to a folder or a file."""
    encoder, record = exported()
    write = export._write_file if path.suffix else export._write_folder
    write(path, encoder, record | {"encoder": record["encoder"] | {"step": number}})


def read_export(path: Path) -> int | None:
    record = path / "fastsuncet.json" if path.is_dir() else path.with_suffix(".json")
    # To build the network takes longer than to read it.
    with mock.patch("fastsuncet.evaluation.encoder.build_model", build_once):
        return load_encoder(path).step if path.exists() and record.exists() else None


def write_rows(output: Path, number: int) -> None:
    """Write an output of `number` for each image, as `embed` (.npz) and `predict` (.csv) do; nothing is decoded."""

    def outputs(network: nn.Module, index: ImageIndex, numbers: np.ndarray, *_, **__) -> torch.Tensor:
        return torch.full((len(numbers), 4), float(number))

    def save_rows(path: Path, rows: np.ndarray) -> None:
        if path.suffix == ".npz":
            embed._save(path, rows, images(), {})
        else:
            predict._save(path, predict._predictions(rows, list(map(images().name, range(3))), CLASSES))

    network = nn.Flatten()
    network.register_buffer("number", torch.tensor(number))  # another network, whose rows are not continued
    with mock.patch.object(embed, "outputs", outputs), mock.patch.dict(embed.SAVE_EVERY, cpu=1):
        rows = embed.FolderPass(network, 4, images(), Center(), ALONE, batch=2)
        rows.write(output, save_rows, force=True)


def read_rows(output: Path) -> int | None:
    """Return the number of an output, each row of which must have it."""
    if not output.exists():
        return None
    if output.suffix == ".npz":
        with np.load(output) as arrays:
            found = arrays["features"].tolist()
    else:
        lines = output.read_text(encoding="utf-8").splitlines()
        found = [[CLASSES.index(row["class"])] for row in csv.DictReader(lines)]
    assert len(found) == 3 and len({cell for row in found for cell in row}) == 1
    return int(found[0][0])


def at(
    name: str, write: Callable[[Path, int], object], read: Callable[[Path], int | None], *others: str
) -> Writer:
    """Return the writer of the file or folder `name`, which writes `others` next to it."""
    return Writer(
        lambda folder, n: write(folder / name, n), lambda folder: read(folder / name), {name, *others}
    )


CHECKPOINTS = {".lock", "latest", "step_00000003"}
WRITERS = {
    "checkpoint": Writer(lambda folder, n: save(folder, n, 1 if n == 3 else 2), read_checkpoint, CHECKPOINTS),
    "index": at("index.npz", write_index, read_index),
    "pack": Writer(lambda folder, n: write_pack(images(), folder / str(n)), read_pack, {"3"}),
    "code": at("kernels", write_code, read_code),
    "export": at("weights.pth", write_export, read_export, "weights.json"),
    "export folder": at("weights", write_export, read_export),
    **{name: at(name, write_rows, read_rows) for name in ("features.npz", "predictions.csv")},
}
