"""Recompute the tables and figures of README.md and RESULTS.md from committed numbers.

    python tools/results.py collect RUN_FOLDER ... --output docs/results/NAME/points.csv   # from runs to points
    python tools/results.py show docs/results/NAME/points.csv [--figure FILE.png]          # from points to the tables
    python tools/results.py small docs/results/NAME/points.csv  # from the points of `fastsuncet report` to the tables
    python tools/results.py runs docs/results/NAME/accuracies.csv   # from single runs to their table
    python tools/results.py demo docs/demo                      # from the files of `fastsuncet demo` to the tables

A run folder is named EXPERIMENT-METHOD-seedN. `collect` keeps the other points of its file, so that each run can be
collected when it ends. `make results` runs `show` for each experiment with rules, `small` for the others, and
`demo`; a test compares the output with the pages.
"""

import argparse
import csv
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import yaml

from fastsuncet.commands.report.compute_saved import percent, reached, savings
from fastsuncet.commands.report.curves import Curve, Group, Measurement, Panel, Point, arrange
from fastsuncet.commands.report.figures import COLORS, MARKERS
from fastsuncet.commands.report.tables import markdown
from fastsuncet.metrics.results import read_results
from fastsuncet.metrics.writer import csv_table

# labels: their number, of an experiment with several; evaluation: of EVALUATIONS; top1: %
COLUMNS = ("labels", "method", "seed", "evaluation", "updates", "petaflops", "top1")
BASELINE, METHOD = "SimCLR", "SimCLR + SuNCEt"
CROSS_ENTROPY, UNTRAINED = "SimCLR + cross-entropy", "untrained encoder"
ALONE = {"alone_cross_entropy": "labels alone, cross-entropy", "alone_suncet": "labels alone, SuNCEt"}
NAMES = ALONE | {
    "untrained": UNTRAINED,
    "simclr": BASELINE,
    "suncet": METHOD,
    "switched_off": f"{METHOD}, off after a fifth",
    "cross_entropy": CROSS_ENTROPY,
}
PAPERS_LR = 0.05  # of fine-tuning on CIFAR-10 (appendix B)
EVALUATIONS = {
    "finetune": f"fine-tuned at lr {PAPERS_LR}",
    "linear": "linear classifier, frozen encoder",
    "linear_auto": "linear classifier, strength chosen",
    "finetune_lr0.005": "fine-tuned at lr 0.005",
    "own": "its own classifier",
}
PAIRS = ((METHOD, BASELINE), (CROSS_ENTROPY, BASELINE), (CROSS_ENTROPY, METHOD), (BASELINE, UNTRAINED))


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
        {"finetune": range(3), "linear": range(3), "finetune_lr0.005": range(1, 4)},
    ),
}
FEW_LABELS = "cifar10-few-labels"
SEEDS, CHECKPOINTS, GATE_SEED = 5, 8, 100
NOT_REACHED = 1.5  # counts for r where a seed never has SimCLR's best accuracy
FIXED, PLATEAU = f"{METHOD}, off after 2 epochs", f"{METHOD}, off at a plateau"
ENDING = {"simclr": BASELINE, "fixed": FIXED, "plateau": PLATEAU}
RULES = {
    "final": "SimCLR's final accuracy, in % of its whole cost",
    "best": "SimCLR's best accuracy, in % of its own cost of that",
}
DIFFERENCE = "paired difference, points (95 %)"


def collect(runs: Sequence[Path], output: Path) -> None:
    """Add a row of COLUMNS to `output` for every top-1 result in the run folders: the mean of its draws of crops."""
    rows = {row[:-2]: row for row in rows_of(output)} if output.exists() else {}
    draws = defaultdict(list)
    for run in runs:
        named = re.fullmatch(r".*-([a-z_]+?)(?:_\d+labels)?(?:-seed\d+)?", run.name)
        if not named:
            raise SystemExit(f"{run} is not named EXPERIMENT-METHOD or EXPERIMENT-METHOD-seedN")
        # As text: the keys are those of the commit that made the run.
        seed = str(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["meta"]["seed"])
        for result in read_results(run):
            labels, cost = result["labels"], result["encoder"]["ledger"]
            count = str(labels["count"]) if labels["kind"] == "stratified" else ""
            point = (count, named[1], seed, evaluation(result), str(cost["updates"]))
            draws[point, str(cost["petaflops"])].append(result["metrics"]["top1"])
    for (point, cost), found in draws.items():
        rows[point] = (*point, cost, f"{100 * mean(found):.2f}")
    ordered = sorted(rows.values(), key=lambda r: (r[0].zfill(9), r[3], r[1], int(r[2]), int(r[4])))
    output.write_bytes(csv_table([COLUMNS, *ordered]))


def evaluation(result: Mapping) -> str:
    """Return the key of EVALUATIONS of a result."""
    kind, setting = result["kind"], result["setting"]
    if kind == "finetune" and setting["lr"] != PAPERS_LR:
        return f"finetune_lr{setting['lr']:g}"
    if kind == "linear" and setting["strength"] != 1:
        return f"linear_{setting['strength']}"
    return {"accuracy": "own", "npi": "own"}.get(kind, kind)


def rows_of(path: Path) -> list[tuple[str, ...]]:
    """Return the rows of a points.csv in the order of COLUMNS."""
    with path.open(encoding="utf-8", newline="") as file:
        return [tuple(row.get(column) or "" for column in COLUMNS) for row in csv.DictReader(file)]


def read(path: Path) -> dict[str, dict[str, Panel]]:
    """Return the panels of a points.csv by their number of labels, or "" for an experiment with one, and evaluation."""
    points = defaultdict(list)
    for labels, method, seed, kind, updates, cost, top1 in sorted(rows_of(path), key=lambda r: int(r[4])):
        point = Point(int(updates), {"petaflops": float(cost)}, {"top1": float(top1) / 100})
        points[Measurement(kind, labels), (NAMES | ENDING)[method], int(seed)].append(point)
    curves = [
        Curve("", method, seed, measurement, tuple(found), method != BASELINE)
        for (measurement, method, seed), found in sorted(points.items())
    ]
    panels: dict[str, dict[str, Panel]] = defaultdict(dict)
    for panel in arrange(curves):
        panels[panel.measurement.labels][panel.measurement.kind] = panel
    return panels


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


def saved(panel: Panel, method: str) -> list[str]:
    """Return the FLOPs until the baseline's accuracy by each rule of RULES, in words."""
    cells = []
    for rule in RULES:
        found = [
            s for s in savings(panel, "top1") if (s.method, s.cost, s.rule) == (method, "petaflops", rule)
        ]
        there, said = reached([s.shares and s.shares[0] for s in found])
        bound = "at most " if there and any(s.at_first for s in found) else ""
        cells.append(f"{bound}{percent(there, 0)}; {said}" if there else said)
    return cells


def show(path: Path) -> list[str]:
    """Return the tables of a points.csv beside rules.md as Markdown."""
    panels, name = read(path), path.parent.name
    if name == FEW_LABELS:
        return show_few_labels(panels)
    if PLATEAU in groups(panels[""]["linear"]):
        return show_plateau(panels[""]["linear"])
    return show_paired(panels[""], EXPERIMENTS[name].decided)


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


def last_step(panel: Panel, name: str) -> int:
    """Return the number of updates of the last checkpoint that all seeds of a method have."""
    return groups(panel)[name].common("top1")[-1].step or 0


def cells(panel: Panel, names: Sequence[str], methods: Sequence[str], step: int) -> list[str]:
    """Return the accuracy of each of `names` after `step` updates, and each of `methods` less SimCLR."""
    found = [list(shares(panel, name, step).values()) for name in names]
    row = [accuracy(each) if each else "" for each in found]
    return row + [difference_cell(*paired(panel, name, step)) for name in methods]


def difference_cell(base: Sequence[float], ours: Sequence[float]) -> str:
    """Return a paired difference in points in words."""
    if len(base) > 1:
        return "{:+.2f} ± {:.2f}".format(*difference(base, ours))
    return "".join(f"{100 * (y - x):+.2f}, one seed" for x, y in zip(base, ours))


def seeds_cell(found: Sequence[float]) -> str:
    """Return the accuracies of some seeds in words, with their number."""
    seeds = "1 seed" if len(found) == 1 else f"{len(found)} seeds"
    return f"{accuracy(found)}, {seeds}" if found else ""


def absolute(panels: Mapping[str, Panel], names: Sequence[str] = tuple(NAMES.values())) -> str:
    """Return the table of the accuracy of each method's last checkpoint, and of all of the labels alone."""
    rows = []
    for name in names:
        there = {kind: groups(panel)[name].curves for kind, panel in panels.items() if name in groups(panel)}
        steps: dict[int | None, float] = {None: 0.0} if there else {}  # of the labels alone, and their FLOPs
        if name in ALONE.values():
            points = (p for curves in there.values() for curve in curves for p in curve.points)
            steps = {p.step: p.costs["petaflops"] for p in points}
        for step, cost in sorted(steps.items(), key=lambda item: item[1]):
            found = {
                kind: shares(panels[kind], name, step or last_step(panels[kind], name)) for kind in there
            }
            whole = (
                next(iter(groups(next(iter(panels.values())))[BASELINE].curves)).points[-1].costs["petaflops"]
            )
            said = f", {step:,} updates: {100 * cost / whole:.0f} % of SimCLR's FLOPs" if step else ""
            rows.append([name + said, *(seeds_cell([*found.get(kind, {}).values()]) for kind in panels)])
    return "\n".join(markdown(["last checkpoint: top-1, %", *(EVALUATIONS[kind] for kind in panels)], rows))


def differences(panels: Mapping[str, Panel]) -> str:
    """Return the table of the paired differences of PAIRS, and of each method less the labels alone, of all seeds."""
    alone = [(ours, base) for ours in (METHOD, CROSS_ENTROPY) for base in ALONE.values()]
    rows = []
    for ours, base in (*PAIRS, *alone):
        row = []
        for panel in panels.values():
            there = [name for name in (base, ours) if name in groups(panel)]
            pair = [shares(panel, name, last_step(panel, name)) for name in there]
            complete = len(pair) == 2 and (base not in ALONE.values() or pair[0].keys() >= pair[1].keys())
            row.append(difference_cell(*by_seed(*pair)) if complete else "")
        if any(row):
            rows.append([f"{ours}, less {base}", *row])
    return "\n".join(markdown([DIFFERENCE, *(EVALUATIONS[kind] for kind in panels)], rows))


def sensitive(panel: Panel) -> bool:
    """Return whether an evaluation tells SimCLR from an untrained encoder: its gain's interval lies above 0."""
    if UNTRAINED not in groups(panel):
        return True
    center, half = difference_at_end(panel, UNTRAINED, BASELINE)
    return center > half


def decision_line(panel: Panel, step: int | None, seeds: range) -> str:
    """Return the decision on SuNCEt against SimCLR after `step` updates, on the `seeds` of the rules."""
    base, ours = paired(panel, METHOD, step, seeds)
    if len(base) < len(seeds):
        return f"Decision by the rule: none yet, {len(base)} of {len(seeds)} seeds."
    center, half = difference(base, ours)
    shown = f"{center:+.2f} ± {half:.2f} points, seeds {seeds[0]} to {seeds[-1]}"
    return f"Decision by the rule: **{decision(center, half)}**, {shown}."


def show_paired(panels: dict[str, Panel], decided: Mapping[str, range]) -> list[str]:
    """Return the tables of SimCLR against methods with labels: by updates, the last checkpoint, compute saved.

    Compute saved is shown for a `sensitive` evaluation only: elsewhere an untrained encoder reaches SimCLR's accuracy.
    """
    order = [*decided, *(kind for kind in EVALUATIONS if kind not in decided)]
    panels = {kind: panels[kind] for kind in order if kind in panels}
    tables, costs = [], []
    for kind, panel in panels.items():
        title, there = EVALUATIONS[kind], groups(panel)
        if BASELINE not in there:
            continue
        checkpoints = there[BASELINE].common("top1")
        methods = [name for name in (METHOD, CROSS_ENTROPY) if name in there]
        if len(checkpoints) > 1:
            trained = [BASELINE, *methods]
            wide = [DIFFERENCE if len(methods) == 1 else f"{name}: {DIFFERENCE}" for name in methods]
            head = ["updates", "petaFLOPs", *(f"{name}, %" for name in trained), *wide]
            rows = [
                [str(c.step), f"{c.costs['petaflops']:.5f}", *cells(panel, trained, methods, c.step or 0)]
                for c in checkpoints
            ]
            tables.append("\n".join(markdown(head, rows)))
            shown = methods if sensitive(panel) else ()
            costs += [[f"{name}, {title}", *saved(panel, name)] for name in shown]
        if kind in decided:
            line = decision_line(panel, checkpoints[-1].step, decided[kind])
            tables.append(f"{title[0].upper()}{title[1:]}. {line}")
    saving = "\n".join(markdown(["FLOPs until a method has", *RULES.values()], costs))
    return [*tables, absolute(panels), differences(panels), saving]


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
    paired, against = (
        "{:+.2f} ± {:.2f}".format(*difference_at_end(panel, *pair))
        for pair in ((FIXED, PLATEAU), (BASELINE, FIXED))
    )
    share = 100 * float(rows[1][2].split()[0]) / float(rows[0][2].split()[0])
    return [
        "\n".join(markdown(columns, rows)),
        f"Fixed end against SimCLR, paired (95 %): accuracy {against} points, with {share:.0f} % of its FLOPs.",
        f"Plateau against fixed end, paired (95 %): FLOPs {center:+.1f} ± {half:.1f} points of SimCLR's, "
        f"accuracy {paired} points.",
        f"Decision by the rule: **{decision_on_cost(center, half, most_arrived=most)}**.",
    ]


def best(
    panels: Mapping[str, Panel], name: str, kinds: Sequence[str] = ("own", "linear_auto", "finetune")
) -> dict:
    """Return each seed's best accuracy of a method over the checkpoints and evaluations."""
    found: dict[int | None, float] = defaultdict(float)
    for kind in kinds:
        for curve in (
            groups(panels[kind])[name].curves if kind in panels and name in groups(panels[kind]) else ()
        ):
            found[curve.seed] = max(found[curve.seed], *(p.metrics["top1"] for p in curve.points))
    return dict(found)


def show_gate(every: Mapping[str, Mapping[str, Panel]]) -> list[str]:
    """Return the table of what the unlabeled images add at each number of labels, with the gate's one seed."""
    kinds = ("own", "linear_auto", "finetune")
    rows = []
    for labels, panels in sorted(every.items(), key=lambda item: int(item[0])):
        tops = {name: best(panels, name).get(GATE_SEED) for name in (BASELINE, *ALONE.values())}
        for name in (BASELINE, *ALONE.values()):
            cells = [best(panels, name, [kind]).get(GATE_SEED) for kind in kinds]
            if any(cells):
                rows.append([labels, name, *(f"{100 * x:.2f}" if x else "" for x in cells), ""])
        alone = [tops[name] for name in ALONE.values()]
        if (top := tops[BASELINE]) and all(alone):
            rows[-1][-1] = f"{100 * (top - max(x for x in alone if x)):+.2f}"
    head = ["labels", "best checkpoint", *(f"{EVALUATIONS[kind]}, %" for kind in kinds)]
    return ["\n".join(markdown([*head, "the unlabeled images add, points"], rows))] if rows else []


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p values corrected by Holm's method, in the given order."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def p_value(values: Sequence[float]) -> float:
    """Return the two-sided p value of Student's t for a mean of 0."""
    from scipy.stats import t

    error = stdev(values) / len(values) ** 0.5
    if not error:
        return float(not any(values))
    return float(2 * t.sf(abs(mean(values)) / error, len(values) - 1))


def log_ratios(panel: Panel) -> list[float]:
    """Return, for each seed, log of the FLOPs until SimCLR's best accuracy over SimCLR's own FLOPs for it."""
    return [
        log(s.shares[0] if s.shares else NOT_REACHED)
        for s in savings(panel, "top1")
        if (s.method, s.cost, s.rule) == (METHOD, "petaflops", "best")
    ]


def decision_on_ratio(low: float, high: float) -> str:
    """Apply the rule of compute saved to the interval of r (docs/results/cifar10-few-labels/rules.md)."""
    if high < 0.8:
        return "confirmed, as large as in the paper"
    if high < 1:
        return "confirmed, by less than a tenth" if low > 0.9 else "confirmed"
    return "refuted" if low > 0.9 else "undecided"


def decision_on_losses(low: float, high: float) -> str:
    """Apply the rule of SuNCEt against cross-entropy to the interval of their difference in points."""
    if low > 0:
        return "better, by less than half a point" if high < 0.5 else "better"
    return "refuted" if high < 0.5 else "undecided"


def show_few_labels(every: Mapping[str, Mapping[str, Panel]]) -> list[str]:
    """Return the tables from few labels to many: the gate, accuracies, and the four decisions corrected by Holm."""
    gate = show_gate(
        {labels: only(panels, range(GATE_SEED, GATE_SEED + 1)) for labels, panels in every.items()}
    )
    runs = {labels: only(every[labels], range(SEEDS)) for labels in ("100", "500") if labels in every}
    trained = (BASELINE, METHOD, CROSS_ENTROPY)
    ended = [
        sum(len(curve.points) == CHECKPOINTS for curve in groups(panels[kind])[name].curves)
        if kind in panels and name in groups(panels[kind])
        else 0
        for panels in runs.values()
        for kind in ("finetune", "linear_auto")
        for name in trained
    ]
    if len(runs) < 2 or min(ended) < SEEDS:
        return [*gate, f"Decisions: none yet, {min(ended, default=0)} of {SEEDS} seeds."]
    tables = [f"{labels} labels:\n\n{absolute(panels, trained)}" for labels, panels in runs.items()]
    controls = [
        [f"{labels} labels", name, seeds_cell([*best(panels, name).values()])]
        for labels, panels in runs.items()
        for name in ALONE.values()
    ]
    tables.append("\n".join(markdown(["", "best checkpoint and evaluation", "top-1, %"], controls)))
    for kind in ("finetune", "linear_auto"):
        found, rows = [], []
        for panels in runs.values():
            ends = (
                shares(panels[kind], name, last_step(panels[kind], name)) for name in (CROSS_ENTROPY, METHOD)
            )
            points = [100 * (y - x) for x, y in zip(*by_seed(*ends))]
            found += [log_ratios(panels[kind]), points]
        corrected = holm([p_value(values) for values in found])
        for i, (values, p) in enumerate(zip(found, corrected)):
            center, half = interval(values)
            low, high = center - half, center + half
            if i % 2:
                shown, said = f"{center:+.2f} ± {half:.2f} points", decision_on_losses(low, high)
            else:
                low, high = exp(low), exp(high)
                shown, said = f"{exp(center):.2f} ({low:.2f} to {high:.2f})", decision_on_ratio(low, high)
            if said.startswith(("confirmed", "better")) and p >= 0.05:
                said = "undecided"
            what = "SuNCEt less cross-entropy" if i % 2 else "compute saved, r"
            decided = [f"{p:.3f}", f"**{said}**"] if kind == "finetune" else []
            rows.append([f"{list(runs)[i // 2]} labels: {what}", shown, *decided])
        heads = ["p, Holm", "decision by the rule"] if kind == "finetune" else []
        tables.append("\n".join(markdown([EVALUATIONS[kind], "mean (95 %)", *heads], rows)))
    return [*gate, *tables]


def only(panels: Mapping[str, Panel], seeds: range) -> dict[str, Panel]:
    """Return the panels with the curves of these seeds, without panels that have none."""
    found = arrange(
        curve for panel in panels.values() for g in panel.groups for curve in g.curves if curve.seed in seeds
    )
    return {panel.measurement.kind: panel for panel in found}


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
            shares.append([panel.measurement.labels, group.name, *saved(panel, group.name)])
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
    readme = [[name, percent(point.metrics["top1"])] for name, point in zip((BASELINE, METHOD), end)]
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
        "\n".join(markdown([head, "accuracy of a linear classifier on the labeled 10 %"], readme)),
        "\n".join(markdown(["updates", "gigaFLOPs", f"{BASELINE}, %", f"{METHOD}, %"], rows)),
        "\n".join(markdown(["seed", f"{BASELINE}, last", f"{METHOD}, last", *heads], seeds)),
    ]


def draw(points: Path, path: Path) -> None:
    """Draw accuracy against FLOPs: the mean of each method, its 95 % t interval, and each seed as a thin line.

    An evaluation of several checkpoints has a plot of its own.
    """
    from matplotlib.figure import Figure
    from matplotlib.transforms import ScaledTranslation

    panels, (title, labels, _) = read(points)[""], EXPERIMENTS[points.parent.name]
    shown = [
        kind
        for kind in EVALUATIONS
        if kind in panels
        and BASELINE in groups(panels[kind])
        and len(groups(panels[kind])[BASELINE].common("top1")) > 1
    ]
    figure = Figure(figsize=(6.4 if len(shown) == 1 else 9, 4.6), layout="constrained")
    seeds = len(groups(panels[shown[0]])[BASELINE].curves)
    figure.suptitle(f"{title}, {labels} of the labels, paired seeds: {seeds}", size=11)
    for axes, kind in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown):
        found = groups(panels[kind])
        names = [name for name in found if name != UNTRAINED and name not in ALONE.values()]
        for i, (name, color, marker, dashes) in enumerate(zip(names, COLORS, MARKERS, ("-", "--", ":"))):
            checkpoints = found[name].common("top1")
            x = [p.costs["petaflops"] * 1e3 for p in checkpoints]
            columns = [[100 * share for share in p.metrics["top1"]] for p in checkpoints]
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


def show_runs(path: Path) -> list[str]:
    """Return the table of a file of single runs as Markdown: its columns, as they are."""
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return ["\n".join(markdown([name.replace("_", " ") for name in head], rows))]


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
    five = commands.add_parser("runs", help="print the table of single runs")
    five.add_argument("accuracies", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "runs":
        print("\n\n".join(show_runs(arguments.accuracies)))
        return
    if arguments.command == "demo":
        print("\n\n".join(show_demo(read_demo(arguments.folder))))
        return
    if arguments.command == "small":
        print("\n\n".join(show_small(read_report(arguments.points))))
        return
    if arguments.command == "collect":
        collect(arguments.runs, arguments.output)
        return
    print("\n\n".join(show(arguments.points)))
    if arguments.figure and arguments.points.parent.name != FEW_LABELS:
        draw(arguments.points, arguments.figure)


if __name__ == "__main__":
    main()
