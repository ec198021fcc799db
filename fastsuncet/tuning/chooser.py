"""Decide which contender a run uses, from proofs and times alone: nothing here starts, measures or reads anything.

A rung is a set of config values. It is tried on top of what won before it, and it stays only if every rank's proof
holds, and if it is faster than that by `MARGIN` and by more than the noise of this machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

MARGIN = 1.03  # times as fast: less is not worth other bits
MEMORY_LEFT = 0.08  # of the card: less can end the run hours later
# What is timed in turns: without any rung; with those that won; with this one too.
PLAIN, BASE, CONTENDER = "plain", "base", "contender"

Values = dict[str, Any]  # dotted key of the config -> value


@dataclass(frozen=True)
class Rung:
    """One contender."""

    name: str
    values: Values
    # Time steps on a fixed batch, or steps that read their images, or nothing: only prove it.
    clock: Literal["step", "loop"] | None = "step"
    exact: bool = False  # its proof: the bits of the base
    adopted: bool = True  # False: measured for the table only


@dataclass(frozen=True)
class Report:
    """What the child of one rank found. JSON types only."""

    problem: str | None = None  # the proof that failed, or what ended the child
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)  # side -> seconds a step, by turn
    memory_left: float | None = None  # of the card, 0 to 1, while the contender trains
    views: int = 0  # of a step, on this rank


@dataclass(frozen=True)
class Verdict:
    """What became of a rung."""

    rung: Rung
    values: Values  # of the contender: the base's and the rung's
    problem: str | None = None
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of the slowest rank, by turn
    views: int = 0  # of a step, over all ranks
    won: bool = False

    def gain(self, over: str = PLAIN) -> float:
        """Return how many times as fast as another side: the median over the turns."""
        return median(a / b for a, b in zip(self.seconds[over], self.seconds[CONTENDER], strict=True))


def problem_of(reports: Sequence[Report]) -> str | None:
    """Return what is wrong on the first rank that has a problem: one rank's problem is a problem of all."""
    for rank, each in enumerate(reports):
        if each.problem:
            return f"rank {rank}: {each.problem}" if len(reports) > 1 else each.problem
    return None


def judge(rung: Rung, values: Values, reports: Sequence[Report]) -> Verdict:
    """Return the verdict on a rung from the reports of all ranks."""
    problem = problem_of(reports)
    left = min((each.memory_left for each in reports if each.memory_left is not None), default=1.0)
    if left < MEMORY_LEFT:
        problem = problem or f"leaves {left:.0%} of the memory free, {MEMORY_LEFT:.0%} are needed"
    if len({tuple(sorted((side, len(s)) for side, s in each.seconds.items())) for each in reports}) > 1:
        problem = problem or "the ranks disagree about what they timed"
    if problem:
        return Verdict(rung, values, problem)
    # Ranks wait for each other, so a step takes as long as the slowest one's.
    seconds = {
        side: [max(turn) for turn in zip(*(each.seconds[side] for each in reports), strict=True)]
        for side in reports[0].seconds
    }
    seconds.setdefault(BASE, seconds[PLAIN])
    verdict = Verdict(rung, values, None, seconds, sum(each.views for each in reports))
    faster = verdict.gain(BASE) >= MARGIN and median(seconds[CONTENDER]) < min(seconds[BASE])
    return replace(verdict, won=faster and rung.adopted)


@dataclass(frozen=True)
class Choice:
    """The values to train with, {} for plain, and how they were found."""

    values: Values
    verdicts: Sequence[Verdict]

    @property
    def best(self) -> Verdict | None:
        """The verdict with the times of the choice; None for plain."""
        return next((v for v in reversed(self.verdicts) if v.won and v.values == self.values), None)


def climb(
    rungs: Sequence[Rung],
    measure: Callable[[Rung, Values], Sequence[Report]],  # (rung, base) -> each rank's report
    time_is_left: Callable[[], bool],
    say: Callable[[Verdict], None] = lambda verdict: None,
) -> Choice:
    """Try the rungs in order, each on top of those that won, and return what to train with.

    What won on a fixed batch alone is tried once more with its loader, and given up if it is slower there.
    """
    base: Values = {}
    verdicts: list[Verdict] = []

    def attempt(rung: Rung) -> Verdict:
        values = {**base, **rung.values}
        if time_is_left():
            verdict = judge(rung, values, measure(rung, base))
        else:
            verdict = Verdict(rung, values, "not tried: no time left")
        verdicts.append(verdict)
        say(verdict)
        return verdict

    for rung in rungs:
        verdict = attempt(rung)
        if verdict.won:
            base = verdict.values
    if base and not any(v.won and v.rung.clock == "loop" for v in verdicts) and time_is_left():
        whole = attempt(Rung("all of these, with the loader", {}, clock="loop", adopted=False))
        if whole.problem or whole.gain() * MARGIN < 1:
            base = {}
    return Choice(base, verdicts)
