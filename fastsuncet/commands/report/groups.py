"""Curves that can be compared, side by side: runs that only their seed sets apart are joined to one group."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fastsuncet.commands.report.curves import COSTS, Curve, Evaluation, Point
from fastsuncet.errors import ConfigError

Spread = tuple[float, float, float]  # mean, lowest, highest over the seeds


@dataclass(frozen=True)
class Group:
    """The runs of one experiment in one evaluation, a curve a seed."""

    name: str  # the method, and what sets it apart from another group of that method
    curves: tuple[Curve, ...]

    @property
    def published(self) -> bool:
        """Whether this is the paper's and not the reader's."""
        return self.curves[0].published

    @property
    def supervised(self) -> bool:
        """Whether pre-training used labels."""
        return self.curves[0].supervised

    def with_metric(self, metric: str) -> "list[Point]":
        """The mean curve: a point at every step that all seeds have, costs and metrics averaged over them."""
        return [self._mean(points) for points in self._common(metric)]

    def spread(self, metric: str) -> list[Spread]:
        """(mean, lowest, highest) of `metric` over the seeds, for each point of the mean curve."""
        values = [[point.metrics[metric] for point in points] for points in self._common(metric)]
        return [(fmean(v), min(v), max(v)) for v in values]

    def _common(self, metric: str) -> list[list[Point]]:
        """For every step that all seeds were evaluated at: their points."""
        tables = [on_curve(curve, metric) for curve in self.curves]
        steps = sorted(set.intersection(*(set(table) for table in tables)))
        return [[table[step] for table in tables] for step in steps]

    def uneven(self, metric: str) -> str:
        """A sentence where the seeds were not evaluated at the same checkpoints, so that the mean curve lacks some."""
        counts = [len(on_curve(curve, metric)) for curve in self.curves]
        common = len(self._common(metric))
        if common == max(counts):
            return ""
        each = ", ".join(f"{curve.seed}: {count}" for curve, count in zip(self.curves, counts))
        return (
            f"averaged at {common} of {max(counts)} checkpoints, those that all seeds have (seed {each}), so no "
            "compute saved is told of the mean"
        )

    def _mean(self, points: list[Point]) -> Point:
        costs = [c for c in COSTS if all(c in p.costs for p in points)]
        names = [m for m in points[0].metrics if all(m in p.metrics for p in points)]
        return Point(
            points[0].step,
            {c: fmean(p.costs[c] for p in points) for c in costs},
            {m: fmean(p.metrics[m] for p in points) for m in names},
        )


@dataclass(frozen=True)
class Panel:
    """The groups that were evaluated alike, so that their numbers compare."""

    evaluation: Evaluation
    groups: tuple[Group, ...]
    baseline: Group | None = None


def on_curve(curve: Curve, metric: str) -> dict[int, Point]:
    """The points of `curve` that have a step and `metric`, by step."""
    return {p.step: p for p in curve.points if p.step is not None and metric in p.metrics}


def arrange(curves: Iterable[Curve], baseline: str | None = None) -> list[Panel]:
    """Panels in the order of their first curves, the baseline's group first in each.

    The baseline is the group of run `baseline`; without one, the only group that pre-trains without labels, if there
    is but one.
    """
    by_evaluation: dict[Evaluation, list[Curve]] = {}
    for curve in curves:
        by_evaluation.setdefault(curve.evaluation, []).append(curve)
    panels = []
    for evaluation, members in by_evaluation.items():
        groups = join_seeds(members)
        chosen = _baseline(groups, baseline)
        groups.sort(key=lambda group: group is not chosen)
        panels.append(Panel(evaluation, tuple(groups), chosen))
    return panels


def join_seeds(curves: list[Curve]) -> list[Group]:
    """Groups in the order of their first runs. Two runs of one seed are two groups: nothing is averaged twice."""
    joined: list[list[Curve]] = []
    for curve in curves:
        for members in joined:
            first = members[0]
            alike = (first.method, first.settings, first.published) == (
                curve.method,
                curve.settings,
                curve.published,
            )
            if alike and not curve.published and curve.seed not in [member.seed for member in members]:
                members.append(curve)
                break
        else:
            joined.append([curve])
    return [Group(_name(members, joined), tuple(members)) for members in joined]


def _name(members: list[Curve], joined: list[list[Curve]]) -> str:
    """The method; beside another group of that method also the settings in which they differ, or the run's name."""
    first = members[0]
    if first.published:
        return f"{first.method} (paper)"
    rivals = [other[0] for other in joined if other[0].method == first.method and not other[0].published]
    if len(rivals) == 1:
        return first.method
    tables = [dict(rival.settings) for rival in rivals]
    own = dict(first.settings)
    keys = [key for key in own if any(table.get(key) != own[key] for table in tables)]
    names = ", ".join(f"{key.rpartition('.')[2]} {own[key]}" for key in keys[:3])
    unique = sum(all(table.get(key) == own[key] for key in keys[:3]) for table in tables) == 1
    return f"{first.method}, {names}" if unique else f"{first.method}, {first.run}"


def _baseline(groups: list[Group], run: str | None) -> Group | None:
    if run is not None:
        place = Path(run).resolve()
        return next((g for g in groups if place in [Path(curve.run).resolve() for curve in g.curves]), None)
    without = [group for group in groups if not group.supervised and not group.published]
    if not without:
        without = [group for group in groups if not group.supervised]
    return without[0] if len(without) == 1 else None


def choose_metrics(panels: list[Panel], asked: list[str], default: tuple[str, ...]) -> list[str]:
    """The metrics to report: those `asked` for, else the first of `default` that there is, else any.

    Raises ConfigError, naming those there are, for one that nothing was measured by.
    """
    points = (p for panel in panels for group in panel.groups for curve in group.curves for p in curve.points)
    there = list(dict.fromkeys(name for point in points for name in point.metrics))
    for metric in asked:
        if metric not in there:
            raise ConfigError(
                f"nothing here was measured by --metric {metric}; there is {', '.join(sorted(there))}"
            )
    return asked or [next(metric for metric in (*default, *there) if metric in there)]
