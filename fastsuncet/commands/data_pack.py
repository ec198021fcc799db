"""`fastsuncet data pack`: the training images of a config as a few tar shards, for shared file systems."""

from pathlib import Path

from fastsuncet.config import Config
from fastsuncet.config.problems import words
from fastsuncet.config.rules import FILES
from fastsuncet.data.image_files import file_index
from fastsuncet.paths import typed_path
from pipelines.datasets.pack import write_pack
from pipelines.output import say_line


def data_pack(config: Config, output: Path | None = None) -> None:
    """Pack the training images of `config` into the folder `output` (None: data.pack), or continue a stopped pack.

    Raises ConfigErrors for data without files and for a missing folder name, DataError for files that cannot be
    packed and more bad images than data.bad_images.
    """
    data = config.data
    if data.kind not in FILES:
        raise config.error("data.kind", f"{words(FILES)} can be packed; the others are in memory already")
    if output is None and data.pack is None:
        raise config.error("data.pack", "or --output is needed: the folder to write")
    folder = (output or typed_path(data.pack)).absolute()
    # A CSV's labels stay out of the pack, as of the kept index: they can change while the pixels do not.
    index = file_index(config, train=True, scan=True)
    index.require_good(data.bad_images)
    before = write_pack(index, folder)
    if before == len(index):
        say_line(f"{folder}: has all {before:,} images of {index.root} already")
        return
    continued = f", {before:,} of them by an earlier start" if before else ""
    gigabytes = sum(shard.stat().st_size for shard in folder.glob("*.tar")) / 1e9
    say_line(f"{folder}: {len(index):,} images of {index.root} packed{continued}, {gigabytes:,.3f} GB")
    say_line(f"train from it with data.pack={folder}; `fastsuncet data check` with it verifies every byte")
