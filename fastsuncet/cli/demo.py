"""Compare SimCLR, SimCLR + SuNCEt and the labels alone, in minutes.

Trains SimCLR and SimCLR + SuNCEt on scikit-learn's digits with 10 % of the labels and the same
compute, and the labels alone, draws accuracy against compute, and explains what this run showed. It
takes minutes on two CPU cores and downloads nothing.

examples:
  fastsuncet demo
  fastsuncet demo --seed 1 --folder /tmp/demo
"""

from fastsuncet.cli._parser import Parser, output_path, whole


def arguments(parser: Parser) -> None:
    parser.takes("overrides", "section.key=value", "changes to the three configs", nargs="*")
    parser.takes("--seed", "N", "seed of the three runs (default: 0)", type=whole(0), default=0)
    parser.takes(
        "--folder", "DIR", "for all files (default: runs/demo)", type=output_path, default="runs/demo"
    )
