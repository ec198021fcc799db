"""The choice is a function of proofs and times: fake reports in, outcomes out."""

import pytest

from fastsuncet.tuning.chooser import Outcome, Rung, climb, judge

COMPILE, GRAPH = Rung("compile", {"meta.compile": True}), Rung("graph", {"meta.cuda_graph": True}, exact=True)
NOISE = (1.0, 1.01, 0.99)


def report(contender: float, noise=NOISE, **more) -> Outcome:
    """Return a rank's report, with the same noise on both sides."""
    sides = {"base": list(noise), "contender": [contender * n for n in noise]}
    return Outcome(**sides, **more)


ENDED = Outcome(problem="was killed by SIGKILL", final=False)


TIGHT = [report(0.8, memory_left=0.5), report(0.8, memory_left=0.05)]


@pytest.mark.parametrize(
    ("reports", "won", "problem"),
    [
        pytest.param([report(0.8)], True, None, id="a win"),
        pytest.param([report(1.2)], False, None, id="a loss"),
        pytest.param([report(0.98)], False, None, id="less than the margin"),
        pytest.param([report(0.8, noise=(1.0, 0.7, 1.1))], False, None, id="less than the noise"),
        pytest.param([Outcome(problem="other bits")], False, "other bits", id="a failing proof"),
        pytest.param([report(0.8), ENDED], False, "rank 1: was killed by SIGKILL", id="one rank"),
        pytest.param([ENDED, Outcome(problem="bits")], False, "rank 1: bits", id="the reason first"),
        pytest.param([report(0.8), report(1.1)], False, None, id="the slowest rank counts"),
        pytest.param([report(0.8), report(0.9)], True, None, id="two ranks"),
        pytest.param([report(0.8, memory_left=0.09)], True, None, id="enough memory"),
        pytest.param(TIGHT, False, "leaves 5% of the memory free, 8% are needed", id="too little memory"),
    ],
)
def test_judge(reports, won, problem):
    outcome = judge(reports)
    assert (outcome.won, outcome.problem) == (won, problem)


def climbed(speeds: dict[str, float | str], time_is_left=lambda: True):
    """Climb with contenders that take so many seconds a step, or have that problem; record the bases."""
    asked = []

    def compare(rung, base):
        asked.append((rung.name, dict(base)))
        seconds = speeds[rung.name]
        return judge([Outcome(problem=seconds) if isinstance(seconds, str) else report(seconds)])

    return list(climb((GRAPH, COMPILE), compare, time_is_left)), asked


@pytest.mark.parametrize(
    ("graph", "won", "base"),
    [(0.8, [True, True], GRAPH.values), (1.1, [False, True], {}), ("other bits", [False, True], {})],
)
def test_climb_tries_each_rung_on_those_that_won(graph, won, base):
    found, asked = climbed({"graph": graph, "compile": 0.7})
    assert [outcome.won for _, outcome in found] == won
    assert asked == [("graph", {}), ("compile", base)]


def test_climb_stops_when_the_time_is_up_and_keeps_what_won():
    left = iter([True, False])
    found, asked = climbed({"graph": 0.8}, time_is_left=lambda: next(left))
    assert found[0][1].won and found[1][1].problem == "not tried: no time left" and len(asked) == 1
