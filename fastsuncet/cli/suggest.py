"""Choose the images to label next, and make a page to label them on.

Writes N images of the run's data that have no label: typical ones that differ from each other and
from the labeled ones (TypiClust). Of more than 100,000 it looks at a random part. FILE has lines of
a labels.csv with empty labels: write them, and add the lines to your CSV.

--page also writes an HTML file that any browser opens without a network: a picture, what the run's
linear classifier takes it for, a key for each class, and a button that saves new-labels.csv. Append
that to the CSV that the run reads: cat new-labels.csv >> labels.csv

Compared with random images (RESULTS.md): on CIFAR-10 better with 10, 20 and 100 labels in the end,
on clothing photos with 100 only. All other numbers from 10 to 250 were undecided, none was worse.
What is at --output stays, unless --force is given.

examples:
  fastsuncet suggest mine.yaml --count 50 --output next.csv --page
  fastsuncet predict mine.yaml ~/photos --output again.csv  # reads them
"""

from fastsuncet.cli._parser import Parser, config_or_run, whole


def arguments(parser: Parser) -> None:
    parser.takes_run(config_or_run)
    parser.takes("--count", "N", "images to label (default: 50)", type=whole(1), default=50)
    parser.writes("a .csv file", force=True)
    parser.flag("--page", "also write a page to label them on: the name of --output, ending in .html")
