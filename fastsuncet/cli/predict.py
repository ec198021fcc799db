"""Write the class of every image below a folder, with a probability.

Writes the class of every image below FOLDER, at any depth, to one file, with columns file, class,
probability, second_class and second_probability. The classifier is the best of the run: a
fine-tuning on the same labels, if it is better on the same images; in a run of PAWS the nearest
neighbors, if they are better in the same folds of the labels; else a linear one. The last two are
fitted to the labeled images of the run (data.split; all that have a label where that is none) and
kept in RUN/classifier: the next call takes them from there. Lines say which and why.

Probabilities are calibrated: one temperature is fitted on images that the classifier has not
learned from, folds of the labels or the validation images of a fine-tuning. The command
prints how many predictions should be right, by how much the probabilities are off, and how many
images are below 0.5. Take the config as RUN to use labels that its CSV has by now.

The same command continues one that was stopped. The file exists only once it is complete, and what
is at --output stays, unless --force is given. A bad image ends the command with its name; with
--skip-bad it is printed and has empty cells. --page also writes an HTML file that any browser opens
without a network: of each class the surest and the least sure pictures, and those between two
classes. Pictures with a label that the classifier knows are shown only if there are no others. A
.parquet file needs pip install pyarrow.

examples:
  fastsuncet predict mine.yaml ~/photos --output predictions.csv --page
  fastsuncet predict runs/mine ~/photos --output predictions.parquet --skip-bad
"""

from fastsuncet.cli._parser import Parser, config_or_run, path, whole


def arguments(parser: Parser) -> None:
    parser.takes_run(config_or_run)
    parser.takes("folder", "FOLDER", "any tree of images", type=path)
    parser.writes("a .csv or .parquet file", force=True)
    parser.takes("--batch", "N", "images at a time (default: 256)", type=whole(1), default=256)
    parser.flag("--page", "also write a page of pictures: the name of --output, ending in .html")
    parser.flag("--skip-bad", "go on without the images that cannot be decoded, and list them")
