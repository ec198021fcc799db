"""`fastsuncet data pack`: the training images of a config as one file, for file systems that dislike a million."""

import sys
from collections.abc import Callable
from pathlib import Path

from fastsuncet.config import Config
from fastsuncet.data.dataset import file_index
from pipelines.datasets.shard_writer import write_pack


def pack(config: Config, output: Path | None, write: Callable[[str], object] = print) -> None:
    """Packs the training images of `config` into `output` (None: data.pack), or continues a pack that was stopped.

    Raises ConfigErrors for data that are no files or without a name for the pack, DataError for files that cannot be
    packed and more bad images than data.bad_images.
    """
    data = config.data
    if data.kind not in ("image_folder", "csv"):
        raise config.error("data.kind", "image_folder or csv can be packed; the others are in memory already")
    if output is None:
        if data.pack is None:
            raise config.error("data.pack", "or --output is needed: the file to write")
        output = Path(data.pack).expanduser()
    folder = Path(data.root).expanduser() / data.train
    # A CSV's labels stay out of the pack, as of the kept index: they may change, and the pixels not.
    index = file_index(config, folder, train=True, scan=True)
    index.require_good(data.bad_images)

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{output}: {done:,} of {total:,}", end="" if done < total else "\n", file=sys.stderr)

    before = write_pack(index, output, progress=progress)
    if before == len(index):
        write(f"{output}: there already, whole, with the {before:,} images of {folder}")
        return
    continued = f", {before:,} of them by an earlier start" if before else ""
    gigabytes = output.stat().st_size / 1e9
    write(f"{output}: {len(index):,} images of {folder} packed{continued}, {gigabytes:,.3f} GB")
    write(f"train from it with data.pack={output}; `fastsuncet data check` with it verifies every byte")
