"""Decode every image once and name the bad ones.

The decoder is that of the training, and each bad file is named with the reason. A truncated file can go
unnoticed for weeks, until a crop reaches its missing rows; this finds it in one pass. The index of files
and sizes is kept for the runs of the config.

examples:
  fastsuncet data check in1k_10pct data.root=/data/imagenet
  fastsuncet data check /data/imagenet/train

exit codes: 0 every image is good, or data.bad_images allows the bad ones; 2 the config is wrong; 3 there
are bad images, or no images
"""

import os
from pathlib import Path

from fastsuncet.cli._parser import Options, Parser, load


def arguments(parser: Parser) -> None:
    parser.takes_config("FOLDER or CONFIG", kind="a folder of images; or ")


def run(parser: Parser, options: Options) -> None:
    is_folder = os.path.isdir(options.name)
    if is_folder and options.overrides:
        parser.error(f"{options.name} is a folder, and a folder has no keys to override")
    config = None if is_folder else load(options.name, options.overrides)
    from fastsuncet.commands.data_check import check_config, check_folder

    check_folder(Path(options.name)) if config is None else check_config(config)
