"""Sweep files that the tests of `sweep` write, and the names of their runs."""

from pathlib import Path

from fastsuncet.commands.sweep.runs import expand
from fastsuncet.commands.sweep.spec_reader import read_sweep

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


def written(text: str, name: str = "two.yaml") -> str:
    Path(name).write_text(text)
    return name


def names(text: str, *overrides: str) -> list[str]:
    return [run.name for run in expand(read_sweep(written(text)), overrides)]
