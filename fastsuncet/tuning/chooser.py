"""Decide which contender is used, from proofs and times alone: nothing here starts, measures or reads anything.

A rung is a set of config values. It is tried on top of what won before it, and it stays only if every rank's proof
holds, and if it is faster than that by `MARGIN` and by more than the noise of this machine.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

MARGIN = 1.03  # times as fast: less is not worth another path
MEMORY_LEFT = 0.08  # of the card: less can end the run hours later

Values = dict[str, Any]  # dotted key of the config -> value


@dataclass(frozen=True)
class Rung:
    """One contender."""

    name: str
    values: Values
    clock: Literal["step", "loop"] = "step"  # time steps on a fixed batch, or steps that read their images
    exact: bool = False  # its proof: the bits of the base


@dataclass(frozen=True)
class Outcome:
    """What became of a rung on one rank, or by `judge` on all. JSON types only."""

    problem: str | None = None  # the proof that failed, or what ended the child
    final: bool = True  # False: another try can end otherwise, as after a lack of memory
    base: Sequence[float] = (1.0,)  # seconds a step, by window; of several ranks the slowest one's
    contender: Sequence[float] = (1.0,)
    memory_left: float = 1.0  # of the card, 0 to 1, while the contender trains

    @property
    def gain(self) -> float:
        """How many times as fast as the base."""
        return median(self.base) / median(self.contender)

    @property
    def won(self) -> bool:
        """Whether it is faster by `MARGIN`, and in the median faster than any window of the base."""
        return not self.problem and self.gain >= MARGIN and median(self.contender) < min(self.base)


def judge(ranks: Sequence[Outcome]) -> Outcome:
    """Return what became of a rung from what became of it on each rank."""
    # What was proved wrong before what merely ended: ranks end each other.
    failed = [(not r.final, rank, r.problem) for rank, r in enumerate(ranks) if r.problem]
    if failed:
        ended, rank, problem = min(failed)
        where = f"rank {rank}: " if len(ranks) > 1 else ""
        return Outcome(f"{where}{problem}", final=not ended)
    left = min(each.memory_left for each in ranks)
    if left < MEMORY_LEFT:
        problem = f"leaves {left:.0%} of the memory free, {MEMORY_LEFT:.0%} are needed"
        return Outcome(problem, final=False)
    # Ranks wait for each other, so a step takes as long as the slowest one's.
    base = [max(window) for window in zip(*(each.base for each in ranks))]
    contender = [max(window) for window in zip(*(each.contender for each in ranks))]
    return Outcome(base=base, contender=contender)


def climb(
    rungs: Iterable[Rung],
    compare: Callable[[Rung, Values], Outcome],  # of a rung with a base
    time_is_left: Callable[[], bool],
) -> Iterator[tuple[Rung, Outcome]]:
    """Try the rungs in order, each on top of those that won, and yield what became of each."""
    base: Values = {}
    for rung in rungs:
        if time_is_left():
            outcome = compare(rung, base)
        else:
            outcome = Outcome("not tried: no time left", final=False)
        if outcome.won:
            base |= rung.values
        yield rung, outcome
