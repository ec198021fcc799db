"""Compute saved: crossings by hand, and the paper's own percentages."""

from dataclasses import replace

import pytest

from fastsuncet.commands.report import paper
from fastsuncet.commands.report.compute_saved import Saving, cell, savings
from fastsuncet.commands.report.curves import LENGTHS, Curve, Measurement, Point, arrange, join_lengths
from fastsuncet.models.flops import network_cost, petaflops

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
    assert "epochs" not in {s.cost for s in found}, "epochs of two methods are not the same work"


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
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
    ],
)  # fmt: skip
def test_cell_says_how_many_seeds_reached_it(theirs, ours, said):
    assert cell(by(saved(theirs, ours), "updates", "final")) == said


def as_runs(published: Curve, seed: int = 0) -> list[Curve]:
    """Return each point of a published curve as a run of that length, with an earlier and worse checkpoint."""
    runs, method = [], published.method
    for point in published.points:
        epochs = int(point.costs["epochs"])
        costs = {name: cost / 10 for name, cost in point.costs.items()}
        early = Point(1, costs, {name: value - 0.3 for name, value in point.metrics.items()})
        points = (early, replace(point, step=epochs * 100))
        settings = ((LENGTHS[0], str(epochs)), ("method", method))
        run = replace(published, seed=seed, points=points, settings=settings, published=False)
        runs.append(replace(run, run=f"{method}-{epochs}-{seed}"))
    return runs


def test_join_lengths_of_the_papers_runs_saves_what_its_curve_saves():
    published = paper.curves("imagenet-10pct")
    runs = [run for curve in published for run in as_runs(curve)]
    joined = join_lengths(runs)
    assert len(runs) == 9 and len(joined) == 2
    for ours, theirs in zip(joined, published):
        assert [(p.metrics, p.costs) for p in ours.points] == [(p.metrics, p.costs) for p in theirs.points]
    found, wanted = (
        {(s.cost, s.rule): s.shares for panel in arrange(curves) for s in savings(panel, "top1")}
        for curves in (joined, published)
    )
    assert found == wanted and found["petaflops", "best"][0] == pytest.approx(0.505, abs=0.001)


def test_join_lengths_keeps_seeds_apart_and_single_runs_whole():
    simclr, ours = paper.curves("imagenet-10pct")
    runs = [*as_runs(simclr, seed=0), *as_runs(simclr, seed=1), as_runs(ours)[0]]
    joined = join_lengths(runs)
    assert [(curve.seed, len(curve.points)) for curve in joined] == [(0, 5), (1, 5), (0, 2)]
    assert joined[0].run == "SimCLR-1000-0" and LENGTHS[0] not in dict(joined[0].settings)
    assert joined[2] == runs[-1]
    (panel,) = arrange(joined, runs[0].run)  # a run of another length than the curve's last
    assert panel.baseline is not None and panel.baseline.curves[0] == joined[0]


CLAIMS = "\n".join(paper.claims())


def epochs_of_simclr(labels: str, epochs: int) -> float:
    spent, unit = paper.costs(OURS_NAME, labels, epochs), paper.costs("SimCLR", labels, 100)
    return 100 * spent["petaflops"] / unit["petaflops"]


def test_costs_are_those_of_the_papers_batches():
    assert paper.costs("SimCLR", "10", 100)["updates"] == 100 * 312, "section 4.1"
    assert paper.costs(OURS_NAME, "10", 100)["updates"] == 100 * 454
    views = 454 * 250 * (2 * 2_816 + 2_560) + 454 * 50 * 2 * 2_816
    macs = network_cost("resnet50", "imagenet", 224).macs
    assert paper.costs(OURS_NAME, "10", 300)["petaflops"] == pytest.approx(petaflops(macs * views))


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


TOPS = [("top1", 45, 65.6, 66.7, 66.1), ("top5", 44, 87.6, 88.2, 87.8)]


@pytest.mark.parametrize(("metric", "percent", "a", "b", "best"), TOPS)
def test_claims_explain_the_percentages_at_10_percent_labels(metric, percent, a, b, best):
    """By hand: accuracy a at 300 epochs and b at 500, to reach SimCLR's best of 1000; both costs are linear there."""
    below, between, above = (epochs_of_simclr("10", epochs) for epochs in (300, 400, 500))
    at = below + (above - below) * (best - a) / (b - a)
    (panel,) = arrange(paper.curves(paper.TEN))
    (saving,) = by(savings(panel, metric), "petaflops", "best")
    assert saving.shares[0] * saving.baseline_epochs == pytest.approx(at)
    share = (10 * percent - below) / (above - below)
    needed = a + (best - a) * (between - below) / (10 * percent - below)
    for said in (
        f"crosses it at {at / 10:.1f} %",
        f"paper's {percent} % is the compute of about {300 + 200 * share:.0f} epochs, "
        f"where the line is at {a + (b - a) * share:.1f}",
        f"(appendix G has one) would have to reach {needed:.1f}",
    ):
        assert said in CLAIMS


def test_claims_explain_the_percentages_at_1_percent_labels():
    longer, shorter = epochs_of_simclr("1", 500), epochs_of_simclr("1", 400)
    assert round(shorter / 5) == 83
    for said in (
        f"at 500 epochs, the compute of {longer:.1f} epochs",
        f"at most {longer / 5:.1f} %",
        f"400 epochs costs {shorter:.1f} epochs of SimCLR, {shorter / 5:.1f} % of 500",
    ):
        assert said in CLAIMS


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


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (7, {(100, 61.8), (200, 63.8), (300, 64.8)}),
        (8, {(100, 63.4), (200, 64.8), (300, 65.6)}),
        (10, {(None, 45.0)}),
        (11, {(None, 83.0)}),
        (21, {(None, 68.8), (200, 56.4), (300, 71.5), (400, 70.8), (500, 66.7), (800, 70.2), (1000, 65.6),
              (1200, 68.4)}),
        (28, {(None, 51.8), (100, 64.4), (100, 75.6)}),
        (29, {(100, 71.0), (200, 71.9), (300, 73.1), (100, 73.9), (200, 75.0), (300, 75.5)}),
        (30, {(100, 61.5), (200, 63.2), (300, 64.2), (100, 63.8), (200, 66.1), (300, 66.5)}),
    ],
)  # fmt: skip
def test_paper_points_of_top1_are_the_papers(row, wanted):
    chosen = [p for p in paper.load() if p.row == row and p.metric == "top1"]
    assert {(p.epochs, p.value) for p in chosen if p.drawn or row in (10, 11, 28)} == wanted
