"""Compare two choices of the linear classifier's strength on few labels: python compare.py OUTPUT.csv FEATURES.npz ...

Each .npz has the arrays train (N, E), train_y (N,), report (M, E) and report_y (M,): features of `fastsuncet embed` and
the names of the classes. Labels are drawn in proportion to the classes, two a class at least. The old choice takes the
strength that is right most often on the left-out labels, the new one is `choose_strength`.
"""

import csv
import sys
from pathlib import Path

import numpy as np
import torch

from fastsuncet.evaluation.calibration import FOLDS, folds
from fastsuncet.evaluation.linear import STRENGTHS, choose_strength, fit_linear

SIZES, DRAWS = (30, 100, 300), range(100, 103)
OPTIONS = {"max_iterations": 200, "tolerance": 1e-4}


def most_right(x: torch.Tensor, y: torch.Tensor, classes: int) -> float:
    """Return the strength that is right most often, of equal ones the smallest."""
    right = [0] * len(STRENGTHS)
    for fold in range(FOLDS):
        out = folds(y) == fold
        for i, strength in enumerate(STRENGTHS):
            fit = fit_linear(x[~out], y[~out], classes, strength=strength, **OPTIONS)
            right[i] += int((fit.scores(x[out]).argmax(1) == y[out]).sum())
    return STRENGTHS[right.index(max(right))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = [("features", "labels", "draw", "most_right", "most_right_top1", "new", "new_top1")]
    for path in map(Path, sys.argv[2:]):
        data = np.load(path)
        numbers = {name: number for number, name in enumerate(sorted(set(data["train_y"])))}
        y, truth = (torch.tensor([numbers[name] for name in data[key]]) for key in ("train_y", "report_y"))
        x, queries = (torch.from_numpy(data[key]) for key in ("train", "report"))
        shares = y.bincount() / len(y)
        for size in SIZES:
            for draw in DRAWS:
                order = torch.randperm(len(y), generator=torch.Generator().manual_seed(draw))
                wanted = (shares * size).round().long().clamp(min=2).tolist()
                chosen = torch.cat([order[y[order] == c][:n] for c, n in enumerate(wanted)])
                row: list = [path.stem, len(chosen), draw]
                for choose in (most_right, lambda *x: choose_strength(*x)[0]):
                    strength = choose(x[chosen], y[chosen], len(numbers))
                    fit = fit_linear(x[chosen], y[chosen], len(numbers), strength=strength)
                    right = (fit.scores(queries).argmax(1) == truth).double().mean()
                    row += [f"{strength:g}", f"{100 * right:.2f}"]
                rows.append(tuple(row))
        print(path.stem, flush=True)
    with open(sys.argv[1], "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
