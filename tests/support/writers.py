"""What this program writes to a disk: for each kind a way to write content number n, and to read the number back."""

import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastsuncet.checkpoint import manager
from fastsuncet.errors import CheckpointError
from pipelines import code_cache
from pipelines.data_errors import DataError
from pipelines.datasets.index import ImageIndex, load_own_index, save_index
from pipelines.datasets.pack import open_pack, write_pack
from tests.support.checkpoints import assert_whole, save
from tests.support.pictures import write_pictures

# What a writer or a reader raises, in words for the user, where the disk refuses.
REFUSALS = (CheckpointError, DataError, OSError)


class Writer(NamedTuple):
    """`write(folder, n)` writes, `read(folder)` returns n, or None where there is nothing; what it finds is whole."""

    write: Callable[[Path, int], object]
    read: Callable[[Path], int | None]
    names: tuple[
        str, ...
    ]  # what is in the folder after it has written number 3; leftovers of a kill begin with .tmp-


@functools.cache
def images() -> ImageIndex:
    """Return three images in a folder of their own."""
    return write_pictures(Path(tempfile.mkdtemp(prefix="fastsuncet-images-")), count=3, side=24)


def read_checkpoint(folder: Path) -> int | None:
    loaded = manager.load_newest(folder, say=lambda line: None)
    if loaded is not None:
        assert_whole(loaded)
    return loaded and loaded.step


def write_index(folder: Path, number: int) -> None:
    """Write an index whose first label is `number`."""
    labels = np.array([number, 0, 0])
    save_index(replace(images(), labels=labels, classes=tuple("abcd")), folder / "index.npz")


def read_index(folder: Path) -> int | None:
    index = load_own_index(folder / "index.npz")
    return None if index is None else int(index.labels[0])


def read_pack(folder: Path) -> int | None:
    """Return the number of the newest pack, every image of which must have its bytes."""
    found = max((int(name) for name in os.listdir(folder) if name.isdigit()), default=None)
    if found is not None:
        pack = open_pack(folder / str(found))
        assert [pack.content(i) for i in range(3)] == [images().path(i).read_bytes() for i in range(3)]
    return found


def read_code(folder: Path) -> int | None:
    code = code_cache.read(folder / "kernels" / "code")
    assert code is None or code == code[:1] * 20_000
    return None if code is None else int(code[:1])


WRITERS = {
    "checkpoint": Writer(
        lambda folder, n: save(folder, n, keep=1 if n == 3 else 2),
        read_checkpoint,
        {".lock", "latest", "step_00000003"},
    ),
    "index": Writer(write_index, read_index, {"index.npz"}),
    "pack": Writer(lambda folder, n: write_pack(images(), folder / str(n)), read_pack, {"3"}),
    "code": Writer(
        lambda folder, n: code_cache.write(folder / "kernels" / "code", b"%d" % n * 20_000),
        read_code,
        {"kernels"},
    ),
}
