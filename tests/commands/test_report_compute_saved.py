"""Compute saved: crossings by hand, and the paper's own percentages."""

from dataclasses import replace

import pytest

from fastsuncet.commands.report import paper
from fastsuncet.commands.report.compute_saved import Saving, bound, cell, savings
from fastsuncet.commands.report.curves import LENGTHS, Curve, Measurement, Point, arrange, join_lengths

MEASUREMENT = Measurement("finetune", "10 % labels")
OURS_NAME = "SimCLR + SuNCEt"


def curve(method: str, accuracies: list[float], per_step: float = 1.0, seed: int = 0) -> Curve:
    """Return a curve evaluated every 10 updates, each of `per_step` petaFLOPs and a tenth of an epoch."""
    points = tuple(
        Point(s, {"epochs": s / 10, "updates": s, "petaflops": per_step * s}, {"top1": a})
        for s, a in ((10 * (i + 1), a) for i, a in enumerate(accuracies))
    )
    supervised = method != "SimCLR"
    return Curve(f"{method} {seed}", method, seed, MEASUREMENT, points, supervised, (("method", method),))


def saved(theirs: list[list[float]], ours: list[list[float]], per_step: float = 1.0) -> list[Saving]:
    """Compare SuNCEt with SimCLR; each seed is a list of accuracies."""
    runs = [curve("SimCLR", a, seed=seed) for seed, a in enumerate(theirs)]
    (panel,) = arrange([*runs, *(curve(OURS_NAME, a, per_step, seed) for seed, a in enumerate(ours))])
    return savings(panel, "top1")


def by(found: list[Saving], cost: str, rule: str) -> list[Saving]:
    return [s for s in found if (s.cost, s.rule) == (cost, rule)]


def test_savings_by_both_rules_and_every_cost():
    # SimCLR's best, 0.6, is at 30 of its 40 updates, its final accuracy 0.5; ours costs 1.5 times the FLOPs an update.
    found = saved([[0.3, 0.5, 0.6, 0.5]], [[0.4, 0.8, 0.9]], per_step=1.5)
    (final,), (best,) = by(found, "updates", "final"), by(found, "updates", "best")
    assert (final.target, final.reference, best.target, best.reference) == (0.5, 40, 0.6, 30)
    assert final.shares == pytest.approx((12.5 / 40, 20 / 40))
    assert best.shares == pytest.approx((15 / 30, 20 / 30))
    (flops,) = by(found, "petaflops", "best")
    assert flops.shares == pytest.approx((22.5 / 30, 30 / 30))
    assert flops.baseline_epochs == 3
    assert not best.reference_at_first
    # The baseline is at its best at its first checkpoint, or was before.
    for ours, word in (([0.7], "about "), ([0.5, 0.7], "at least ")):
        assert bound(by(saved([[0.6, 0.5]], [ours]), "updates", "best")) == word
    assert "epochs" not in {s.cost for s in found}, "epochs of two methods are not the same work"


def test_cell_says_how_many_seeds_reached_it():
    for theirs, ours, said in (
        ([[0.6]], [[0.1, 0.59]], "0 of 1 seeds reached it"),
        ([[0.6]], [[0.1, 0.6]], "200.0 %; 1 of 1 seeds reached it"),
        # The first of several crossings.
        ([[0.5, 0.6]], [[0.4, 0.8, 0.1, 0.9]], "75.0 %, first checkpoint 100.0 %; 1 of 1 seeds reached it"),
        ([[0.5, 0.6]], [[0.7]], "at most 50.0 %; 1 of 1 seeds reached it"),
        ([[0.4, 0.6]], [[0.3, 0.5, 0.7]], "125.0 %, first checkpoint 150.0 %; 1 of 1 seeds reached it"),
        # Each seed against the baseline's run of that seed.
        ([[0.4, 0.6], [0.4, 0.5]], [[0.6, 0.7], [0.3, 0.7]],
         "at most 62.5 % (50.0 to 75.0), first checkpoint 75.0 %; 2 of 2 seeds reached it"),
        # No percentage unless most seeds got there: one of two is not enough, two of three are.
        ([[0.4, 0.6]] * 2, [[0.5, 0.7], [0.3, 0.4]], "1 of 2 seeds reached it"),
        ([[0.4, 0.6]] * 3, [[0.5, 0.7], [0.3, 0.4], [0.5, 0.7]],
         "75.0 %, first checkpoint 100.0 %; 2 of 3 seeds reached it"),
        # A seed that the baseline lacks is compared with the baseline's mean, 0.6 at 20 updates.
        ([[0.4, 0.7], [0.4, 0.5]], [[0.5, 0.9], [0.5, 0.9], [0.5, 0.7]],
         "at most 66.7 % (50.0 to 75.0), first checkpoint 83.3 %; 3 of 3 seeds reached it"),
        # ... unless its seeds were not evaluated alike: that mean would end with the shortest.
        ([[0.4, 0.6], [0.4]], [[0.6], [0.4], [0.9]], "at most 75.0 % (50.0 to 100.0); 2 of 2 seeds reached it"),
    ):  # fmt: skip
        assert cell(by(saved(theirs, ours), "updates", "final")) == said


def test_join_lengths_makes_one_curve_of_the_ends_of_a_seed():
    lengths = {"40": [0.2, 0.3, 0.4, 0.6], "10": [0.3, 0.4], "20": [0.3, 0.5]}
    runs = [
        replace(curve("SimCLR", tops, seed=seed), run=f"{length}-{seed}", settings=((LENGTHS[0], length),))
        for length, tops in lengths.items()
        for seed in (0, 1)
    ]
    ours = replace(curve(OURS_NAME, [0.5, 0.7]), settings=((LENGTHS[0], "40"), ("method", OURS_NAME)))
    stopped = replace(runs[0], stopped="20 of 80 updates", settings=((LENGTHS[0], "80"),))
    *joined, last = join_lengths([*runs, stopped, ours])
    assert last == ours, "of one length: whole"
    for seed, one in enumerate(joined):
        assert (one.seed, one.run, one.merged) == (seed, f"40-{seed}", (f"10-{seed}", f"20-{seed}"))
        assert [p.metrics["top1"] for p in one.points] == [0.4, 0.5, 0.6] and not one.settings
    (panel,) = arrange([*joined, last], "10-0")  # a run of another length than the curve's last
    assert panel.baseline is not None and panel.baseline.curves[0] == joined[0]


CLAIMS = "\n".join(paper.claims())


@pytest.mark.parametrize("figure", [paper.TEN, paper.ONE])
@pytest.mark.parametrize("metric", ["top1", "top5"])
def test_claims_table_is_what_the_rule_makes_of_the_papers_points(figure, metric):
    (panel,) = arrange(paper.curves(figure))
    found = {s.cost: s for s in savings(panel, metric) if s.rule == "best"}
    printed = paper.printed_savings()[found["updates"].method, str(panel.measurement), metric]
    cells = [f"{printed:g}"]
    for cost in ("petaflops", "updates"):
        bound = "at most " if found[cost].at_first else ""
        cells += [f"{bound}{100 * share:.1f}" for share in found[cost].shares]
    assert f"| {figure}, {metric} | {' | '.join(cells)} |" in CLAIMS


def test_paper_points_have_a_source_and_a_value_or_a_note():
    points = paper.load()
    # Every experiment of the paper, and PAWS's two tables.
    assert {p.row for p in points} == set(range(1, 31))
    assert all(p.source for p in points)
    assert all(p.note for p in points if p.value is None)
    drawn = [p for p in points if p.drawn]
    assert all(p.value is not None for p in drawn)
    keys = [(p.figure, p.method, p.labels, p.epochs, p.kind, p.metric) for p in drawn]
    assert len(keys) == len(set(keys)), "one point for each method, epochs and metric"
