"""A report's data: the accuracies of runs and their costs, in groups of seeds, in panels that can be compared."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fastsuncet.metrics.rankme import RANKS

COSTS = ("epochs", "updates", "petaflops", "hours", "joules")
ONLINE = "online knn"  # the kind of the "knn" lines in metrics.jsonl; its one metric is KNN
KNN = "knn"
KINDS = {
    "finetune": "fine-tuning",
    "linear": "a linear classifier",
    "knn": "nearest neighbors",
    "npi": "SuNCEt's own classifier",
    "accuracy": "the network's own classifier",
    "transfer": "transfer",
    ONLINE: "KNN while training",
}
NAMES = {
    "top1": "top-1 accuracy",
    "top5": "top-5 accuracy",
    "top1_weighted": "with weighted votes",
    KNN: "accuracy",
    "rankme": "RankMe of the embeddings",
    "rankme_features": "RankMe of the features",
}
LENGTHS = ("optimization.epochs", "optimization.steps")


def scale(metric: str) -> float:
    """Return what a metric is multiplied by where it is shown: shares are shown in %, ranks as they are."""
    return 1.0 if metric in RANKS else 100.0


class Measurement(NamedTuple):
    """What was measured. Only numbers of the same measurement can be compared."""

    kind: str  # "finetune", "linear", ...
    labels: str  # "10 % labels"
    variant: str = ""  # "k=20", where a run was evaluated with several settings

    def __str__(self) -> str:
        """Return it in words: "fine-tuning, 10 % labels"."""
        return ", ".join(part for part in (KINDS.get(self.kind, self.kind), *self[1:]) if part)


@dataclass(frozen=True)
class Point:
    """One evaluated encoder."""

    step: int | None  # updates done; None for an encoder from a file, which is on no curve
    costs: dict[str, float]  # those of COSTS that are known
    metrics: dict[str, float]  # shares, 0 to 1, and those of RANKS


@dataclass(frozen=True)
class Curve:
    """One run in one measurement, its points by step."""

    run: str
    method: str
    seed: int | None
    measurement: Measurement
    points: tuple[Point, ...]
    supervised: bool = False  # whether pre-training used labels
    # Of the config, without seeds: equal in runs that differ only in their seed.
    settings: tuple[tuple[str, Any], ...] = ()
    stopped: str = ""  # "20 of 40 updates", where its last point is not the run's end
    published: bool = False  # the paper's own
    merged: tuple[str, ...] = ()  # runs of other lengths whose ends are points of this curve

    @property
    def from_weights(self) -> bool:
        """Whether pre-training started from weights (model.init), whose cost is not known."""
        return dict(self.settings).get("model.init", "None") != "None"

    def at_steps(self, metric: str) -> list[Point]:
        """Return the points that have a step and `metric`."""
        return [p for p in self.points if p.step is not None and metric in p.metrics]


class Seeds(NamedTuple):
    """The points of several seeds at one step."""

    step: int | None
    costs: dict[str, float]  # means of those that all seeds have
    metrics: dict[str, list[float]]  # of those that all seeds have, a value for each

    def mean(self, metric: str) -> float:
        """Return the mean over the seeds."""
        return fmean(self.metrics[metric])


@dataclass(frozen=True)
class Group:
    """The runs of one experiment in one measurement: a curve for each seed."""

    name: str  # the method, and what distinguishes it from another group of that method
    curves: tuple[Curve, ...]

    def rivals(self, other: "Group") -> bool:
        """Return whether the cost of the two can be compared: both the paper's or none, of the same images."""
        ours, theirs = self.curves[0], other.curves[0]
        images = [(each.published, dict(each.settings).get("data")) for each in (ours, theirs)]
        return other is not self and images[0] == images[1]

    def common(self, metric: str) -> list[Seeds]:
        """Return the steps at which all seeds were evaluated by `metric`, ascending."""
        tables = [{p.step: p for p in curve.at_steps(metric)} for curve in self.curves]
        found = []
        for step in sorted(set.intersection(*map(set, tables))):
            points = [table[step] for table in tables]
            costs = {c: [p.costs[c] for p in points] for c in COSTS if all(c in p.costs for p in points)}
            shared = [m for m in points[0].metrics if all(m in p.metrics for p in points)]
            metrics = {m: [p.metrics[m] for p in points] for m in shared}
            found.append(Seeds(step, {c: fmean(values) for c, values in costs.items()}, metrics))
        return found

    def uneven(self, metric: str) -> str:
        """Return a note if the seeds were not evaluated at the same checkpoints, so that their mean lacks some."""
        counts = [len(curve.at_steps(metric)) for curve in self.curves]
        common = len(self.common(metric))
        if common == max(counts):
            return ""
        each = ", ".join(f"{curve.seed}: {count}" for curve, count in zip(self.curves, counts))
        return f"averaged at {common} of {max(counts)} checkpoints, those that all seeds have (seed {each})"


@dataclass(frozen=True)
class Panel:
    """The groups of one measurement, whose numbers can be compared."""

    measurement: Measurement
    groups: tuple[Group, ...]
    baseline: Group | None = None


def labels_text(labels: dict[str, Any]) -> str:
    """Return the labels that an evaluation learned from: "10 % labels", or their number, or "all labels"."""
    kind, share, count = (labels.get(key) for key in ("kind", "fraction", "count"))
    if kind == "all" or share == 1:
        return "all labels"
    # The share of a given number is rounded.
    if share is not None and kind != "stratified" and (kind == "bernoulli" or share >= 0.001):
        return f"{100 * share:g} % labels"
    return f"{count:,} labels" if count else ""


def join_lengths(curves: list[Curve]) -> list[Curve]:
    """Merge runs that differ only in length into one curve of their final checkpoints, as the paper draws ImageNet.

    There each length is a run of its own, because the learning rate ends with it. Runs are merged within a seed,
    without those that were not measured at their end. Other runs stay as they are.
    """
    families: dict[tuple, list[Curve]] = {}
    for curve in curves:
        rest = tuple((key, value) for key, value in curve.settings if key not in LENGTHS)
        families.setdefault((curve.method, curve.seed, curve.measurement, rest), []).append(curve)
    joined = []
    for (*_, rest), family in families.items():
        ended = [curve for curve in family if not curve.stopped]
        if len({curve.settings for curve in ended}) < 2:  # one length
            joined += ended or family
            continue
        family = sorted(ended, key=lambda curve: curve.points[-1].step or 0)
        ends = tuple(curve.points[-1] for curve in family)
        others = tuple(curve.run for curve in family[:-1])
        # The curve has the longest run's name.
        joined.append(replace(family[-1], points=ends, settings=rest, merged=others))
    return joined


def arrange(curves: Iterable[Curve], baseline: str | None = None) -> list[Panel]:
    """Return the panels in the order of their first curves, the baseline's group first in each.

    The baseline is the group of run `baseline`; without one, the only group that pre-trains without labels, and from
    scratch where any run does: other weights can have learned from labels.
    """
    measured: dict[Measurement, list[Curve]] = {}
    for curve in curves:
        measured.setdefault(curve.measurement, []).append(curve)
    panels = []
    for measurement, members in measured.items():
        groups = _join_seeds(members)
        chosen = _baseline(groups, baseline)
        groups.sort(key=lambda group: group is not chosen)
        panels.append(Panel(measurement, tuple(groups), chosen))
    return panels


def _join_seeds(curves: list[Curve]) -> list[Group]:
    """Return groups in the order of their first runs. Two runs of one seed are two groups, so none is counted twice."""
    times, experiments = Counter(), defaultdict(list)
    for curve in curves:
        alike = (curve.method, curve.settings, curve.published)
        times[alike, curve.seed] += 1
        experiments[alike, times[alike, curve.seed]].append(curve)
    joined = list(experiments.values())
    # A folder's name is bytes, and can have line breaks.
    names = (_name(members[0], joined).encode(errors="replace").decode().split() for members in joined)
    return [Group(" ".join(words), tuple(members)) for words, members in zip(names, joined)]


def _name(first: Curve, joined: list[list[Curve]]) -> str:
    """Return the method; if another group has it too, with the settings that differ, or with the run's name."""
    if first.published:
        return f"{first.method} (paper)"
    own = dict(first.settings)
    rivals = [c[0] for c in joined if c[0].method == first.method and not c[0].published]
    tables = [dict(rival.settings) for rival in rivals]
    if len(tables) == 1:
        return first.method
    keys = [key for key in own if any(table.get(key) != own[key] for table in tables)][:3]
    if sum(all(table.get(key) == own[key] for key in keys) for table in tables) > 1:
        return f"{first.method}, {first.run}"
    return f"{first.method}, " + ", ".join(f"{key.rpartition('.')[2]} {own[key]}" for key in keys)


def _baseline(groups: list[Group], run: str | None) -> Group | None:
    if run is not None:
        home = Path(run).resolve()
        homes = {name: g for g in groups for curve in g.curves for name in (curve.run, *curve.merged)}
        return next((group for name, group in homes.items() if Path(name).resolve() == home), None)
    scratch = any(("model.init", "None") in group.curves[0].settings for group in groups)
    without = [g for g in groups if not (g.curves[0].supervised or (scratch and g.curves[0].from_weights))]
    without = [group for group in without if not group.curves[0].published] or without
    return without[0] if len(without) == 1 else None
