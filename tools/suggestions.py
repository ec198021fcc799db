"""Does a linear classifier learn more from suggested images than from random ones?

    python tools/suggestions.py run POOL.npz TEST.npz --name NAME --pool N --output FILE.csv
    python tools/suggestions.py show docs/results/suggestions/accuracies.csv

The rules are beside the points. The .npz files are of `fastsuncet embed` on folders of class folders.
"""

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `tools` can be imported

from fastsuncet.commands.report.tables import markdown
from fastsuncet.evaluation.linear import choose_strength, fit_linear
from fastsuncet.evaluation.suggestions import typical
from fastsuncet.metrics.writer import csv_table
from tools.results import interval

COUNTS, DRAWS = (10, 20, 50, 100, 250), 10
ARMS = ("random", "typical", "margin")
COLUMNS = ("images", "arm", "draw", "labels", "top1")


def run(name: str, pool: Path, test: Path, size: int, output: Path) -> None:
    """Add the accuracies of all arms and draws to `output`, in %."""
    (x, y), (queries, truth) = loaded(pool), loaded(test)
    rows = [row for row in rows_of(output) if row[0] != name] if output.exists() else []
    for draw in range(DRAWS):
        chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(draw))[:size]
        for arm in ARMS:
            for count, top1 in accuracies(x[chosen], y[chosen], queries, truth, arm, draw):
                rows.append((name, arm, str(draw), str(count), f"{100 * top1:.2f}"))
                print(*rows[-1], flush=True)
    output.write_bytes(csv_table([COLUMNS, *rows]))


def loaded(path: Path) -> tuple[Tensor, Tensor]:
    """Return the features (N, E) and the labels (N,): the numbers of the class folders, in order of their names."""
    with np.load(path) as content:
        classes = [Path(name).parts[0] for name in content["files"]]
        return torch.from_numpy(content["features"]), torch.from_numpy(
            np.unique(classes, return_inverse=True)[1]
        )


def accuracies(
    x: Tensor, y: Tensor, queries: Tensor, truth: Tensor, arm: str, draw: int
) -> list[tuple[int, float]]:
    """Return (labels, accuracy on `queries`) of an arm, which keeps its labels and adds to them."""
    labeled, found, scores = torch.zeros(len(x), dtype=torch.bool), [], None
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 + draw))
    for count in COUNTS:
        more = count - int(labeled.sum())
        if arm == "random":
            picked = order[count - more : count]
        elif arm == "typical" or scores is None or scores.shape[1] < 2:
            picked = typical(x, labeled, more, draw)
        else:
            picked = least_margin(scores, labeled, more)
        labeled[picked] = True
        present, known = y[labeled].unique(return_inverse=True)
        if len(present) == 1:
            found.append((count, float((truth == present).float().mean())))
            continue
        features = x[labeled]
        strength = choose_strength(features, known, len(present))
        fit = fit_linear(features, known, len(present), strength=strength, tolerance=1e-4)
        scores = fit.scores(x)
        right = present[fit.scores(queries).argmax(1)] == truth
        found.append((count, float(right.float().mean())))
    return found


def least_margin(logits: Tensor, labeled: Tensor, count: int) -> Tensor:
    """Return the numbers of the `count` unlabeled images whose two best classes are closest: see RESULTS.md."""
    first, second = logits.float().softmax(1).topk(2).values.unbind(1)
    margin = (first - second).masked_fill(labeled, torch.inf)
    return margin.argsort(stable=True)[: min(count, int((~labeled).sum()))]


def rows_of(path: Path) -> list[tuple[str, ...]]:
    """Return the rows of the file in the order of COLUMNS."""
    with path.open(encoding="utf-8", newline="") as file:
        return [tuple(row[column] for column in COLUMNS) for row in csv.DictReader(file)]


def show(path: Path) -> list[str]:
    """Return the table of the file as Markdown."""
    points = defaultdict(list)
    for images, arm, _, labels, top1 in rows_of(path):
        points[images, int(labels), arm].append(float(top1))
    lines = []
    for images, labels in dict.fromkeys((images, labels) for images, labels, _ in points):
        base, *others = (points[images, labels, arm] for arm in ARMS)
        cells = [compared(base, other) for other in others]
        lines.append((images, str(labels), f"{sum(base) / len(base):.2f}", *cells))
    head = ("images", "labels", "random, %", "typical, less random, points (95 %)", "margin, less random")
    return ["\n".join(markdown(head, lines))]


def compared(base: Sequence[float], other: Sequence[float]) -> str:
    """Return the paired difference and its decision by the rules."""
    center, half = interval([y - x for x, y in zip(base, other, strict=True)])
    word = "better" if center - half > 0 else "worse" if center + half < 0 else "undecided"
    return f"{center:+.2f} ± {half:.2f}, {word}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    sub = parser.add_subparsers(dest="command", required=True)
    add = sub.add_parser("run")
    for name in ("pool_file", "test_file"):
        add.add_argument(name, type=Path)
    add.add_argument("--name", required=True)
    add.add_argument("--pool", type=int, required=True)
    add.add_argument("--output", type=Path, required=True)
    sub.add_parser("show").add_argument("points", type=Path)
    options = parser.parse_args()
    if options.command == "show":
        print("\n\n".join(show(options.points)))
    else:
        run(options.name, options.pool_file, options.test_file, options.pool, options.output)


if __name__ == "__main__":
    main()
