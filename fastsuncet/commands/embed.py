"""`fastsuncet embed`: the features of every image below a folder, in one file."""

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from fastsuncet.commands.folder_pass import (
    FolderPass,
    advising_skip_bad,
    check_output,
    known_view,
    one_process,
    skipped_lines,
)
from fastsuncet.errors import ConfigError
from fastsuncet.evaluation.encoder import load_encoder
from pipelines.datasets.folders import image_tree
from pipelines.datasets.index import ImageIndex
from pipelines.output import say_line

FORMATS = (".npz", ".parquet")
MOST_NAMES = 1 << 30  # bytes


def embed(
    where: Path, folder: Path, output: Path, *, batch: int = 256, force: bool = False, skip_bad: bool = False
) -> None:
    """Write the features and names of the images below `folder` to `output`, by the encoder in `where`.

    Raises ConfigError for an output that exists or has another ending than FORMATS, and for names too long for an
    array; DataError for a bad image, CheckpointError for a disk that refuses.
    """
    check_output(output, FORMATS, force)
    encoder = load_encoder(where)
    view = known_view(encoder)
    index, place = image_tree(folder, upright=view.upright), one_process()
    if output.suffix == ".npz":
        _require_short_names(index)
    about = {"encoder": encoder.record(), "view": astuple(view)}

    def save(path: Path, rows: np.ndarray) -> None:
        _save(path, rows, index, about)

    with advising_skip_bad(skip_bad):
        work = FolderPass(encoder.module, encoder.width, index, view, place, batch, skip_bad)
        rows = work.write(output, save, force=force)
    for line in skipped_lines(work.skipped, index, "; their features are NaN"):
        say_line(line)
    count = len(index) - len(work.skipped)
    say_line(f"wrote {output}: {count:,} images, {rows.shape[1]:,} features of {encoder.source}")


def _require_short_names(index: ImageIndex) -> None:
    """Raise ConfigError where the longest name makes a NumPy array of all names huge: each takes as much."""
    longest = max(index.files, key=len)
    size = 4 * len(longest) * len(index)
    if size > MOST_NAMES:
        raise ConfigError(
            f"{len(index):,} names of up to {len(longest):,} characters take {size / 1e9:.1f} GB in a .npz file: write "
            f"a .parquet file, or rename {longest}"
        )


def _save(path: Path, rows: np.ndarray, index: ImageIndex, about: dict[str, Any]) -> None:
    """Write features, file names and, as JSON, `about`."""
    names = list(index.files)
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
