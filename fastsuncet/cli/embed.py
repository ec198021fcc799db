"""Write the features of every image below a folder.

Writes the features of every image below FOLDER, at any depth, to one file, by the encoder of a run,
a checkpoint or an export: the center crop and the normalization of the evaluation, float32, no
projection head. It uses one GPU, or the CPU.

A .npz file has the arrays features (N, width), files (N,) and about (JSON); a .parquet file has the
columns file and features and needs pip install pyarrow.

The same command continues one that was stopped. The file exists only once it is complete, and what
is at --output stays, unless --force is given. A bad image ends the command with its name; with
--skip-bad it is printed and its features are NaN.

examples:
  fastsuncet embed runs/in1k_10pct ~/photos --output photos.npz
  fastsuncet embed runs/mine/export/torchvision.pth photos --output p.parquet
"""

from fastsuncet.cli._parser import Parser, path, run_folder, whole


def arguments(parser: Parser) -> None:
    parser.takes_run(run_folder)
    parser.takes("folder", "FOLDER", "any tree of images", type=path)
    parser.writes("a .npz or .parquet file", force=True)
    parser.takes("--batch", "N", "images at a time (default: 256)", type=whole(1), default=256)
    parser.flag("--skip-bad", "go on without the images that cannot be decoded, and list them")
