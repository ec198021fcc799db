"""Sweep files that the tests of `sweep` write."""

from pathlib import Path

from fastsuncet.commands.sweep.runs import Run, expand, read_sweep

ROOT = Path(__file__).resolve().parents[2]
DIGITS = f"base: {ROOT}/configs/digits_demo.yaml\n"
SMALL = """\
set:
  optimization.steps: 2
  optimization.warmup: 0
  criterion.unsupervised_batch_size: 16
  criterion.supervised_imgs_per_class: 2
  checkpoint.every: 1
  evaluation.knn_every_epochs: null
"""
TWO = DIGITS + SMALL + "vary: {data.split.fraction: [0.1, 0.5]}\ncommands: [train, evaluate knn]\n"


def written(text: str) -> str:
    """Write `text` as two.yaml in the working directory and return the name."""
    Path("two.yaml").write_text(text)
    return "two.yaml"


def expanded(text: str, *overrides: str) -> list[Run]:
    """Return the runs of the sweep `text`."""
    return expand(read_sweep(written(text)), overrides)
