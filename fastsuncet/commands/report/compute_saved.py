"""Compute saved: what a method costs until it is as good as the baseline, by two rules that are always given together.

    final    cost until the baseline's final accuracy    /  cost of the whole baseline
    best     cost until the baseline's best accuracy     /  cost at which the baseline itself first had it

The paper gives such percentages without the rule behind them. A cost "until" an accuracy is read in two ways: accuracy
is linear in the cost between two evaluated checkpoints, or the first checkpoint that is at least as good counts.
Nothing is assumed about the time before the first checkpoint: if that is good enough, its cost is an upper bound.

The cost is that of the pre-training, also behind a fine-tuned accuracy: multiply-adds of an update (models/flops.py,
`update_macs`), summed by the run (metrics/cost.py, `Ledger`) and read with its results (reading.py, `point`). The
baseline is the only group without labels and from scratch, unless one is named (curves.py, `arrange`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fastsuncet.commands.report.curves import COSTS, Measurement, Panel

MEASURED = tuple(cost for cost in COSTS if cost != "epochs")  # epochs of two methods are not the same work
RULES = {"final": "final accuracy, % of its whole cost", "best": "best, % of its own cost until then"}


def crossing(costs: Sequence[float], values: Sequence[float], target: float) -> tuple[float, float] | None:
    """Return the costs at which `values` first reach `target`, None if they never do. `costs` ascend.

    The first interpolates from the value before, the second is that of the first value at or above. A first value that
    is good enough counts at its own cost, since what came before it is not known.
    """
    for i, (cost, value) in enumerate(zip(costs, values)):
        if value >= target:
            if i == 0:
                return cost, cost
            share = (target - values[i - 1]) / (value - values[i - 1])
            return costs[i - 1] + share * (cost - costs[i - 1]), cost
    return None


def target(costs: Sequence[float], values: Sequence[float], rule: str) -> tuple[int, float, float]:
    """Return (position on the curve, accuracy, cost) of the baseline that `rule` of RULES compares with."""
    position = len(values) - 1 if rule == "final" else values.index(max(values))
    return position, values[position], costs[position]


@dataclass(frozen=True)
class Saving:
    """One seed of a method against the baseline, by one rule and one cost."""

    measurement: Measurement
    method: str
    baseline: str
    metric: str
    seed: int | None  # None: the paper's
    cost: str  # of MEASURED
    rule: str  # of RULES
    target: float  # the baseline's final or best accuracy
    reference: float  # the baseline's cost of it
    needed: tuple[float, float] | None  # the method's costs until the target, as `crossing`
    at_first: bool  # the first checkpoint was already good enough: an upper bound
    reference_at_first: bool  # the baseline was at its best at its first of several: so is the reference
    baseline_epochs: float | None  # at the reference

    @property
    def shares(self) -> tuple[float, float] | None:
        """The cost over the reference, linear and at the first checkpoint; None: never reached."""
        return self.needed and (self.needed[0] / self.reference, self.needed[1] / self.reference)


def savings(panel: Panel, metric: str) -> list[Saving]:
    """Compare every seed of every group with the baseline's run of that seed, by every cost both have and each rule.

    Where the baseline has no such seed, the seed is compared with the baseline's mean; if the baseline's seeds were not
    evaluated alike, it is left out, because that mean would end with the shortest.
    """
    base = panel.baseline
    if base is None:
        return []
    mean = [] if base.uneven(metric) else [(p.costs, p.mean(metric)) for p in base.common(metric)]
    runs = {c.seed: [(p.costs, p.metrics[metric]) for p in c.at_steps(metric)] for c in base.curves}
    rivals = [group for group in panel.groups if base.rivals(group)]
    found = []
    for group, cost, rule in itertools.product(rivals, MEASURED, RULES):
        for curve in group.curves:
            ours = [(p.costs[cost], p.metrics[metric]) for p in curve.at_steps(metric) if cost in p.costs]
            theirs = [(costs, value) for costs, value in runs.get(curve.seed, mean) if cost in costs]
            if not ours or not theirs:
                continue
            x, y = zip(*ours)
            position, wanted, reference = target([c[cost] for c, _ in theirs], [v for _, v in theirs], rule)
            found.append(
                Saving(
                    measurement=panel.measurement,
                    method=group.name,
                    baseline=base.name,
                    metric=metric,
                    seed=curve.seed,
                    cost=cost,
                    rule=rule,
                    target=wanted,
                    reference=reference,
                    needed=crossing(x, y, wanted),
                    at_first=y[0] >= wanted,
                    reference_at_first=rule == "best" and position == 0 and len(theirs) > 1,
                    baseline_epochs=theirs[position][0].get("epochs"),
                )
            )
    return found


def reached(seeds: Sequence[Saving]) -> tuple[list[float], str]:
    """Return the shares of the seeds that got there, empty unless most did, and "k of n seeds reached it"."""
    there = [s.shares[0] for s in seeds if s.shares]
    said = f"{len(there)} of {len(seeds)} seeds reached it"
    return there if 2 * len(there) > len(seeds) else [], said


def percent(shares: Sequence[float], digits: int = 1, unit: str = " %") -> str:
    """Return the mean of some shares in %, with their range if they differ: "51.0 % (44.0 to 56.0)"."""
    mean, low, high = (f"{100 * v:.{digits}f}" for v in (fmean(shares), min(shares), max(shares)))
    return f"{mean}{unit}" if low == high else f"{mean}{unit} ({low} to {high})"


def bound(seeds: Sequence[Saving]) -> str:
    """Return what is before the share of some seeds: "" where both costs of all are known, else what it bounds."""
    ours, theirs = any(s.at_first for s in seeds), any(s.reference_at_first for s in seeds)
    return ("about " if theirs else "at most ") if ours else "at least " if theirs else ""


def cell(seeds: Sequence[Saving], digits: int = 1, *, first_checkpoint: bool = True) -> str:
    """Return one rule and cost in words: "50.0 % (44.0 to 56.0), first checkpoint 66.7 %; 2 of 2 seeds reached it"."""
    there, said = reached(seeds)
    published = any(s.seed is None for s in seeds)
    if not there:
        return "never reached" if published else said
    checkpoint = fmean(s.shares[1] for s in seeds if s.shares)
    without = f", first checkpoint {100 * checkpoint:.1f} %" if checkpoint > fmean(there) else ""
    shown = f"{bound(seeds)}{percent(there, digits)}{without * first_checkpoint}"
    return shown if published else f"{shown}; {said}"
