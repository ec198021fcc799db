"""Recompute the tables and figures of README.md and RESULTS.md from committed numbers.

    python tools/results.py collect RUN_FOLDER ... --output docs/results/NAME/points.csv   # from runs to points
    python tools/results.py show docs/results/NAME/points.csv [--figure FILE.png]          # from points to the tables
    python tools/results.py runs docs/results/NAME/accuracies.csv   # from single runs to their table
    python tools/results.py suggestions docs/results/suggestions/accuracies.csv
    python tools/results.py demo docs/demo                      # from the files of `fastsuncet demo` to the tables

A run folder is named EXPERIMENT-METHOD-seedN. `collect` keeps the other points of its file, so that each run can be
collected when it ends. `make results` runs `show` for each experiment, and the rest; a test compares the output with
the pages.
"""

import argparse
import csv
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import yaml

from fastsuncet.commands.report.compute_saved import cell, percent, savings
from fastsuncet.commands.report.curves import Curve, Measurement, Panel, Point, arrange
from fastsuncet.commands.report.figures import COLORS, DASHES, MARKERS
from fastsuncet.commands.report.tables import markdown
from fastsuncet.metrics.results import read_results
from fastsuncet.metrics.writer import csv_table

# labels: their number, of an experiment with several; evaluation: of EVALUATIONS; top1: %
COLUMNS = ("labels", "method", "seed", "evaluation", "updates", "petaflops", "top1")
BASELINE, METHOD = "SimCLR", "SimCLR + SuNCEt"
CROSS_ENTROPY, UNTRAINED = "SimCLR + cross-entropy", "untrained encoder"
ALONE = {"alone_cross_entropy": "labels alone, cross-entropy", "alone_suncet": "labels alone, SuNCEt"}
PEERS = {"lightly": "lightly-train's SimCLR", "timm": "timm's parts on the labels alone"}
VARIANTS = {"start": "started from CIFAR-10", "head": "with a head of 2,048 and 128"}  # of a method
METHODS = (
    ALONE
    | PEERS
    | {
        "untrained": UNTRAINED,
        "simclr": BASELINE,
        "suncet": METHOD,
        "switched_off": f"{METHOD}, off after a fifth",
        "cross_entropy": CROSS_ENTROPY,
        "paws": "PAWS + SuNCEt",
    }
)
NAMES = METHODS | {
    f"{variant}_{key}": f"{name}, {words}"
    for variant, words in VARIANTS.items()
    for key, name in METHODS.items()
}
PAPERS_LR = 0.05  # of fine-tuning on CIFAR-10 (appendix B)
EVALUATIONS = {
    "finetune": f"fine-tuned at lr {PAPERS_LR}",
    "linear": "linear classifier, frozen encoder",
    "linear_auto": "linear classifier, strength chosen",
    "finetune_lr0.005": "fine-tuned at lr 0.005",
    "finetune_linear": "fine-tuned from the linear classifier",
    "own": "its own classifier",
}
WITH_LABELS = [METHODS[key] for key in ("suncet", "cross_entropy", "switched_off", "paws")]
PAIRS = (
    *((name, BASELINE) for name in WITH_LABELS),
    *((name, METHOD) for name in WITH_LABELS[1:]),
    (BASELINE, UNTRAINED),
    *((name, control) for name in WITH_LABELS for control in ALONE.values()),
)


class Experiment(NamedTuple):
    """What its rules.md says."""

    title: str
    labels: str  # how many
    decided: dict[str, range]  # evaluation -> the seeds that decide


FEW_LABELS, PHOTOS = "cifar10-few-labels", "clothing-photos"
EXPERIMENTS = {
    "cifar10-16px": Experiment("CIFAR-10 at 16 pixels", "10 % of the labels", {"linear": range(5)}),
    "cifar10-plateau": Experiment("CIFAR-10 at 16 pixels", "10 % of the labels", {}),
    "cifar10-32px": Experiment(
        "CIFAR-10 at 32 pixels",
        "2 % of the labels",
        {"finetune": range(3), "linear": range(3), "finetune_lr0.005": range(1, 4)},
    ),
    FEW_LABELS: Experiment("CIFAR-10 at 16 pixels", "100 and 500 labels", {}),
}
SEEDS, CHECKPOINTS, HELD_OUT_SEED = 5, 8, 100  # the last: runs that are measured on held-out training images
NOT_REACHED = 1.5  # counts for r where a seed never has SimCLR's best accuracy
FIXED, PLATEAU = f"{METHOD}, off after 2 epochs", f"{METHOD}, off at a plateau"
ENDING = {"simclr": BASELINE, "fixed": FIXED, "plateau": PLATEAU}
RULES = {
    "final": "SimCLR's final accuracy, in % of its whole cost",
    "best": "SimCLR's best accuracy, in % of its own cost of that",
}
UNTIL = [f"FLOPs until {words}" for words in RULES.values()]
DIFFERENCE = "paired difference, points (95 %)"
ARMS = ("random", "typical", "margin")  # of the suggestions
Shares = dict[int | None, float]  # seed -> accuracy, 0 to 1


# ------------------------------------------------------------------------------------------------ points and seeds
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
    if kind == "finetune" and setting.get("head") == "linear":
        return "finetune_linear"
    if kind == "finetune" and setting["lr"] != PAPERS_LR:
        return f"finetune_lr{setting['lr']:g}"
    if kind == "linear" and setting["strength"] != 1:
        return f"linear_{setting['strength']}"
    return {"accuracy": "own", "npi": "own"}.get(kind, kind)


def rows_of(path: Path, columns: Sequence[str] = COLUMNS) -> list[tuple[str, ...]]:
    """Return the rows of a CSV file in the order of `columns`."""
    with path.open(encoding="utf-8", newline="") as file:
        return [tuple(row.get(column) or "" for column in columns) for row in csv.DictReader(file)]


class Study:
    """One evaluation of an experiment: its curves by method, in the report's panel."""

    def __init__(self, panel: Panel):
        self.panel = panel
        self.groups = {group.name: group for group in panel.groups}

    def curves(self, name: str) -> Sequence[Curve]:
        """Return the curve of each seed of a method, none if it was not measured."""
        return self.groups[name].curves if name in self.groups else ()

    def end(self, name: str) -> int:
        """Return the updates of the last checkpoint that all seeds of a method have."""
        return self.groups[name].common("top1")[-1].step or 0

    def shares(self, name: str, step: int | None = None) -> Shares:
        """Return the accuracy of each seed of a method after `step` updates; None: at its `end`."""
        step = self.end(name) if step is None and name in self.groups else step
        points = ((curve.seed, point) for curve in self.curves(name) for point in curve.points)
        return {seed: point.metrics["top1"] for seed, point in points if point.step == step}

    def whole(self, name: str) -> dict[int | None, float]:
        """Return the petaFLOPs of each seed of a method."""
        return {curve.seed: curve.points[-1].costs["petaflops"] for curve in self.curves(name)}

    def saved(self, name: str, rule: str) -> list:
        """Return a method's FLOPs until the baseline's accuracy by a rule of RULES, seed by seed."""
        key = (name, "petaflops", rule)
        return [s for s in savings(self.panel, "top1") if (s.method, s.cost, s.rule) == key]


Studies = Mapping[str, Study]  # by evaluation


def studies(curves: Sequence[Curve]) -> dict[str, dict[str, Study]]:
    """Return the studies of some curves by labels ("" in an experiment with one number of them) and evaluation."""
    found: dict[str, dict[str, Study]] = defaultdict(dict)
    for panel in arrange(curves):
        found[panel.measurement.labels][panel.measurement.kind] = Study(panel)
    return found


def read(path: Path, seeds: Sequence[int] | None = None) -> dict[str, dict[str, Study]]:
    """Return the studies of a points.csv of `collect`; `seeds`: without the runs of others."""
    points, rows = defaultdict(list), [row for row in rows_of(path) if seeds is None or int(row[2]) in seeds]
    for labels, method, seed, kind, updates, cost, top1 in sorted(rows, key=lambda r: int(r[4])):
        point = Point(int(updates), {"petaflops": float(cost)}, {"top1": float(top1) / 100})
        points[Measurement(kind, labels), (NAMES | ENDING).get(method, method), int(seed)].append(point)
    return studies(
        [
            Curve("", method, seed, measurement, tuple(found), method != BASELINE)
            for (measurement, method, seed), found in sorted(points.items())
        ]
    )


def points(base: Mapping[Any, float], ours: Mapping[Any, float]) -> list[float]:
    """Return the differences of two methods in points, of the seeds that both have."""
    return [100 * (ours[seed] - share) for seed, share in base.items() if seed in ours]


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences and the half width of its 95 % t interval."""
    from scipy.stats import t  # importing it takes more than a second

    n = len(differences)
    return mean(differences), float(t.ppf(0.975, n - 1)) * stdev(differences) / n**0.5


def p_value(values: Sequence[float]) -> float:
    """Return the two-sided p value of Student's t for a mean of 0."""
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(values, 0).pvalue) if stdev(values) else float(not any(values))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p values corrected by Holm's method, in the given order."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


# ------------------------------------------------------------------------------------------------------------ rules
def decision(center: float, half: float) -> str:
    """Apply the rule that was written before the runs: supported above 0, refuted below +1 point."""
    supported, refuted = center - half > 0, center + half < 1
    if supported and refuted:
        return "supported, and smaller than one point"
    return "supported" if supported else "refuted" if refuted else "undecided"


def decision_on_cost(center: float, half: float, *, most_arrived: bool) -> str:
    """Apply the rule of the plateau: supported below +10 points of SimCLR's FLOPs, refuted above 0."""
    supported, refuted = center + half < 10, center - half > 0
    if not most_arrived or not (supported or refuted):
        return "undecided"
    if supported and refuted:
        return "it saves less, by under 10 points"
    return "supported" if supported else "refuted"


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


# ------------------------------------------------------------------------------------------------------------ cells
def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(markdown(head, rows))


def accuracy(shares: Mapping[Any, float]) -> str:
    """Return the mean of some seeds' accuracies in %, with their range; "" of none."""
    return percent([*shares.values()], 2, unit="") if shares else ""


def with_seeds(shares: Mapping[Any, float]) -> str:
    """Return the accuracies of some seeds in words, with their number; "" of none."""
    seeds = "1 seed" if len(shares) == 1 else f"{len(shares)} seeds"
    return f"{accuracy(shares)}, {seeds}" if shares else ""


def gain(base: Mapping[Any, float], ours: Mapping[Any, float], digits: int = 2) -> str:
    """Return a paired difference in points in words; "" without a seed that both have."""
    found = points(base, ours)
    if len(found) > 1:
        return "{:+.{digits}f} ± {:.{digits}f}".format(*interval(found), digits=digits)
    return "".join(f"{each:+.2f}, one seed" for each in found)


def saved_cells(study: Study, name: str) -> list[str]:
    """Return the FLOPs until the baseline's accuracy by each rule of RULES, in words."""
    return [cell(study.saved(name, rule), 0, first_checkpoint=False) for rule in RULES]


# ----------------------------------------------------------------------------------------------- SimCLR and labels
def show(path: Path) -> list[str]:
    """Return the tables of a points.csv beside rules.md as Markdown."""
    if path.parent.name == FEW_LABELS:
        return show_few_labels(path)
    if path.parent.name == PHOTOS:
        return show_photos(path)
    linear = read(path)[""]["linear"]
    return show_plateau(linear) if PLATEAU in linear.groups else show_paired(path)


def show_paired(path: Path) -> list[str]:
    """Return the tables of SimCLR against methods with labels: by updates, the last checkpoint, compute saved.

    Compute saved is shown for an evaluation that tells SimCLR from an untrained encoder: elsewhere that one reaches
    SimCLR's accuracy.
    """
    decided = EXPERIMENTS[path.parent.name].decided
    order = [*decided, *(kind for kind in EVALUATIONS if kind not in decided)]
    held_out, measured = (read(path, seeds)[""] for seeds in ([HELD_OUT_SEED], range(HELD_OUT_SEED)))
    found = {kind: measured[kind] for kind in order if kind in measured}
    tables, costs = [], []
    for kind, study in found.items():
        if BASELINE not in study.groups:
            continue
        title, checkpoints = EVALUATIONS[kind], study.groups[BASELINE].common("top1")
        methods = [name for name in (METHOD, CROSS_ENTROPY) if name in study.groups]
        if len(checkpoints) > 1:
            trained = [BASELINE, *methods]
            wide = [DIFFERENCE if len(methods) == 1 else f"{name}: {DIFFERENCE}" for name in methods]
            rows = []
            for c in checkpoints:
                base, *ours = (study.shares(name, c.step) for name in trained)
                means = [accuracy(each) for each in (base, *ours)]
                gains = [gain(base, each) for each in ours]
                rows.append([str(c.step), f"{c.costs['petaflops']:.5f}", *means, *gains])
            tables.append(table(["updates", "petaFLOPs", *(f"{name}, %" for name in trained), *wide], rows))
            control = points(study.shares(UNTRAINED), study.shares(BASELINE))
            if not control or interval(control)[0] > interval(control)[1]:
                costs += [[f"{name}, {title}", *saved_cells(study, name)] for name in methods]
        if kind in decided:
            line = decision_line(study, checkpoints[-1].step, decided[kind])
            tables.append(f"{title[0].upper()}{title[1:]}. {line}")
    return [
        *tables,
        absolute(found),
        differences(found),
        table(["FLOPs until a method has", *RULES.values()], costs),
        *(show_unlabeled(held_out, measured) if held_out else []),
    ]


def show_unlabeled(held_out: Studies, found: Studies) -> list[str]:
    """Return what the unlabeled images add, each method fine-tuned at its best learning rate on held-out images.

    The rule is amendment 2 of docs/results/cifar10-32px/rules.md.
    """
    rates = {kind: rate_of(kind) for kind in held_out if "finetune" in kind and kind != "finetune_linear"}
    order = sorted(rates, key=lambda kind: float(rates[kind]))
    alone, seeds, rows, ends, lines = [*ALONE.values()], range(3), [], {}, []
    for name, shares in choices({kind: held_out[kind] for kind in order}).items():
        if len(shares) == len(order):
            chosen = top(shares)
            there = found[chosen].shares(name) if chosen in found else {}
            ends[name] = {seed: share for seed, share in there.items() if seed in seeds}
            cells = (f"{100 * share:.2f}" for share in shares.values())
            rows.append([name, *cells, rates[chosen], with_seeds(ends[name])])
    for ours in (METHOD, CROSS_ENTROPY):
        ready = min(len(ends.get(name, ())) for name in (*alone, ours))
        if ready < len(seeds):
            lines.append(f"{ours} against labels alone: no decision yet, {ready} of {len(seeds)} seeds.")
            continue
        base = max(alone, key=lambda name: mean(ends[name].values()))
        center, half = interval(points(ends[base], ends[ours]))
        said = {"refuted": "do not help", "undecided": "undecided"}.get(decision(center, half), "help")
        lines.append(f"{ours}, less {base}: {center:+.2f} ± {half:.2f} points. Unlabeled images: **{said}**.")
    head = ["fine-tuned, top-1, %, held-out images, at lr", *(rates[kind] for kind in order)]
    return [table([*head, "chosen", "test images, at the chosen lr"], rows), *lines]


def choices(held_out: Studies) -> dict[str, dict[str, float]]:
    """Return the accuracy of each method that has a run on held-out images, by each evaluation."""
    found = {
        name: {kind: share for kind, study in held_out.items() for share in study.shares(name).values()}
        for name in NAMES.values()
    }
    return {name: shares for name, shares in found.items() if shares}


def top(shares: Mapping[str, float]) -> str:
    """Return the evaluation with the highest accuracy, of several the first."""
    return max(shares, key=shares.__getitem__)


def rate_of(kind: str) -> str:
    """Return the learning rate of a fine-tuning from zero."""
    return kind.partition("_lr")[2] or f"{PAPERS_LR}"


def show_photos(path: Path) -> list[str]:
    """Return the choices on held-out photos, the accuracies, and each method less the labels alone: with decisions."""
    both, zero = ("linear_auto", "finetune_linear"), ("finetune_lr0.005", "finetune_lr0.015", "finetune")
    held_out, measured = read(path, [HELD_OUT_SEED])["300"], read(path, range(HELD_OUT_SEED))
    tried = choices({kind: held_out[kind] for kind in (*both, *zero)})
    best = {name: top(each) for name, each in tried.items()}
    base = max(ALONE.values(), key=lambda name: tried[name][best[name]])

    def shares(labels: str, name: str, kind: str) -> Shares:
        found = measured.get(labels, {})
        return found[kind].shares(name) if kind in found else {}

    rows = []
    for name, each in tried.items():
        cells = (f"{100 * share:.2f}" for share in each.values())
        rows.append([name, *cells, EVALUATIONS.get(best[name]) or f"fine-tuned at lr {rate_of(best[name])}"])
    titles = [EVALUATIONS[kind] for kind in both]
    heads = [*titles, *(f"from zero at lr {rate_of(kind)}" for kind in zero), "best"]
    tables = [table(["top-1, %, 341 held-out photos, 300 labels", *heads], rows)]
    rows, decided = [], {}
    for labels in ("300", "100"):
        ends = []
        for name, each in tried.items():
            kinds = (*both, top({kind: each[kind] for kind in zero}))
            ends.append([name, *(with_seeds(shares(labels, name, kind)) for kind in kinds)])
            if name not in ALONE.values():
                pairs = [(best[base], best[name]), *zip(both, both)]
                found = [(shares(labels, base, less), shares(labels, name, more)) for less, more in pairs]
                rows.append([f"{labels} labels: {name}", *(gain(*each) for each in found)])
                if name in (BASELINE, METHOD):
                    decided[rows[-1][0]] = points(*found[0])
        heads = [*titles, "fine-tuned from zero, at the chosen lr"]
        tables.append(table([f"{labels} labels: top-1, %, 713 photos", *heads], ends))
    heads = ["each by its best on the held-out photos", *titles]
    tables.append(table([f"less {base}, points (95 %)", *heads], rows))
    kinds = (*both, "own")
    start, head = VARIANTS.values()
    twins = (base, BASELINE, METHOD, CROSS_ENTROPY)
    for group in (  # each with what it is compared with
        dict.fromkeys(PEERS.values(), (BASELINE, base)),
        {f"{name}, {start}": (name, base, f"{base}, {start}") for name in twins},
        {f"{name}, {head}": (name, base) for name in twins},
    ):
        rows = []
        for (name, others), labels in product(group.items(), ("300", "100")):
            if any(found := [shares(labels, name, kind) for kind in kinds]):
                rows.append([f"{labels} labels: {name}", *map(with_seeds, found)])
                # Each measure is compared with the same one, or with the best one of the labels alone.
                for ours in dict.fromkeys(x for x in others if x != name):
                    own = [best[base] if ours == base else kind for kind in kinds]
                    cells = [*map(gain, (shares(labels, ours, kind) for kind in own), found)]
                    rows += [[f"less {ours}, points (95 %)", *cells]] if any(cells) else []
        tables += (
            [table(["top-1, %, 713 photos", *(EVALUATIONS[kind] for kind in kinds)], rows)] if rows else []
        )
    larger = [
        points(shares("300", name, kind), shares("300", f"{name}, {head}", kind))
        for name, kind in product((BASELINE, METHOD, CROSS_ENTROPY), both)
    ]
    if min(map(len, larger)) == SEEDS:  # what the rules decide on: one number of a draw
        center, half = interval([mean(draw) for draw in zip(*larger)])
        tables.append(
            f"The larger head, 300 labels, mean of three methods and two measures: {center:+.2f} ± {half:.2f} points."
        )
    if (ready := min(map(len, decided.values()))) < SEEDS:
        return [*tables, f"Decisions: none yet, {ready} of {SEEDS} draws."]
    rows = []
    for (what, each), p in zip(decided.items(), holm([p_value(each) for each in decided.values()])):
        word = decision(*interval(each))
        said = "undecided" if word.startswith("supported") and p >= 0.05 else HELPS[word]
        rows.append([what, f"{p:.3f}", f"**{said}**"])
    return [*tables, table(["pre-training on one's own photos", "p, Holm", "decision by the rule"], rows)]


HELPS = {
    "supported": "helps",
    "supported, and smaller than one point": "helps, by less than one point",
    "refuted": "does not help",
    "undecided": "undecided",
}


def decision_line(study: Study, step: int | None, seeds: range) -> str:
    """Return the decision on SuNCEt against SimCLR after `step` updates, on the `seeds` of the rules."""
    base, ours = ({s: x for s, x in study.shares(n, step).items() if s in seeds} for n in (BASELINE, METHOD))
    found = points(base, ours)
    if len(found) < len(seeds):
        return f"Decision by the rule: none yet, {len(found)} of {len(seeds)} seeds."
    center, half = interval(found)
    shown = f"{center:+.2f} ± {half:.2f} points, seeds {seeds[0]} to {seeds[-1]}"
    return f"Decision by the rule: **{decision(center, half)}**, {shown}."


def absolute(found: Studies, names: Sequence[str] = tuple(NAMES.values())) -> str:
    """Return the table of the accuracy of each method's last checkpoint, and of all of the labels alone."""
    whole = next(iter(next(iter(found.values())).whole(BASELINE).values()))
    rows = []
    for name in names:
        curves = [curve for study in found.values() for curve in study.curves(name)]
        steps: dict[int | None, float] = {None: 0.0} if curves else {}  # of the labels alone, and their FLOPs
        if name in ALONE.values():
            steps = {p.step: p.costs["petaflops"] for curve in curves for p in curve.points}
        for step, cost in sorted(steps.items(), key=lambda item: item[1]):
            said = f", {step:,} updates: {100 * cost / whole:.0f} % of SimCLR's FLOPs" if step else ""
            rows.append([name + said, *(with_seeds(study.shares(name, step)) for study in found.values())])
    return table(["last checkpoint: top-1, %", *(EVALUATIONS[kind] for kind in found)], rows)


def differences(found: Studies) -> str:
    """Return the table of the paired differences of PAIRS, of all seeds."""
    rows = []
    for ours, base in PAIRS:
        row = []
        for study in found.values():
            less, more = study.shares(base), study.shares(ours)
            complete = less and more and (base not in ALONE.values() or less.keys() >= more.keys())
            row.append(gain(less, more) if complete else "")
        if any(row):
            rows.append([f"{ours}, less {base}", *row])
    return table([DIFFERENCE, *(EVALUATIONS[kind] for kind in found)], rows)


def costs_until(study: Study, name: str) -> dict[int | None, tuple[float, bool]]:
    """Return, for each seed, the FLOPs until SimCLR's final accuracy as a share of SimCLR's, and whether it got there.

    A seed that did not counts with all its FLOPs (docs/results/cifar10-plateau/rules.md).
    """
    whole, base = study.whole(name), study.whole(BASELINE)
    return {
        s.seed: (s.shares[0] if s.shares else whole[s.seed] / base[s.seed], s.shares is not None)
        for s in study.saved(name, "final")
        if s.seed is not None
    }


def show_plateau(study: Study) -> list[str]:
    """Return the table of a plateau's experiment as Markdown, and the decision."""
    rows, costs = [], {name: costs_until(study, name) for name in study.groups if name != BASELINE}
    for name in (*ALONE.values(), *ENDING.values()):
        if name not in study.groups:
            continue
        spent = study.whole(name).values()
        flops = f"{mean(spent):.5f} ({min(spent):.5f} to {max(spent):.5f})"
        rows.append([name, str(study.end(name)), flops, accuracy(study.shares(name)), ""])
        if name != BASELINE:
            shares, there = zip(*costs[name].values())
            rows[-1][-1] = f"{percent(shares, 0)}; {sum(there)} of {len(there)} seeds reached it"
    ended = [costs[name] for name in (FIXED, PLATEAU)]
    fixed, plateau = ({seed: share for seed, (share, _) in found.items()} for found in ended)
    center, half = interval(points(fixed, plateau))
    most = all(2 * sum(there for _, there in found.values()) > len(found) for found in ended)
    base, ends, later = (study.shares(name) for name in ENDING.values())
    alone = study.shares(ALONE["alone_cross_entropy"])
    whole, part = (mean(study.whole(name).values()) for name in (BASELINE, FIXED))
    return [
        table(["method", "updates", "petaFLOPs", "top-1, %, last checkpoint", UNTIL[0]], rows),
        f"Fixed end against SimCLR, paired (95 %): accuracy {gain(base, ends)} points, "
        f"with {100 * part / whole:.0f} % of its FLOPs.",
        f"Plateau against fixed end, paired (95 %): FLOPs {center:+.1f} ± {half:.1f} points of SimCLR's, "
        f"accuracy {gain(ends, later)} points.",
        f"Less labels alone, cross-entropy, paired (95 %): fixed end {gain(alone, ends)} points, "
        f"plateau {gain(alone, later)} points.",
        f"Decision by the rule: **{decision_on_cost(center, half, most_arrived=most)}**.",
    ]


# ------------------------------------------------------------------------------------------------------ few labels
def best(found: Studies, name: str, kinds: Sequence[str] = ("own", "linear_auto", "finetune")) -> Shares:
    """Return each seed's best accuracy of a method over the checkpoints and evaluations."""
    tops: Shares = defaultdict(float)
    for kind in kinds:
        for curve in found[kind].curves(name) if kind in found else ():
            tops[curve.seed] = max(tops[curve.seed], *(p.metrics["top1"] for p in curve.points))
    return dict(tops)


def show_gate(every: Mapping[str, Studies]) -> list[str]:
    """Return the table of what the unlabeled images add at each number of labels, with the gate's one seed."""
    kinds, rows = ("own", "linear_auto", "finetune"), []
    for labels, found in sorted(every.items(), key=lambda item: int(item[0])):
        tops = {name: best(found, name).get(HELD_OUT_SEED) for name in (BASELINE, *ALONE.values())}
        for name in tops:
            cells = [best(found, name, [kind]).get(HELD_OUT_SEED) for kind in kinds]
            if any(cells):
                rows.append([labels, name, *(f"{100 * x:.2f}" if x else "" for x in cells), ""])
        top, *alone = tops.values()
        if top and all(alone):
            rows[-1][-1] = f"{100 * (top - max(x for x in alone if x)):+.2f}"
    head = ["labels", "best checkpoint", *(f"{EVALUATIONS[kind]}, %" for kind in kinds)]
    return [table([*head, "the unlabeled images add, points"], rows)] if rows else []


def show_few_labels(path: Path) -> list[str]:
    """Return the tables from few labels to many: the gate, accuracies, and the four decisions corrected by Holm."""
    gate, measured = show_gate(read(path, [HELD_OUT_SEED])), read(path, range(SEEDS))
    runs = {labels: measured[labels] for labels in ("100", "500") if labels in measured}
    trained, kinds = (BASELINE, METHOD, CROSS_ENTROPY), ("finetune", "linear_auto")
    ended = [
        sum(len(curve.points) == CHECKPOINTS for curve in found[kind].curves(name)) if kind in found else 0
        for found in runs.values()
        for kind in kinds
        for name in trained
    ]
    tables = [f"{labels} labels:\n\n{absolute(found, trained)}" for labels, found in runs.items()]
    measures = ((*kinds, "own"), *([kind] for kind in kinds))
    controls = [
        [f"{labels} labels", name, *(with_seeds(best(found, name, each)) for each in measures)]
        for labels, found in runs.items()
        for name in ALONE.values()
    ]
    heads = [f"{EVALUATIONS[kind]}, %" for kind in kinds]
    tables.append(table(["", "best checkpoint and evaluation", "top-1, %", *heads], controls))
    added = []
    for labels, found in runs.items():
        either, other = (best(found, name) for name in ALONE.values())
        alone = {seed: max(top, other[seed]) for seed, top in either.items() if seed in other}
        gains = [gain(alone, best(found, name, kinds)) for name in trained]
        added += [[f"{labels} labels", *gains]] if any(gains) else []
    if added:
        tables.append(table(["less the better of the labels alone, points", *trained], added))
    costs = [
        [f"{labels} labels: {name}, {EVALUATIONS[kind]}", *saved_cells(found[kind], name)]
        for labels, found in runs.items()
        for kind in kinds
        for name in trained[1:]
        if kind in found and found[kind].saved(name, "best")
    ]
    tables.append(table(["FLOPs until a method has", *RULES.values()], costs))
    if len(runs) < 2 or min(ended) < SEEDS:
        return [*gate, *tables, f"Decisions: none yet, {min(ended, default=0)} of {SEEDS} seeds."]
    for kind in kinds:
        values, rows = {}, []
        for labels, found in runs.items():
            # FLOPs until SimCLR's best accuracy over SimCLR's own FLOPs for it
            ratios = [s.shares[0] if s.shares else NOT_REACHED for s in found[kind].saved(METHOD, "best")]
            values[f"{labels} labels: compute saved, r"] = [log(ratio) for ratio in ratios]
            ends = (found[kind].shares(name) for name in (CROSS_ENTROPY, METHOD))
            values[f"{labels} labels: SuNCEt less cross-entropy"] = points(*ends)
        for (what, each), p in zip(values.items(), holm([p_value(each) for each in values.values()])):
            center, half = interval(each)
            low, high = center - half, center + half
            if what.endswith(", r"):
                low, high = exp(low), exp(high)
                shown, said = f"{exp(center):.2f} ({low:.2f} to {high:.2f})", decision_on_ratio(low, high)
            else:
                shown, said = f"{center:+.2f} ± {half:.2f} points", decision_on_losses(low, high)
            if said.startswith(("confirmed", "better")) and p >= 0.05:
                said = "undecided"
            rows.append([what, shown, *([f"{p:.3f}", f"**{said}**"] if kind == "finetune" else [])])
        heads = ["p, Holm", "decision by the rule"] if kind == "finetune" else []
        tables.append(table([EVALUATIONS[kind], "mean (95 %)", *heads], rows))
    return [*gate, *tables]


# ---------------------------------------------------------------------------------------------------- other tables
def show_demo(folder: Path) -> list[str]:
    """Return the tables of what `fastsuncet demo` wrote: README's, of all checkpoints, of each seed."""
    curves = []
    for path in sorted(folder.glob("demo_seed*.json")):
        seed = int(path.stem.removeprefix("demo_seed"))
        for method, run in json.loads(path.read_text(encoding="utf-8")).items():
            rows = zip(run["updates"], run["petaflops"], run["accuracy"])
            found = tuple(Point(step, {"petaflops": cost}, {"top1": top1}) for step, cost, top1 in rows)
            curves.append(Curve("", method, seed, Measurement("linear", ""), found, method != BASELINE))
    study = studies(curves)[""]["linear"]
    names, rows, seeds = (ALONE["alone_cross_entropy"], BASELINE, METHOD), [], []
    ends: tuple[Point, ...] = ()
    for ends in zip(*(study.groups[name].common("top1") for name in names)):
        means = (percent(p.metrics["top1"], unit="") for p in ends)
        rows.append([f"{ends[-1].step}", f"{1e6 * ends[-1].costs['petaflops']:.1f}", *means])
    readme = [
        [name, f"{1e6 * p.costs['petaflops']:.0f}", percent(p.metrics["top1"])]
        for name, p in zip(names, ends)
    ]
    for seed in study.shares(BASELINE):
        last = [f"{100 * study.shares(name)[seed]:.1f}" for name in names]
        own = [s for s in savings(study.panel, "top1") if s.seed == seed and s.method == METHOD]
        seeds.append([str(seed), *last, *(percent([s.shares[1]], 0) if s.shares else "never" for s in own)])
    head = [f"after {ends[-1].step} updates", "gigaFLOPs"]
    return [
        table([*head, "accuracy of a linear classifier on the labeled 10 %"], readme),
        table(["updates", "gigaFLOPs of the last two", *(f"{name}, %" for name in names)], rows),
        table(["seed", *(f"{name}, last" for name in names), *UNTIL], seeds),
    ]


def show_runs(path: Path) -> list[str]:
    """Return the table of a file of single runs as Markdown: its columns, as they are."""
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return [table([name.replace("_", " ") for name in head], rows)]


def show_suggestions(path: Path) -> list[str]:
    """Return the table of what suggested images add to random ones, with the decisions of the rules beside it."""
    tops: dict[tuple, dict[str, float]] = defaultdict(dict)
    for images, arm, draw, labels, top1 in rows_of(path, ("images", "arm", "draw", "labels", "top1")):
        tops[images, labels, arm][draw] = float(top1)
    rows = []
    for images, labels in dict.fromkeys(key[:2] for key in tops):
        base, *others = (tops[images, labels, arm] for arm in ARMS)
        cells = []
        for ours in others:
            center, half = interval([top1 - base[draw] for draw, top1 in ours.items()])
            word = "better" if center - half > 0 else "worse" if center + half < 0 else "undecided"
            cells.append(f"{center:+.2f} ± {half:.2f}, {word}")
        rows.append([images, labels, f"{sum(base.values()) / len(base):.2f}", *cells])
    head = ("images", "labels", "random, %", "typical, less random, points (95 %)", "margin, less random")
    return [table(head, rows)]


def draw(points: Path, path: Path) -> None:
    """Draw accuracy against FLOPs: the mean of each method, its 95 % t interval, and each seed as a thin line.

    An evaluation of several checkpoints has a plot of its own, each number of labels a row of them; none, no figure.
    The labels alone, which cost a fraction of the others, are a horizontal line at their best checkpoints.
    """
    from matplotlib.figure import Figure
    from matplotlib.transforms import ScaledTranslation

    every = read(points, range(HELD_OUT_SEED))
    shown = {
        f"{count} labels, {EVALUATIONS[kind]}" if count else EVALUATIONS[kind]: found[kind]
        for count, found in every.items()
        for kind in EVALUATIONS
        if kind in found
        and BASELINE in found[kind].groups
        and len(found[kind].groups[BASELINE].common("top1")) > 1
    }
    if not shown:
        return
    title, labels, _ = EXPERIMENTS[points.parent.name]
    rows, columns = len(every), len(shown) // len(every)
    width, legend, across = (6.4, 0.9, 1) if columns == 1 else (9, 0.3, 3)
    figure = Figure(figsize=(width, 4.3 * rows + legend), layout="constrained")
    seeds = len(next(iter(shown.values())).curves(BASELINE))
    figure.suptitle(f"{title}, {labels}, paired seeds: {seeds}", size=11)
    for axes, (heading, study) in zip(figure.subplots(rows, columns, squeeze=False).flat, shown.items()):
        names = [name for name in study.groups if name != UNTRAINED and name not in ALONE.values()]
        for i, (name, color, marker, dashes) in enumerate(zip(names, COLORS, MARKERS, DASHES)):
            checkpoints = study.groups[name].common("top1")
            x = [p.costs["petaflops"] * 1e3 for p in checkpoints]
            tops = [[100 * top for top in p.metrics["top1"]] for p in checkpoints]  # of each seed
            axes.plot(x, tops, color=color, lw=0.6, alpha=0.45)
            means = [mean(of_seeds) for of_seeds in tops]
            halves = [interval(of_seeds)[1] if len(of_seeds) > 1 else 0.0 for of_seeds in tops]
            # Moved by two points, so that no interval hides another.
            aside = axes.transData + ScaledTranslation(2 * i / 72, 0, figure.dpi_scale_trans)
            style = {"capsize": 3, "lw": 1.8, "color": color, "marker": marker, "ls": dashes}
            axes.errorbar(x, means, yerr=halves, label=name, transform=aside, **style)
            for sign in (-1, 1):  # the limits of the axes follow only what is drawn in its own place
                axes.update_datalim([(c, m + sign * half) for c, m, half in zip(x, means, halves)])
        for name, dashes in zip(ALONE.values(), ("--", ":")):
            if name in study.groups:
                top = 100 * mean(best({heading: study}, name, [heading]).values())
                axes.axhline(top, color="0.4", lw=1.2, ls=dashes, label=f"{name}, best checkpoint")
        axes.autoscale_view()
        axes.set_title(heading, size=10)
        axes.set(xlabel="pre-training compute, teraFLOPs (6 x MAC a view)", ylabel="test accuracy, %")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    lines = figure.axes[0].get_legend_handles_labels()
    figure.legend(*lines, frameon=False, loc="outside lower center", ncols=across)
    figure.savefig(path, dpi=150)


SHOWN = {part.__name__.removeprefix("show_"): part for part in (show, show_runs, show_suggestions, show_demo)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect", help="write the points of run folders")
    one.add_argument("runs", type=Path, nargs="+")
    one.add_argument("--output", type=Path, required=True)
    for command, function in SHOWN.items():
        added = commands.add_parser(command, help=(function.__doc__ or "").splitlines()[0])
        added.add_argument("points", type=Path)
        if command == "show":
            added.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "collect":
        collect(arguments.runs, arguments.output)
        return
    print("\n\n".join(SHOWN[arguments.command](arguments.points)))
    if arguments.command == "show" and arguments.figure:
        draw(arguments.points, arguments.figure)


if __name__ == "__main__":
    main()
