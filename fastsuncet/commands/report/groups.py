"""Group the curves that can be compared: runs that differ only in their seed are one group."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fastsuncet.commands.report.curves import COSTS, Curve, Measurement, Point
from fastsuncet.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """The runs of one experiment in one measurement: a curve for each seed."""

    name: str  # the method, and what distinguishes it from another group of that method
    curves: tuple[Curve, ...]

    @property
    def published(self) -> bool:
        """Whether this is the paper's."""
        return self.curves[0].published

    @property
    def supervised(self) -> bool:
        """Whether pre-training used labels."""
        return self.curves[0].supervised

    def mean_curve(self, metric: str) -> list[Point]:
        """Return a point for every step that all seeds have, with costs and metrics averaged over them."""
        mean = []
        for points in self._common(metric):
            costs = {c: fmean(p.costs[c] for p in points) for c in COSTS if all(c in p.costs for p in points)}
            names = [m for m in points[0].metrics if all(m in p.metrics for p in points)]
            mean.append(Point(points[0].step, costs, {m: fmean(p.metrics[m] for p in points) for m in names}))
        return mean

    def spread(self, metric: str) -> list[tuple[float, float, float]]:
        """Return (mean, lowest, highest) of `metric` over the seeds, for each point of the mean curve."""
        values = [[point.metrics[metric] for point in points] for points in self._common(metric)]
        return [(fmean(v), min(v), max(v)) for v in values]

    def _common(self, metric: str) -> list[list[Point]]:
        """Return the points of all seeds at each step that all of them were evaluated at."""
        tables = [points_by_step(curve, metric) for curve in self.curves]
        steps = sorted(set.intersection(*(set(table) for table in tables)))
        return [[table[step] for table in tables] for step in steps]

    def uneven(self, metric: str) -> str:
        """Return a note if the seeds were not evaluated at the same checkpoints, so that the mean curve lacks some."""
        counts = [len(points_by_step(curve, metric)) for curve in self.curves]
        common = len(self._common(metric))
        if common == max(counts):
            return ""
        each = ", ".join(f"{curve.seed}: {count}" for curve, count in zip(self.curves, counts))
        return (
            f"averaged at {common} of {max(counts)} checkpoints, those that all seeds have (seed {each}), so there is "
            "no compute saved of the mean"
        )


@dataclass(frozen=True)
class Panel:
    """The groups of one measurement, whose numbers can be compared."""

    measurement: Measurement
    groups: tuple[Group, ...]
    baseline: Group | None = None


def points_by_step(curve: Curve, metric: str) -> dict[int, Point]:
    """Return the points of `curve` that have a step and `metric`, ascending by step."""
    found = {p.step: p for p in curve.points if p.step is not None and metric in p.metrics}
    return dict(sorted(found.items()))


def arrange(curves: Iterable[Curve], baseline: str | None = None) -> list[Panel]:
    """Return the panels in the order of their first curves, the baseline's group first in each.

    The baseline is the group of run `baseline`; without one, the only group that pre-trains without labels.
    """
    measured: dict[Measurement, list[Curve]] = {}
    for curve in curves:
        measured.setdefault(curve.measurement, []).append(curve)
    panels = []
    for measurement, members in measured.items():
        groups = join_seeds(members)
        chosen = _baseline(groups, baseline)
        groups.sort(key=lambda group: group is not chosen)
        panels.append(Panel(measurement, tuple(groups), chosen))
    return panels


def join_seeds(curves: list[Curve]) -> list[Group]:
    """Return groups in the order of their first runs. Two runs of one seed are two groups, so none is counted twice."""
    joined: list[list[Curve]] = []
    for curve in curves:
        for members in joined:
            first = members[0]
            alike = (first.method, first.settings) == (curve.method, curve.settings)
            published = first.published or curve.published
            if alike and not published and curve.seed not in [member.seed for member in members]:
                members.append(curve)
                break
        else:
            joined.append([curve])
    return [Group(_name(members[0], joined), tuple(members)) for members in joined]


def _name(first: Curve, joined: list[list[Curve]]) -> str:
    """Return the method; if another group has it too, with the settings that differ, or with the run's name."""
    if first.published:
        return f"{first.method} (paper)"
    rivals = [other[0] for other in joined if other[0].method == first.method and not other[0].published]
    if len(rivals) == 1:
        return first.method
    tables = [dict(rival.settings) for rival in rivals]
    own = dict(first.settings)
    keys = [key for key in own if any(table.get(key) != own[key] for table in tables)][:3]
    unique = sum(all(table.get(key) == own[key] for key in keys) for table in tables) == 1
    if not unique:
        return f"{first.method}, {first.run}"
    return f"{first.method}, " + ", ".join(f"{key.rpartition('.')[2]} {own[key]}" for key in keys)


def _baseline(groups: list[Group], run: str | None) -> Group | None:
    if run is not None:
        home = Path(run).resolve()
        return next((g for g in groups if home in [Path(curve.run).resolve() for curve in g.curves]), None)
    without = [group for group in groups if not group.supervised]
    without = [group for group in without if not group.published] or without
    return without[0] if len(without) == 1 else None


def choose_metrics(panels: list[Panel], asked: list[str], default: tuple[str, ...]) -> list[str]:
    """Return the metrics to report: those `asked` for, else the first of `default` that was measured, else any.

    Raises ConfigError, with the metrics there are, for one that nothing was measured by.
    """
    points = (p for panel in panels for group in panel.groups for curve in group.curves for p in curve.points)
    there = list(dict.fromkeys(name for point in points for name in point.metrics))
    for metric in asked:
        if metric not in there:
            raise ConfigError(
                f"nothing here was measured by --metric {metric}; there is {', '.join(sorted(there))}"
            )
    return asked or [next(metric for metric in (*default, *there) if metric in there)]
