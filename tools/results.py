"""Recompute the tables and figures of README.md and RESULTS.md from committed numbers.

    python tools/results.py collect RUN_FOLDER ... --output docs/results/NAME/points.csv   # from runs to points
    python tools/results.py show docs/results/NAME/points.csv [--figure FILE.png]          # from points to the tables
    python tools/results.py small docs/results/NAME/points.csv  # from the points of `fastsuncet report` to the tables
    python tools/results.py demo docs/demo                      # from the files of `fastsuncet demo` to the tables

A run folder is named EXPERIMENT-METHOD-seedN. `make results` runs `show` for each experiment with rules, `small` for
the others, and `demo`; a test compares the output with the pages.
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from fastsuncet.commands.report.compute_saved import percent, reached, savings
from fastsuncet.commands.report.curves import Curve, Group, Measurement, Panel, Point, arrange
from fastsuncet.commands.report.figures import COLORS, MARKERS
from fastsuncet.commands.report.tables import markdown
from fastsuncet.metrics.results import read_results
from fastsuncet.metrics.writer import csv_table

# evaluation: of EVALUATIONS; top1: %
COLUMNS = ("method", "seed", "evaluation", "updates", "petaflops", "top1")
BASELINE, METHOD = "SimCLR", "SimCLR + SuNCEt"
CROSS_ENTROPY, UNTRAINED = "SimCLR + cross-entropy", "untrained encoder"
NAMES = {"simclr": BASELINE, "suncet": METHOD, "cross_entropy": CROSS_ENTROPY, "untrained": UNTRAINED}
PAPERS_LR = 0.05  # of fine-tuning on CIFAR-10 (appendix B)
EVALUATIONS = {
    "linear": "linear classifier, frozen encoder",
    "finetune": f"fine-tuned at lr {PAPERS_LR}",
    "finetune_lr0.005": "fine-tuned at lr 0.005",
}


class Experiment(NamedTuple):
    """What its rules.md says."""

    title: str
    labels: str  # their share
    decided: dict[str, range]  # evaluation -> the seeds that decide


EXPERIMENTS = {
    "cifar10-16px": Experiment("CIFAR-10 at 16 pixels", "10 %", {"linear": range(5)}),
    "cifar10-plateau": Experiment("CIFAR-10 at 16 pixels", "10 %", {}),
    "cifar10-32px": Experiment(
        "CIFAR-10 at 32 pixels",
        "2 %",
        {"linear": range(3), "finetune": range(3), "finetune_lr0.005": range(1, 4)},
    ),
}
FIXED, PLATEAU = f"{METHOD}, off after 2 epochs", f"{METHOD}, off at a plateau"
ENDING = {"simclr": BASELINE, "fixed": FIXED, "plateau": PLATEAU}
RULES = {
    "final": "SimCLR's final accuracy, in % of its whole cost",
    "best": "SimCLR's best accuracy, in % of its own cost of that",
}
DIFFERENCE = "paired difference, points (95 %)"


def collect(runs: Sequence[Path]) -> list[tuple]:
    """Return a row of COLUMNS for every top-1 result in the run folders."""
    rows = []
    for run in runs:
        _, method, seed = run.name.rsplit("-", 2)
        for result in read_results(run):
            cost = result["encoder"]["ledger"]
            top1 = round(100 * result["metrics"]["top1"], 2)
            number, kind = int(seed.removeprefix("seed")), result["kind"]
            if kind == "finetune" and result["setting"]["lr"] != PAPERS_LR:
                kind += f"_lr{result['setting']['lr']:g}"
            rows.append((method, number, kind, cost["updates"], cost["petaflops"], top1))
    return sorted(rows, key=lambda row: (row[2], row[0], row[1], row[3]))


def read(path: Path) -> dict[str, Panel]:
    """Return the panels of a points.csv by their evaluation, linear or finetune."""
    points = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        for r in sorted(csv.DictReader(file), key=lambda r: int(r["updates"])):
            point = Point(
                int(r["updates"]), {"petaflops": float(r["petaflops"])}, {"top1": float(r["top1"]) / 100}
            )
            points[r["evaluation"], (NAMES | ENDING)[r["method"]], int(r["seed"])].append(point)
    curves = [
        Curve("", method, seed, Measurement(kind, ""), tuple(found), method != BASELINE)
        for (kind, method, seed), found in sorted(points.items())
    ]
    return {panel.measurement.kind: panel for panel in arrange(curves)}


def read_report(path: Path) -> list[Panel]:
    """Return the panels of fine-tuning in a points.csv of `fastsuncet report`, one for each share of labels."""
    points = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        for r in csv.DictReader(file):
            if r["evaluation"] == "finetune":
                point = Point(
                    int(r["step"]), {"petaflops": float(r["petaflops"])}, {"top1": float(r["top1"])}
                )
                points[r["labels"], r["method"], int(r["seed"])].append(point)
    return arrange(
        Curve("", method, seed, Measurement("finetune", labels), tuple(found), method != BASELINE)
        for (labels, method, seed), found in points.items()
    )


def groups(panel: Panel) -> dict[str, Group]:
    """Return the groups of a panel by their names."""
    return {group.name: group for group in panel.groups}


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences and the half width of its 95 % t interval."""
    from scipy.stats import t  # importing it takes more than a second

    n = len(differences)
    return mean(differences), float(t.ppf(0.975, n - 1)) * stdev(differences) / n**0.5


def decision(center: float, half: float) -> str:
    """Apply the rule that was written before the runs: supported above 0, refuted below +1 point."""
    supported, refuted = center - half > 0, center + half < 1
    if supported and refuted:
        return "supported, and smaller than one point"
    return "supported" if supported else "refuted" if refuted else "undecided"


def difference(base: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """Return the paired difference of shares in points, and the half width of its interval."""
    return interval([100 * (y - x) for x, y in zip(base, ours, strict=True)])


def accuracy(shares: Sequence[float]) -> str:
    """Return the mean of some accuracies in %, with their range."""
    return percent(shares, 2, unit="")


def saved(panel: Panel, *, linear: bool, method: str = METHOD) -> list[str]:
    """Return the FLOPs until the baseline's accuracy by each rule of RULES, in words."""
    cells = []
    for rule in RULES:
        found = [
            s for s in savings(panel, "top1") if (s.method, s.cost, s.rule) == (method, "petaflops", rule)
        ]
        there, said = reached([s.shares and s.shares[0 if linear else 1] for s in found])
        bound = "at most " if there and any(s.at_first for s in found) else ""
        cells.append(f"{bound}{percent(there, 0)}; {said}" if there else said)
    return cells


def show(path: Path) -> list[str]:
    """Return the tables of a points.csv beside rules.md as Markdown."""
    panels = read(path)
    if PLATEAU in groups(panels["linear"]):
        return show_plateau(panels["linear"])
    return show_paired(panels, EXPERIMENTS[path.parent.name].decided)


def shares(panel: Panel, name: str, step: int | None) -> dict[int | None, float]:
    """Return the accuracy of each seed of a method after `step` updates; the untrained encoder has only one."""
    curves = groups(panel)[name].curves if name in groups(panel) else ()
    return {
        curve.seed: point.metrics["top1"]
        for curve in curves
        for point in curve.points
        if point.step == step or name == UNTRAINED
    }


def paired(
    panel: Panel, name: str, step: int | None, only: range | None = None
) -> tuple[list[float], list[float]]:
    """Return the accuracies of SimCLR and of a method after `step` updates, of the seeds that both have."""
    base, ours = shares(panel, BASELINE, step), shares(panel, name, step)
    return by_seed({seed: x for seed, x in base.items() if only is None or seed in only}, ours)


def by_seed(
    base: Mapping[int | None, float], ours: Mapping[int | None, float]
) -> tuple[list[float], list[float]]:
    """Return the values of the seeds that both have, in the same order."""
    seeds = [seed for seed in base if seed in ours]
    return [base[seed] for seed in seeds], [ours[seed] for seed in seeds]


def difference_at_end(panel: Panel, *names: str) -> tuple[float, float]:
    """Return the paired difference of two methods, each at the last checkpoint that all its seeds have."""
    steps = (groups(panel)[name].common("top1")[-1].step for name in names)
    return difference(*by_seed(*(shares(panel, name, step) for name, step in zip(names, steps))))


def cells(panel: Panel, names: Sequence[str], methods: Sequence[str], step: int | None) -> list[str]:
    """Return the accuracy of each of `names` after `step` updates, and the paired difference of each of `methods`."""
    found = [list(shares(panel, name, step).values()) for name in names]
    row = [accuracy(each) if each else "" for each in found]
    for base, ours in (paired(panel, name, step) for name in methods):
        one = "".join(f"{100 * (y - x):+.2f}, one seed" for x, y in zip(base, ours))
        row.append("{:+.2f} ± {:.2f}".format(*difference(base, ours)) if len(base) > 1 else one)
    return row


def decision_line(panel: Panel, step: int | None, seeds: range) -> str:
    """Return the decision on SuNCEt against SimCLR after `step` updates, on the `seeds` of the rules."""
    base, ours = paired(panel, METHOD, step, seeds)
    if len(base) < len(seeds):
        return f"Decision by the rule: none yet, {len(base)} of {len(seeds)} seeds."
    center, half = difference(base, ours)
    shown = f"{center:+.2f} ± {half:.2f} points, seeds {seeds[0]} to {seeds[-1]}"
    return f"Decision by the rule: **{decision(center, half)}**, {shown}."


def show_paired(panels: dict[str, Panel], decided: Mapping[str, range]) -> list[str]:
    """Return the tables of SimCLR against methods with labels: by updates, the last checkpoint, compute saved."""
    tables, ends, costs = [], [], []
    names = [name for name in NAMES.values() if name in groups(panels["linear"])]
    trained = [name for name in names if name != UNTRAINED]
    methods = [name for name in trained if name != BASELINE]
    differences = [DIFFERENCE if len(methods) == 1 else f"{name}: {DIFFERENCE}" for name in methods]
    for kind, title in EVALUATIONS.items():
        if kind not in panels:
            continue
        panel = panels[kind]
        checkpoints = groups(panel)[BASELINE].common("top1")
        last = checkpoints[-1].step
        if len(checkpoints) > 1:
            head = ["updates", "petaFLOPs", *(f"{name}, %" for name in trained), *differences]
            rows = [
                [str(c.step), f"{c.costs['petaflops']:.5f}", *cells(panel, trained, methods, c.step)]
                for c in checkpoints
            ]
            tables.append("\n".join(markdown(head, rows)))
            there = [name for name in methods if name in groups(panel)]
            costs += [[f"{name}, {title}", *saved(panel, linear=True, method=name)] for name in there]
        if kind in decided:
            tables.append(f"{title[0].upper()}{title[1:]}. {decision_line(panel, last, decided[kind])}")
        ends.append([title, *cells(panel, names, methods, last)])
    head = ["evaluation of the last checkpoint", *(f"{name}, %" for name in names), *differences]
    return [
        *tables,
        "\n".join(markdown(head, ends)),
        "\n".join(markdown(["FLOPs until a method has", *RULES.values()], costs)),
    ]


def costs(panel: Panel, method: str) -> dict[int | None, tuple[float, bool]]:
    """Return, for each seed, the FLOPs until SimCLR's final accuracy as a share of SimCLR's, and whether it got there.

    A seed that did not counts with all its FLOPs (docs/results/cifar10-plateau/rules.md).
    """
    whole = {curve.seed: curve.points[-1].costs["petaflops"] for curve in groups(panel)[method].curves}
    base = {curve.seed: curve.points[-1].costs["petaflops"] for curve in groups(panel)[BASELINE].curves}
    return {
        s.seed: (s.shares[0] if s.shares else whole[s.seed] / base[s.seed], s.shares is not None)
        for s in savings(panel, "top1")
        if (s.method, s.cost, s.rule) == (method, "petaflops", "final") and s.seed is not None
    }


def decision_on_cost(center: float, half: float, *, most_arrived: bool) -> str:
    """Apply the rule of the plateau: supported below +10 points of SimCLR's FLOPs, refuted above 0."""
    supported, refuted = center + half < 10, center - half > 0
    if not most_arrived or not (supported or refuted):
        return "undecided"
    if supported and refuted:
        return "it saves less, by under 10 points"
    return "supported" if supported else "refuted"


def show_plateau(panel: Panel) -> list[str]:
    """Return the table of a plateau's experiment as Markdown, and the decision."""
    rows = []
    for name in ENDING.values():
        end = groups(panel)[name].common("top1")[-1]
        spent = [curve.points[-1].costs["petaflops"] for curve in groups(panel)[name].curves]
        flops = f"{mean(spent):.5f} ({min(spent):.5f} to {max(spent):.5f})"
        rows.append([name, str(end.step), flops, accuracy(end.metrics["top1"]), ""])
        if name != BASELINE:
            found = costs(panel, name).values()
            arrived = sum(there for _, there in found)
            rows[-1][-1] = f"{percent([c for c, _ in found], 0)}; {arrived} of {len(found)} seeds reached it"
    fixed, plateau = costs(panel, FIXED), costs(panel, PLATEAU)
    center, half = difference(
        *by_seed(*({seed: c for seed, (c, _) in found.items()} for found in (fixed, plateau)))
    )
    most = all(2 * sum(there for _, there in found.values()) > len(found) for found in (fixed, plateau))
    columns = ["method", "updates", "petaFLOPs", "top-1, %, last checkpoint", f"FLOPs until {RULES['final']}"]
    paired = "{:+.2f} ± {:.2f}".format(*difference_at_end(panel, FIXED, PLATEAU))
    return [
        "\n".join(markdown(columns, rows)),
        f"Plateau against fixed end, paired (95 %): FLOPs {center:+.1f} ± {half:.1f} points of SimCLR's, "
        f"accuracy {paired} points.",
        f"Decision by the rule: **{decision_on_cost(center, half, most_arrived=most)}**.",
    ]


def show_small(panels: Sequence[Panel]) -> list[str]:
    """Return the tables of fine-tuned accuracies, and of compute until the baseline's, as Markdown."""
    ends, shares = [], []
    for panel in panels:
        base, *others = panel.groups
        end = base.common("top1")[-1]
        cost, top1 = end.costs["petaflops"], end.metrics["top1"]
        ends.append([panel.measurement.labels, base.name, "100", percent(top1, unit=""), ""])
        for group in others:
            ours = group.common("top1")[-1]
            found = ours.metrics["top1"]
            flops = f"{100 * ours.costs['petaflops'] / cost:.0f}"
            paired = "{:+.1f} ± {:.1f}".format(*difference_at_end(panel, base.name, group.name))
            ends.append(["", group.name, flops, percent(found, unit=""), paired])
            shares.append(
                [panel.measurement.labels, group.name, *saved(panel, linear=True, method=group.name)]
            )
    columns = ["labels", "method", "FLOPs, % of SimCLR's", "top-1, %, fine-tuned", DIFFERENCE]
    heads = [f"FLOPs until {words}" for words in RULES.values()]
    return ["\n".join(markdown(columns, ends)), "\n".join(markdown(["labels", "method", *heads], shares))]


def read_demo(folder: Path) -> Panel:
    """Return the numbers that `fastsuncet demo` wrote, demo_seedN.json."""
    curves = []
    for path in sorted(folder.glob("demo_seed*.json")):
        for method, run in json.loads(path.read_text(encoding="utf-8")).items():
            rows = zip(run["updates"], run["petaflops"], run["accuracy"])
            points = tuple(Point(step, {"petaflops": cost}, {"top1": top1}) for step, cost, top1 in rows)
            seed = int(path.stem.removeprefix("demo_seed"))
            curves.append(Curve("", method, seed, Measurement("linear", ""), points, method != BASELINE))
    (panel,) = arrange(curves)
    return panel


def show_demo(panel: Panel) -> list[str]:
    """Return the demo's tables as Markdown: README's, that of all checkpoints, that of each seed."""
    base, ours = (groups(panel)[name] for name in (BASELINE, METHOD))
    heads = [f"FLOPs until {words}" for words in RULES.values()]
    checkpoints = list(zip(base.common("top1"), ours.common("top1")))
    end = checkpoints[-1]
    readme = [
        [name, percent(point.metrics["top1"]), *cells]
        for name, point, cells in zip((BASELINE, METHOD), end, (["", ""], saved(panel, linear=False)))
    ]
    head = f"after {end[0].step} updates, {1e6 * end[0].costs['petaflops']:.0f} gigaFLOPs"
    rows = [
        [
            f"{a.step}",
            f"{1e6 * a.costs['petaflops']:.1f}",
            *(percent(p.metrics["top1"], unit="") for p in (a, b)),
        ]
        for a, b in checkpoints
    ]
    seeds = []
    for a, b in zip(base.curves, ours.curves):
        last = [f"{100 * curve.points[-1].metrics['top1']:.1f}" for curve in (a, b)]
        own = [s for s in savings(panel, "top1") if s.seed == a.seed]
        seeds.append([str(a.seed), *last, *(percent([s.shares[1]], 0) if s.shares else "never" for s in own)])
    return [
        "\n".join(markdown([head, "accuracy of a linear classifier on the labeled 10 %", *heads], readme)),
        "\n".join(markdown(["updates", "gigaFLOPs", f"{BASELINE}, %", f"{METHOD}, %"], rows)),
        "\n".join(markdown(["seed", f"{BASELINE}, last", f"{METHOD}, last", *heads], seeds)),
    ]


def draw(points: Path, path: Path) -> None:
    """Draw accuracy against FLOPs: the mean of each method, its 95 % t interval, and each seed as a thin line.

    An evaluation of several checkpoints has a plot of its own.
    """
    from matplotlib.figure import Figure
    from matplotlib.transforms import ScaledTranslation

    panels, (title, labels, _) = read(points), EXPERIMENTS[points.parent.name]
    shown = [k for k in EVALUATIONS if k in panels and len(groups(panels[k])[BASELINE].common("top1")) > 1]
    figure = Figure(figsize=(6.4 if len(shown) == 1 else 9, 4.6), layout="constrained")
    seeds = len(groups(panels[shown[0]])[BASELINE].curves)
    figure.suptitle(f"{title}, {labels} of the labels, paired seeds: {seeds}", size=11)
    for axes, kind in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown):
        found = groups(panels[kind])
        names = [name for name in found if name != UNTRAINED]
        for i, (name, color, marker, dashes) in enumerate(zip(names, COLORS, MARKERS, ("-", "--", ":"))):
            points = found[name].common("top1")
            x = [p.costs["petaflops"] * 1e3 for p in points]
            columns = [[100 * share for share in p.metrics["top1"]] for p in points]
            axes.plot(x, columns, color=color, lw=0.6, alpha=0.45)
            means = [mean(column) for column in columns]
            halves = [interval(column)[1] if len(column) > 1 else 0.0 for column in columns]
            # Moved by two points, so that no interval hides another.
            aside = axes.transData + ScaledTranslation(2 * i / 72, 0, figure.dpi_scale_trans)
            style = {"capsize": 3, "lw": 1.8, "color": color, "marker": marker, "ls": dashes}
            axes.errorbar(x, means, yerr=halves, label=name, transform=aside, **style)
            for sign in (-1, 1):  # the limits of the axes follow only what is drawn in its own place
                axes.update_datalim([(c, m + sign * half) for c, m, half in zip(x, means, halves)])
        axes.autoscale_view()
        axes.set_title(EVALUATIONS[kind], size=10)
        axes.set(xlabel="pre-training compute, teraFLOPs (6 x MAC a view)", ylabel="test accuracy, %")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    lines = figure.axes[0].get_legend_handles_labels()
    figure.legend(*lines, frameon=False, loc="outside lower center", ncols=1 + len(shown))
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
    three = commands.add_parser("small", help="print the tables of the points of a report")
    three.add_argument("points", type=Path)
    four = commands.add_parser("demo", help="print the tables of the demo")
    four.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "demo":
        print("\n\n".join(show_demo(read_demo(arguments.folder))))
        return
    if arguments.command == "small":
        print("\n\n".join(show_small(read_report(arguments.points))))
        return
    if arguments.command == "collect":
        arguments.output.write_bytes(csv_table([COLUMNS, *collect(arguments.runs)]))
        return
    print("\n\n".join(show(arguments.points)))
    if arguments.figure:
        draw(arguments.points, arguments.figure)


if __name__ == "__main__":
    main()
