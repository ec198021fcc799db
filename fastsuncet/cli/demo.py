"""Compare both methods on small real images, in minutes.

Trains SimCLR and SimCLR + SuNCEt on scikit-learn's digits with 10 % of the labels and the same
compute, draws accuracy against compute, and explains what this run showed. It takes minutes on two
CPU cores and downloads nothing.

examples:
  fastsuncet demo
  fastsuncet demo --seed 1 --folder /tmp/demo
"""

from argparse import Namespace

from fastsuncet.cli._parser import Parser, output_path, whole


def arguments(parser: Parser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to both configs")
    text = "of both runs (default: 0)"
    parser.add_argument("--seed", metavar="N", type=whole(0), default=0, help=text)
    text = "for all files (default: runs/demo)"
    parser.add_argument("--folder", metavar="DIR", type=output_path, default="runs/demo", help=text)


def run(parser: Parser, options: Namespace) -> None:
    from fastsuncet.commands.demo import demo

    demo(**vars(options))
