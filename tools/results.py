"""Recompute the table and the figure of a paired experiment in RESULTS.md from its committed points.

    python tools/results.py collect RUN_FOLDER ... --output docs/results/NAME/points.csv   # from runs to points
    python tools/results.py show docs/results/NAME/points.csv [--figure FILE.png]          # from points to the table

A run folder is named EXPERIMENT-METHOD-seedN. `make results` runs `show` for each experiment; a test compares
its output with RESULTS.md.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import mean, stdev

from fastsuncet.commands.report.compute_saved import crossing
from fastsuncet.metrics.results import read_results

# Two-sided 95 % quantiles of Student's t by degrees of freedom (pairs - 1); NIST/SEMATECH e-Handbook, 1.3.6.7.2.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
BASELINE, METHOD, CONTROL = "simclr", "suncet", "untrained"
NAMES = {BASELINE: "SimCLR", METHOD: "SimCLR + SuNCEt", CONTROL: "untrained encoder"}


@dataclass(frozen=True)
class Point:
    method: str
    seed: int
    evaluation: str  # linear or finetune
    updates: int
    petaflops: float
    top1: float  # %


def collect(runs: Sequence[Path]) -> list[Point]:
    """Return every top-1 result in the run folders."""
    points = []
    for run in runs:
        _, method, seed = run.name.rsplit("-", 2)
        for result in read_results(run):
            cost = result["encoder"]["ledger"]
            top1 = round(100 * result["metrics"]["top1"], 2)
            number = int(seed.removeprefix("seed"))
            points.append(Point(method, number, result["kind"], cost["updates"], cost["petaflops"], top1))
    return sorted(points, key=lambda p: (p.evaluation, p.method, p.seed, p.updates))


def read(path: Path) -> list[Point]:
    with path.open(newline="") as file:
        return [
            Point(
                r["method"],
                int(r["seed"]),
                r["evaluation"],
                int(r["updates"]),
                float(r["petaflops"]),
                float(r["top1"]),
            )
            for r in csv.DictReader(file)
        ]


def write(path: Path, points: Sequence[Point]) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(field.name for field in fields(Point))
        rows.writerows(astuple(point) for point in points)


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences and the half width of its 95 % t interval."""
    n = len(differences)
    return mean(differences), T95[n - 1] * stdev(differences) / n**0.5


def spread(values: Sequence[float]) -> str:
    """Return the mean of some accuracies with their range."""
    return f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def cost_to_reach(curve: Sequence[Point], target: float) -> float | None:
    """Return the petaFLOPs at which a curve first has `target`, between checkpoints on straight lines; or None."""
    return crossing([p.petaflops for p in curve], [p.top1 for p in curve], target, linear=True)


def decision(center: float, half: float) -> str:
    """Apply the rule that was written before the runs: supported above 0, refuted below +1 point."""
    supported, refuted = center - half > 0, center + half < 1
    if supported and refuted:
        return "supported, and smaller than one point"
    return "supported" if supported else "refuted" if refuted else "undecided"


def curves(points: Sequence[Point], evaluation: str, method: str) -> dict[int, list[Point]]:
    """Return the curve of each seed, by updates."""
    by_seed = defaultdict(list)
    for p in sorted(points, key=lambda p: p.updates):
        if (p.evaluation, p.method) == (evaluation, method):
            by_seed[p.seed].append(p)
    return dict(by_seed)


def saved(base: dict[int, list[Point]], ours: dict[int, list[Point]]) -> list[str]:
    """Return one row for each rule of compute saved."""
    final, best = [], []
    for seed, curve in base.items():
        top = max(p.top1 for p in curve)
        final.append((cost_to_reach(ours[seed], curve[-1].top1), curve[-1].petaflops))
        best.append((cost_to_reach(ours[seed], top), cost_to_reach(curve, top)))
    rows = []
    for rule, pairs in (
        ("SimCLR's final accuracy, in % of its whole cost", final),
        ("SimCLR's best accuracy, in % of its own cost of that", best),
    ):
        shares = [100 * cost / whole for cost, whole in pairs if cost is not None and whole]
        reached = f"{len(shares)} of {len(pairs)} seeds reached it"
        most = 2 * len(shares) > len(pairs)
        percent = f"{mean(shares):.0f} % ({min(shares):.0f} to {max(shares):.0f}); " if most else ""
        rows.append(f"| {rule} | {percent}{reached} |")
    return rows


def show(points: Sequence[Point]) -> str:
    """Return the tables of a paired experiment as Markdown."""
    base, ours = curves(points, "linear", BASELINE), curves(points, "linear", METHOD)
    seeds = sorted(base)
    lines = [
        f"| updates | petaFLOPs | {NAMES[BASELINE]}, % | {NAMES[METHOD]}, % | paired difference, points (95 %) |",
        "|---:|---:|---:|---:|---:|",
    ]
    for i, at in enumerate(base[seeds[0]]):
        a, b = ([by_seed[s][i].top1 for s in seeds] for by_seed in (base, ours))
        center, half = interval([y - x for x, y in zip(a, b)])
        lines.append(
            f"| {at.updates} | {at.petaflops:.5f} | {spread(a)} | {spread(b)} | {center:+.2f} ± {half:.2f} |"
        )
    lines += [
        "",
        f"Decision by the rule: **{decision(center, half)}**.",
        "",
        "| FLOPs until SimCLR + SuNCEt has | mean (lowest to highest) |",
        "|---|---:|",
        *saved(base, ours),
    ]
    lines += [
        "",
        "| evaluation of the last checkpoint | "
        + " | ".join(f"{NAMES[m]}, %" for m in NAMES)
        + " | paired difference, points (95 %) |",
        "|---|---:|---:|---:|---:|",
    ]
    for evaluation, title in (("linear", "linear classifier, frozen encoder"), ("finetune", "fine-tuned")):
        last = {
            m: [curve[-1].top1 for _, curve in sorted(curves(points, evaluation, m).items())] for m in NAMES
        }
        center, half = interval([y - x for x, y in zip(last[BASELINE], last[METHOD])])
        cells = " | ".join(map(spread, last.values()))
        lines.append(f"| {title} | {cells} | {center:+.2f} ± {half:.2f} |")
    return "\n".join(lines)


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw accuracy against FLOPs: the mean of each method, its 95 % t interval, and each seed as a thin line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4))
    for method, style in (
        (BASELINE, {"color": "#0072b2", "marker": "o", "ls": "-"}),
        (METHOD, {"color": "#d55e00", "marker": "s", "ls": "--"}),
    ):
        by_seed = curves(points, "linear", method)
        x = [p.petaflops * 1e3 for p in next(iter(by_seed.values()))]
        columns = list(zip(*([p.top1 for p in curve] for curve in by_seed.values())))
        for curve in by_seed.values():
            axes.plot(x, [p.top1 for p in curve], color=style["color"], lw=0.6, alpha=0.45)
        means, halves = zip(*(interval(column) for column in columns))
        axes.errorbar(x, means, yerr=halves, label=NAMES[method], capsize=3, lw=1.8, **style)
    axes.set(
        xlabel="pre-training compute, teraFLOPs (6 x MAC a view)",
        ylabel="test accuracy of a linear classifier\non 10 % of the labels, %",
    )
    axes.set_title("CIFAR-10 at 16 pixels, five paired seeds")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect", help="write the points of run folders")
    one.add_argument("runs", type=Path, nargs="+")
    one.add_argument("--output", type=Path, required=True)
    two = commands.add_parser("show", help="print the tables of points, and draw the figure")
    two.add_argument("points", type=Path)
    two.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "collect":
        write(arguments.output, collect(arguments.runs))
        return
    points = read(arguments.points)
    print(show(points))
    if arguments.figure:
        draw(points, arguments.figure)


if __name__ == "__main__":
    main()
