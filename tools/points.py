"""Read the committed numbers of an experiment, pair its seeds, and apply the rules that were written before the runs.

A points.csv has a row for each top-1 accuracy of a checkpoint; tools/results.py makes the tables of it.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml
from scipy.stats import ttest_1samp

from fastsuncet.commands.report.compute_saved import Saving, savings
from fastsuncet.commands.report.curves import Curve, Measurement, Panel, Point, arrange
from fastsuncet.metrics.results import read_results
from pipelines.output import csv_table

# labels: their number, of an experiment with several; evaluation: what `evaluation` returns; top1: %
COLUMNS = ("labels", "method", "seed", "evaluation", "updates", "petaflops", "top1")
BASELINE, METHOD = "SimCLR", "SimCLR + SuNCEt"
FIXED, PLATEAU = f"{METHOD}, off after 2 epochs", f"{METHOD}, off at a plateau"
CROSS_ENTROPY, UNTRAINED = "SimCLR + cross-entropy", "untrained encoder"
ALONE = {"alone_cross_entropy": "labels alone, cross-entropy", "alone_suncet": "labels alone, SuNCEt"}
PEERS = {"lightly": "lightly-train's SimCLR", "timm": "timm's parts on the labels alone"}
VARIANTS = {  # of a method
    "start": "started from CIFAR-10",
    "head": "with a head of 2,048 and 128",
    "settings": "with lightly-train's settings",
    "outputbn": "with them and a BatchNorm of the output",
    "longer": "by SGD, 4,800 updates",
}
METHODS = {
    **ALONE,
    **PEERS,
    "untrained": UNTRAINED,
    "simclr": BASELINE,
    "suncet": METHOD,
    "switched_off": f"{METHOD}, off after a fifth",
    "cross_entropy": CROSS_ENTROPY,
    "paws": "PAWS + SuNCEt",
    "fixed": FIXED,
    "plateau": PLATEAU,
}
NAMES = METHODS | {
    f"{variant}_{key}": f"{name}, {words}"
    for variant, words in VARIANTS.items()
    for key, name in METHODS.items()
}
ALL_KINDS = ("own", "linear_auto", "finetune")  # of the evaluations of few labels
PAPERS_LR = 0.05  # of fine-tuning on CIFAR-10 (appendix B)
HELD_OUT_SEED = 100  # of runs that are measured on held-out training images
Shares = dict[int | None, float]  # seed -> accuracy, 0 to 1


# ---------------------------------------------------------------------------------------------------------- points
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
    """Return what names the evaluation of a result in a points.csv."""
    kind, setting = result["kind"], result["setting"]
    if kind == "finetune" and setting.get("head") == "linear":
        return "finetune_linear"
    if kind == "finetune" and setting["lr"] != PAPERS_LR:
        return f"finetune_lr{setting['lr']:g}"
    if kind == "linear" and setting["strength"] != 1:
        return f"linear_{setting['strength']}"
    return {"accuracy": "own", "npi": "own"}.get(kind, kind)


def rate_of(kind: str) -> str:
    """Return the learning rate of a fine-tuning from zero, "" of another evaluation."""
    return f"{PAPERS_LR}" if kind == "finetune" else kind.partition("_lr")[2]


def rows_of(path: Path, columns: Sequence[str] = COLUMNS) -> list[tuple[str, ...]]:
    """Return the rows of a CSV file in the order of `columns`."""
    with path.open(encoding="utf-8", newline="") as file:
        return [tuple(row.get(column) or "" for column in columns) for row in csv.DictReader(file)]


class Study:
    """One evaluation of an experiment: the curves of its methods, none if it was not made."""

    def __init__(self, panel: Panel | None = None):
        self.groups = {group.name: group for group in panel.groups} if panel else {}
        self._savings = savings(panel, "top1") if panel else []

    def curves(self, name: str) -> Sequence[Curve]:
        """Return the curve of each seed of a method, none if it was not measured."""
        return self.groups[name].curves if name in self.groups else ()

    def end(self, name: str) -> int:
        """Return the updates of the last checkpoint that all seeds of a method have, 0 if it was not measured."""
        return self.groups[name].common("top1")[-1].step or 0 if name in self.groups else 0

    def shares(self, name: str, step: int | None = None, seeds: range | None = None) -> Shares:
        """Return the accuracy of each seed of a method, or of `seeds`, after `step` updates; None: at its `end`."""
        step = self.end(name) if step is None else step
        curves = [curve for curve in self.curves(name) if seeds is None or curve.seed in seeds]
        points = ((curve.seed, point) for curve in curves for point in curve.points)
        return {seed: point.metrics["top1"] for seed, point in points if point.step == step}

    def whole(self, name: str) -> dict[int | None, float]:
        """Return the petaFLOPs of each seed of a method."""
        return {curve.seed: curve.points[-1].costs["petaflops"] for curve in self.curves(name)}

    def saved(self, name: str, rule: str) -> list[Saving]:
        """Return a method's FLOPs until the baseline's accuracy by a rule of compute saved, seed by seed."""
        return [s for s in self._savings if (s.method, s.rule) == (name, rule)]


class Studies(dict[str, Study]):
    """The studies of one number of labels by evaluation; one that was not made is empty."""

    def __missing__(self, kind: str) -> Study:
        return Study()


def studies(rows: Iterable[Sequence]) -> dict[str, Studies]:
    """Return the studies of rows of COLUMNS by labels, "" in an experiment with one number of them."""
    points, found = defaultdict(list), defaultdict(Studies)
    for labels, method, seed, kind, updates, cost, top1 in sorted(rows, key=lambda r: int(r[4])):
        point = Point(int(updates), {"petaflops": float(cost)}, {"top1": float(top1) / 100})
        points[Measurement(kind, labels), NAMES.get(method, method), int(seed)].append(point)
    curves = [
        Curve("", method, seed, measurement, tuple(each), method != BASELINE)
        for (measurement, method, seed), each in sorted(points.items())
    ]
    for panel in arrange(curves):
        found[panel.measurement.labels][panel.measurement.kind] = Study(panel)
    return found


def read(path: Path, seeds: Sequence[int]) -> dict[str, Studies]:
    """Return the studies of the runs of a points.csv that have one of `seeds`."""
    return studies(row for row in rows_of(path) if int(row[2]) in seeds)


def best(found: Studies, name: str, kinds: Sequence[str] = ALL_KINDS) -> Shares:
    """Return each seed's best accuracy of a method over the checkpoints and evaluations."""
    tops: Shares = defaultdict(float)
    for kind in kinds:
        for curve in found[kind].curves(name):
            tops[curve.seed] = max(tops[curve.seed], *(p.metrics["top1"] for p in curve.points))
    return dict(tops)


# -------------------------------------------------------------------------------------------------------- statistics
def paired(base: Mapping[Any, float], ours: Mapping[Any, float]) -> list[float]:
    """Return the differences of two methods in points, of the seeds that both have."""
    return [100 * (ours[seed] - share) for seed, share in base.items() if seed in ours]


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % t interval of the mean of paired differences."""
    low, high = ttest_1samp(differences, 0).confidence_interval(0.95)
    return float(low), float(high)


def holm(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the two-sided p value of Student's t for a mean of 0, of each corrected by Holm's method over all."""
    p = np.array([ttest_1samp(each, 0).pvalue for each in values.values()])
    order = np.argsort(p)
    p[order] = np.maximum.accumulate(np.arange(len(p), 0, -1) * p[order])
    return dict(zip(values, p.clip(max=1).tolist()))


# ------------------------------------------------------------------------------------------------------------ rules
def decision(low: float, high: float) -> str:
    """Apply the rule that was written before the runs: supported above 0, refuted below +1 point."""
    return verdict(low > 0, high < 1, "supported, and smaller than one point")


def decision_on_cost(low: float, high: float, most_arrived: bool) -> str:
    """Apply the rule of the plateau: supported below +10 points of SimCLR's FLOPs, refuted above 0."""
    both = "it saves less, by under 10 points"
    return verdict(high < 10, low > 0, both) if most_arrived else "undecided"


def decision_on_ratio(low: float, high: float) -> str:
    """Apply the rule of compute saved to the interval of r (docs/results/cifar10-few-labels/rules.md)."""
    if high < 0.8:
        return "confirmed, as large as in the paper"
    return verdict(high < 1, low > 0.9, "confirmed, by less than a tenth", "confirmed")


def decision_on_losses(low: float, high: float) -> str:
    """Apply the rule of SuNCEt against cross-entropy to the interval of their difference in points."""
    return verdict(low > 0, high < 0.5, "better, by less than half a point", "better")


def decision_on_settings(low: float, high: float) -> str:
    """Apply the rule of lightly-train's SimCLR, less ours with its settings (docs/results/clothing-photos/rules.md)."""
    return "the trainer is behind" if low > 0 else "the settings explain it" if high < 1.5 else "undecided"


def verdict(supported: bool, refuted: bool, both: str, word: str = "supported") -> str:
    """Return what a rule says: `word`, "refuted", `both` where it is both, or "undecided"."""
    if supported and refuted:
        return both
    return word if supported else "refuted" if refuted else "undecided"
