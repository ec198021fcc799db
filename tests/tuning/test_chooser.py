"""The choice is a function of proofs and times: fake reports in, values out."""

import pytest

from fastsuncet.tuning.chooser import BASE, CONTENDER, PLAIN, Report, Rung, climb, judge

FUSED, GRAPH = (
    Rung("fused", {"model.fused_batchnorm": True}),
    Rung("graph", {"meta.cuda_graph": True}, exact=True),
)
COST = Rung("not deterministic", {"meta.deterministic": False}, adopted=False)
NOISE = (1.0, 1.01, 0.99)


def report(contender: float, base: float | None = None, noise=NOISE, **more) -> Report:
    """Return a rank's report: plain takes a second a step, and each side has the same noise."""
    sides = {PLAIN: 1.0, CONTENDER: contender, **({} if base is None else {BASE: base})}
    return Report(
        seconds={side: [seconds * n for n in noise] for side, seconds in sides.items()}, views=8, **more
    )


@pytest.mark.parametrize(
    ("reports", "won", "problem"),
    [
        pytest.param([report(0.8)], True, None, id="a win"),
        pytest.param([report(1.2)], False, None, id="a loss"),
        pytest.param([report(1.0)], False, None, id="a tie"),
        pytest.param([report(0.98)], False, None, id="less than the margin"),
        pytest.param([report(0.8, base=0.79)], False, None, id="slower than what won before"),
        pytest.param([Report(problem="other bits")], False, "other bits", id="a failing proof"),
        pytest.param(
            [Report(problem="OutOfMemoryError: CUDA")], False, "OutOfMemoryError: CUDA", id="out of memory"
        ),
        pytest.param([Report(problem="not done after 60 s")], False, "not done after 60 s", id="a hang"),
        pytest.param(
            [report(0.8), Report(problem="was killed by SIGKILL")],
            False,
            "rank 1: was killed by SIGKILL",
            id="one rank",
        ),
        pytest.param(
            [report(0.8), report(0.8, noise=(1.0,))],
            False,
            "the ranks disagree about what they timed",
            id="other turns",
        ),
        pytest.param([report(0.8), report(1.1)], False, None, id="the slowest rank counts"),
        pytest.param([report(0.8), report(0.9)], True, None, id="two ranks"),
        pytest.param([report(0.8, memory_left=0.09)], True, None, id="enough memory"),
        pytest.param(
            [report(0.8, memory_left=0.5), report(0.8, memory_left=0.05)],
            False,
            "leaves 5% of the memory free, 8% are needed",
            id="too little memory on one rank",
        ),
    ],
)
def test_judge(reports, won, problem):
    verdict = judge(FUSED, FUSED.values, reports)
    assert (verdict.won, verdict.problem) == (won, problem)


def test_judge_takes_no_gain_within_the_spread_of_plain():
    """A quarter faster in the median, and plain was as fast as that in one turn: this machine cannot tell."""
    seconds = {PLAIN: [1.0, 0.7, 1.1, 1.0, 1.2], CONTENDER: [0.8] * 5}
    assert not judge(FUSED, FUSED.values, [Report(seconds=seconds)]).won
    seconds[PLAIN][1] = 0.85
    verdict = judge(FUSED, FUSED.values, [Report(seconds=seconds)])
    assert verdict.won and verdict.gain() == 1.25


def test_judge_never_adopts_what_is_measured_for_the_table():
    assert not judge(COST, COST.values, [report(0.5)]).won


def climbed(speeds: dict[str, float | str], rungs=(FUSED, GRAPH, COST), time_is_left=lambda: True):
    """Climb with contenders that take so many seconds a step (plain: 1), or have that problem; record the bases."""
    asked, best = [], [1.0]

    def measure(rung, base):
        asked.append((rung.name, dict(base)))
        seconds = speeds.get(rung.name, best[0])
        if isinstance(seconds, str):
            return [Report(problem=seconds)]
        before = best[0]
        best[0] = min(best[0], seconds)
        return [report(seconds, before)]

    return climb(rungs, measure, time_is_left), asked


def test_climb_tries_each_rung_on_those_that_won_and_all_with_the_loader():
    choice, asked = climbed(
        {"fused": 0.8, "graph": 0.7, "not deterministic": 0.6, "all of these, with the loader": 0.9}
    )
    both = FUSED.values | GRAPH.values
    assert asked == [
        ("fused", {}),
        ("graph", FUSED.values),
        ("not deterministic", both),
        ("all of these, with the loader", both),
    ]
    assert choice.values == both
    assert choice.best.rung == GRAPH and choice.best.gain() == pytest.approx(1 / 0.7)


def test_climb_leaves_out_what_fails_or_loses():
    choice, asked = climbed({"fused": "other bits", "graph": 0.8})
    assert choice.values == GRAPH.values and asked[1] == ("graph", {})
    choice, _ = climbed({"fused": 1.1, "graph": "not done after 60 s"})
    assert (choice.values, choice.best) == ({}, None)
    assert [verdict.problem for verdict in choice.verdicts] == [None, "not done after 60 s", None]


@pytest.mark.parametrize("whole", [1.1, "not done after 60 s"])
def test_climb_gives_up_what_is_slower_with_the_loader(whole):
    choice, _ = climbed({"fused": 0.8, "all of these, with the loader": whole})
    assert choice.values == {} and choice.best is None


def test_climb_needs_no_second_look_at_what_was_timed_with_the_loader():
    threads = Rung("threads", {"meta.threads": 2}, clock="loop")
    choice, asked = climbed({"threads": 0.8}, rungs=(threads,))
    assert choice.values == threads.values and len(asked) == 1


def test_climb_stops_when_the_time_is_up_and_keeps_what_won():
    left = iter([True, False, False, False])
    choice, asked = climbed({"fused": 0.8, "graph": 0.5}, time_is_left=lambda: next(left))
    assert choice.values == FUSED.values and len(asked) == 1
    assert [verdict.problem for verdict in choice.verdicts] == [None, *["not tried: no time left"] * 2]
