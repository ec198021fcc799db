"""`fastsuncet embed`: the features of every image below a folder, in one file.

While it runs, what is done lies in a hidden folder next to the file, and the same command continues it:

    .NAME.part/features.npy   (N, width) float32, the rows that are done and zeros
    .NAME.part/state.json     how many rows are done, and of which images and encoder
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import astuple
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from tqdm import tqdm

from fastsuncet.checkpoint import atomic_files
from fastsuncet.checkpoint.run_folder import disk_errors, refuse_existing
from fastsuncet.config import Config
from fastsuncet.console import say_line
from fastsuncet.distributed import launch
from fastsuncet.errors import CheckpointError, ConfigError
from fastsuncet.evaluation.encoder import Encoder, load_encoder
from fastsuncet.evaluation.features import outputs
from fastsuncet.training.determinism import set_determinism
from pipelines.datasets.folders import image_tree
from pipelines.datasets.index import ImageIndex
from pipelines.sampling.augmentation import Center

# The evaluation's code reads its back-end and threads from a config; the pixels are the encoder's own.
SETTINGS = Config.from_values(
    {
        "data": {"kind": "images", "root": "."},
        "criterion": {"temperature": 0.1, "unsupervised_batch_size": 2},
        "optimization": {"steps": 1, "lr": 1.0},
    }
)
# Batches between two saves. Starting the decoder again costs about a second, and a stop the batches since the save.
SAVE_EVERY = {"cpu": 4, "cuda": 64}
FORMATS = (".npz", ".parquet")


def embed(where: Path, folder: Path, output: Path, *, batch: int = 256, force: bool = False) -> None:
    """Write the features and names of the images below `folder` to `output`, by the encoder in `where`.

    Continues what an earlier call has begun, if images and encoder are the same. Uses one GPU, or the CPU. Raises
    ConfigError for an output that exists or has another ending than FORMATS, DataError for a bad image, CheckpointError
    for a disk that refuses.
    """
    if output.suffix not in FORMATS:
        raise ConfigError(f"--output {output} must end in {' or '.join(FORMATS)}")
    if output.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ConfigError("a .parquet file needs pyarrow: pip install pyarrow, or write a .npz file")
    refuse_existing(output, force)
    encoder = load_encoder(where)
    if encoder.view is None:
        raise ConfigError(
            f"{where} does not say which pixels it expects. Give a run, a checkpoint or an export"
        )
    index = image_tree(folder)
    index.require_good()
    place = launch.Place(0, 1, 0, launch.pick_device("auto", 0))
    set_determinism(SETTINGS, place)
    part = output.with_name(f".{output.name}.part")
    with disk_errors(output):
        atomic_files.make_folder(part)
        with atomic_files.exclusive(part / ".lock") as held:
            if not held:
                raise CheckpointError(
                    f"another process is writing {output}: wait for it, or choose another --output"
                )
            rows = _all_rows(encoder, index, encoder.view, place, part, batch)
            temporary = part / output.name
            _save(temporary, rows, index, {"encoder": encoder.record(), "view": astuple(encoder.view)})
            atomic_files.sync(temporary)
            os.replace(temporary, output)
            atomic_files.sync(output.parent)
        atomic_files.remove(part)
    say_line(f"wrote {output}: {len(index):,} images, {rows.shape[1]:,} features of {encoder.source}")


def features(
    network: nn.Module,  # (B, 3, S, S) -> (B, E), on the place's device
    index: ImageIndex,
    view: Center,
    place: launch.Place,
    *,
    batch: int = 256,
    first: int = 0,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (number of the first image, features (n, E) float32) of the images from `first` on, block by block.

    Blocks begin at the same images in every call, so a continued pass has the bits of one that was not stopped.
    """
    count = batch * SAVE_EVERY[place.device.type]
    for start in range(first, len(index), count):
        numbers = np.arange(start, min(start + count, len(index)))
        found = outputs(network, index, numbers, SETTINGS, place, batch=batch, view=view)
        yield start, found.cpu().numpy()


def _all_rows(
    encoder: Encoder, index: ImageIndex, view: Center, place: launch.Place, part: Path, batch: int
) -> np.ndarray:
    """Return the features of all images, (N, E), in a file in `part`; those that are done there are not computed."""
    digest = hashlib.sha256()
    for tensor in encoder.module.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    identity = {
        "images": [index.fingerprint(), index.contents()],
        "encoder": digest.hexdigest(),
        "view": json.loads(json.dumps(astuple(view))),
        "batch": batch,
        "device": place.device.type,
    }
    path, state, shape = part / "features.npy", part / "state.json", (len(index), encoder.width)
    done = _done(state, identity)
    if done:
        say_line(f"continuing after {done:,} of {len(index):,} images")
    else:
        # First the state: after a kill between the two, or before the first save, no row counts as done.
        atomic_files.remove(state)
        atomic_files.sync(part)
        atomic_files.remove(path)
    mode = "r+" if done else "w+"
    rows = np.lib.format.open_memmap(path, mode=mode, dtype=np.float32, shape=shape)
    network = encoder.module.to(place.device)
    # tqdm's own format would begin with "? images/s".
    form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} images, {elapsed}"
    with tqdm(total=len(index), initial=done, disable=None, bar_format=form) as bar:
        for start, found in features(network, index, view, place, batch=batch, first=done):
            rows[start : start + len(found)] = found
            rows.flush()
            done = start + len(found)
            atomic_files.replace(state, json.dumps({"identity": identity, "done": done}).encode())
            bar.update(len(found))
            if bar.disable:
                say_line(f"{done:,} of {len(index):,} images")
    return rows


def _done(state: Path, identity: dict[str, Any]) -> int:
    """Return how many rows an earlier call has saved of the same images, encoder and batches."""
    try:
        saved = json.loads(state.read_bytes())
    except FileNotFoundError:
        return 0
    if saved["identity"] == identity:
        return saved["done"]
    differ = ", ".join(key for key in identity if saved["identity"].get(key) != identity[key])
    say_line(f"starting over: what was begun in {state.parent} has other {differ}")
    return 0


def _save(path: Path, rows: np.ndarray, index: ImageIndex, about: dict[str, Any]) -> None:
    """Write features, file names and, as JSON, `about`."""
    names = [index.name(i) for i in range(len(index))]
    if path.suffix == ".npz":
        np.savez(path, features=rows, files=np.array(names), about=np.array(json.dumps(about)))
        return
    import pyarrow as pa  # pyright: ignore[reportMissingImports]
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]

    width = rows.shape[1]
    kind = pa.list_(pa.float32(), width)
    fields = [pa.field("file", pa.string()), pa.field("features", kind)]
    schema = pa.schema(fields, metadata={"fastsuncet": json.dumps(about)})
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), width)
    parquet.write_table(pa.table([pa.array(names), vectors], schema=schema), path, row_group_size=4096)
