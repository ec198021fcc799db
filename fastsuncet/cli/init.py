"""Look at your images and this machine, and write a config.

Looks at the images below FOLDER (number, sizes, classes, labels, bad files) and at this machine (GPU,
memory, cores, one timed step), and writes a config in which every choice has its reason. Prints the plan,
the predicted hours and the next command. It replaces no file. With --weights RUN the images that the run
has held out stay so; if they have changed since, their list is written beside the config.

FOLDER holds train/CLASS/IMAGE or CLASS/IMAGE (the folders are the classes), or any tree of images with
--labels, a CSV whose first line is `file,label`; or tar shards. The network starts from the weights that
timm has published; --weights none, or no network connection the first time, trains from scratch.

examples:
  fastsuncet init photos --labels labels.csv
  fastsuncet init photos --labels labels.csv --hours 0.5 --weights none
  fastsuncet init shards --output shards.yaml
  fastsuncet init photos --weights convnext_tiny
  fastsuncet init photos --weights runs/mine --output again.yaml
"""

from fastsuncet.cli._parser import Parser, path


def arguments(parser: Parser) -> None:
    parser.takes("folder", "FOLDER", "images: class folders, any tree, or tar shards", type=path)
    parser.takes("--labels", "FILE", "a CSV of lines file,label", type=path)
    parser.takes("--hours", "H", "hours that the training can take (default: 1)", type=float, default=1.0)
    parser.takes("--weights", "W", "a file or a run, a network of timm's, or none (default: timm's)")
    parser.writes("(default: mine.yaml)", required=False, default="mine.yaml")
