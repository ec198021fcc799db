"""Compute saved: what a method had cost when it was first as good as the baseline's best, as a share of the baseline.

    share = cost of the method at its first crossing of the baseline's best accuracy / cost of the whole baseline

The paper gives such percentages and not the rule behind them; this one is stated, and so is how much hangs on it:
between two evaluated checkpoints accuracy is taken to be linear in the cost, and beside that stands the first
checkpoint that is at least as good, without any interpolation. Nothing is read into the time before the first
checkpoint: one that is already good enough counts where it stands, as an upper bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fastsuncet.commands.report.curves import COSTS, Curve, Evaluation, Point
from fastsuncet.commands.report.groups import Group, Panel, on_curve

MEASURED = tuple(cost for cost in COSTS if cost != "epochs")  # epochs of two methods are not the same work
MEAN_CURVE, MEAN_OF_SEEDS = "mean curve", "mean of seeds"
RULE = (
    "Linear: between the last checkpoint below the baseline's best and the first at or above it, accuracy is taken to "
    "be linear in the cost. First checkpoint: the first at or above, without interpolation."
)


def crossing(costs: Sequence[float], values: Sequence[float], target: float, *, linear: bool) -> float | None:
    """The cost at which `values` first reach `target`, None if they never do. `costs` ascend, one a value.

    `linear` interpolates from the value before, else it is the cost of the first value at or above. A first value that
    is good enough counts at its own cost: what came before it is not known.
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

    evaluation: Evaluation
    method: str
    baseline: str
    metric: str
    seed: str  # a seed's number, MEAN_CURVE or MEAN_OF_SEEDS
    cost: str  # of MEASURED
    target: float  # the baseline's best
    total: float  # the cost of the whole baseline: of its last evaluated checkpoint
    linear: float | None  # cost at the crossing; None: never reached
    checkpoint: float | None
    own: float  # cost at which the baseline itself was first this good
    at_first: bool = False  # the first checkpoint was already good enough: an upper bound
    reached: tuple[int, int] = (1, 1)  # seeds that reached it, of how many
    baseline_epochs: float | None = None

    def share(self, linear: bool = True) -> float | None:
        """Cost at the crossing over the baseline's, 1 for no saving; None: never reached."""
        cost = self.linear if linear else self.checkpoint
        return None if cost is None else cost / self.total

    @property
    def equivalent_epochs(self) -> float | None:
        """The crossing in epochs of the baseline, by the same cost."""
        share = self.share()
        return None if share is None or self.baseline_epochs is None else share * self.baseline_epochs


def savings(panel: Panel, metric: str) -> list[Saving]:
    """Every group of `panel` but the baseline against it: mean curve, seeds, mean of seeds, by every cost both have.

    Seeds that are not evaluated at the same checkpoints have no mean curve here: its end would be that of the least.
    """
    if panel.baseline is None:
        return []
    found = []
    for group in panel.groups:
        if group is panel.baseline or group.published != panel.baseline.published:
            continue
        for cost in MEASURED:
            found += _by_cost(panel, group, metric, cost)
    return found


def _by_cost(panel: Panel, group: Group, metric: str, cost: str) -> list[Saving]:
    base = panel.baseline
    means = (group.with_metric(metric), base.with_metric(metric))
    seeds = len(group.curves)
    seed = "-" if group.published else str(group.curves[0].seed)
    whole = not group.uneven(metric) and not base.uneven(metric)
    if whole:
        mean = _compare(panel, group, metric, cost, *means, MEAN_CURVE if seeds > 1 else seed)
        if mean is None or seeds == 1:
            return [mean] if mean else []
    singles = []
    for curve in group.curves:
        rival = next((c for c in base.curves if c.seed == curve.seed), None)
        theirs = _points(rival, metric) if rival else means[1] if whole else []
        one = _compare(panel, group, metric, cost, _points(curve, metric), theirs, str(curve.seed))
        singles += [one] if one else []
    if not whole:
        return singles
    return [mean, *singles, _mean_of(singles)] if singles else [mean]


def _points(curve: Curve, metric: str) -> list[Point]:
    return [point for _, point in sorted(on_curve(curve, metric).items())]


def _compare(panel, group, metric, cost, ours: list[Point], theirs: list[Point], seed: str) -> Saving | None:
    """None where a side has no point with that cost."""
    ours, theirs = ([p for p in points if cost in p.costs] for points in (ours, theirs))
    if not ours or not theirs:
        return None
    (x, y), (base_x, base_y) = (
        ([p.costs[cost] for p in points], [p.metrics[metric] for p in points]) for points in (ours, theirs)
    )
    target = max(base_y)
    return Saving(
        evaluation=panel.evaluation,
        method=group.name,
        baseline=panel.baseline.name,
        metric=metric,
        seed=seed,
        cost=cost,
        target=target,
        total=base_x[-1],
        linear=crossing(x, y, target, linear=True),
        checkpoint=crossing(x, y, target, linear=False),
        own=crossing(base_x, base_y, target, linear=False),
        at_first=y[0] >= target,
        reached=(int(max(y) >= target), 1),
        baseline_epochs=theirs[-1].costs.get("epochs"),
    )


def _mean_of(singles: list[Saving]) -> Saving:
    """The mean over the seeds; none where a seed never reached the baseline's best, for there is no mean with never."""
    total = fmean(s.total for s in singles)
    counts = sum(s.linear is not None for s in singles)
    whole = counts == len(singles)
    shares = {
        linear: fmean(s.share(linear) for s in singles) * total if whole else None for linear in (True, False)
    }
    return Saving(
        **{
            **vars(singles[0]),
            "seed": MEAN_OF_SEEDS,
            "target": fmean(s.target for s in singles),
            "total": total,
            "linear": shares[True],
            "checkpoint": shares[False],
            "own": fmean(s.own / s.total for s in singles) * total,
            "at_first": any(s.at_first for s in singles),
            "reached": (counts, len(singles)),
        }
    )
