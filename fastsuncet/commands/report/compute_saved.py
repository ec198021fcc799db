"""Compute saved: what a method had cost when it was first as good as the baseline's best, as a share of the baseline.

    share = cost of the method at its first crossing of the baseline's best accuracy / cost of the whole baseline

The paper gives such percentages without the rule behind them. The report gives two: accuracy is linear in the cost
between two evaluated checkpoints, or the first checkpoint that is at least as good counts, without interpolation.
Nothing is assumed about the time before the first checkpoint: if that is good enough, its cost is an upper bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from fastsuncet.commands.report.curves import COSTS, Measurement, Point
from fastsuncet.commands.report.groups import Group, Panel, points_by_step

MEASURED = tuple(cost for cost in COSTS if cost != "epochs")  # epochs of two methods are not the same work
MEAN_CURVE, MEAN_OF_SEEDS = "mean curve", "mean of seeds"
RULE = (
    "Linear: between the last checkpoint below the baseline's best and the first at or above it, accuracy is taken to "
    "be linear in the cost. First checkpoint: the first at or above, without interpolation."
)


def crossing(costs: Sequence[float], values: Sequence[float], target: float, *, linear: bool) -> float | None:
    """Return the cost at which `values` first reach `target`, None if they never do. `costs` ascend.

    `linear` interpolates from the value before, otherwise it is the cost of the first value at or above. A first value
    that is good enough counts at its own cost, since what came before it is not known.
    """
    for i, (cost, value) in enumerate(zip(costs, values)):
        if value >= target:
            if i == 0 or not linear:
                return cost
            share = (target - values[i - 1]) / (value - values[i - 1])
            return costs[i - 1] + share * (cost - costs[i - 1])
    return None


@dataclass(frozen=True)
class Saving:
    """One method against the baseline, by one cost, for one seed or over all of them."""

    measurement: Measurement
    method: str
    baseline: str
    metric: str
    seed: str  # a seed's number, MEAN_CURVE or MEAN_OF_SEEDS
    cost: str  # of MEASURED
    target: float  # the baseline's best
    total: float  # the cost of the whole baseline: of its last evaluated checkpoint
    linear: float | None  # cost at the crossing; None: never reached
    checkpoint: float | None  # the same by the other rule; None exactly where `linear` is
    own: float  # cost at which the baseline itself was first this good
    at_first: bool  # the first checkpoint was already good enough: an upper bound
    reached: tuple[int, int]  # seeds that reached it, of how many
    baseline_epochs: float | None

    @property
    def shares(self) -> tuple[float, float] | None:
        """The cost at the crossing over the baseline's, by both rules, linear first; None: never reached."""
        if self.linear is None or self.checkpoint is None:
            return None
        return self.linear / self.total, self.checkpoint / self.total

    @property
    def equivalent_epochs(self) -> float | None:
        """The crossing in epochs of the baseline, by the same cost."""
        if self.shares is None or self.baseline_epochs is None:
            return None
        return self.shares[0] * self.baseline_epochs


def savings(panel: Panel, metric: str) -> list[Saving]:
    """Compare every group of `panel` with the baseline: mean curve, seeds, mean of seeds, by every cost both have.

    Seeds that were not evaluated at the same checkpoints have no mean curve here: it would end with the shortest.
    """
    base = panel.baseline
    if base is None:
        return []
    found = []
    for group in panel.groups:
        if group is not base and group.published == base.published:
            for cost in MEASURED:
                found += _by_cost(panel.measurement, base, group, metric, cost)
    return found


def _by_cost(measurement: Measurement, base: Group, group: Group, metric: str, cost: str) -> list[Saving]:
    def compare(ours: list[Point], theirs: list[Point], seed: str) -> list[Saving]:
        """Return one comparison, or none where a side has no point with that cost."""
        ours, theirs = ([p for p in points if cost in p.costs] for points in (ours, theirs))
        if not ours or not theirs:
            return []
        (x, y), (base_x, base_y) = (
            ([p.costs[cost] for p in points], [p.metrics[metric] for p in points])
            for points in (ours, theirs)
        )
        target = max(base_y)
        return [
            Saving(
                measurement=measurement,
                method=group.name,
                baseline=base.name,
                metric=metric,
                seed=seed,
                cost=cost,
                target=target,
                total=base_x[-1],
                linear=crossing(x, y, target, linear=True),
                checkpoint=crossing(x, y, target, linear=False),
                own=base_x[base_y.index(target)],
                at_first=y[0] >= target,
                reached=(int(max(y) >= target), 1),
                baseline_epochs=theirs[-1].costs.get("epochs"),
            )
        ]

    ours, theirs = group.mean_curve(metric), base.mean_curve(metric)
    even = not group.uneven(metric) and not base.uneven(metric)
    mean, singles = [], []
    if even:
        alone = len(group.curves) == 1
        own_seed = "-" if group.published else str(group.curves[0].seed)
        mean = compare(ours, theirs, own_seed if alone else MEAN_CURVE)
        if alone or not mean:
            return mean
    for curve in group.curves:
        rival = next((c for c in base.curves if c.seed == curve.seed), None)
        against = list(points_by_step(rival, metric).values()) if rival else theirs if even else []
        singles += compare(list(points_by_step(curve, metric).values()), against, str(curve.seed))
    return [*mean, *singles, _mean_of(singles)] if mean and singles else [*mean, *singles]


def _mean_of(singles: list[Saving]) -> Saving:
    """Return the mean over the seeds; "never reached" if that is so for one of them."""
    total = fmean(s.total for s in singles)
    shares = [s.shares for s in singles if s.shares is not None]
    whole = len(shares) == len(singles)
    return replace(
        singles[0],
        seed=MEAN_OF_SEEDS,
        target=fmean(s.target for s in singles),
        total=total,
        linear=fmean(linear for linear, _ in shares) * total if whole else None,
        checkpoint=fmean(checkpoint for _, checkpoint in shares) * total if whole else None,
        own=fmean(s.own / s.total for s in singles) * total,
        at_first=any(s.at_first for s in singles),
        reached=(len(shares), len(singles)),
    )
