"""Compute saved: crossings by hand, properties of the rule, and the paper's own percentages."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastsuncet.commands.report import paper
from fastsuncet.commands.report.compute_saved import MEAN_CURVE, MEAN_OF_SEEDS, crossing, savings
from fastsuncet.commands.report.curves import LENGTHS, Curve, Measurement, Point, join_lengths
from fastsuncet.commands.report.groups import arrange
from fastsuncet.commands.report.tables import SAVED_CSV, as_csv, methods_table, saved_plain
from fastsuncet.models.flops import equivalent_epochs, network_cost, petaflops

MEASUREMENT = Measurement("finetune", "10 % labels")


def curve(method: str, accuracies: list[float], per_step: float = 1.0, seed: int = 0) -> Curve:
    """Return a curve evaluated every 10 updates, each of `per_step` petaFLOPs and a tenth of an epoch."""
    steps = [10 * (i + 1) for i in range(len(accuracies))]
    points = tuple(
        Point(s, {"epochs": s / 10, "updates": s, "petaflops": per_step * s}, {"top1": a})
        for s, a in zip(steps, accuracies)
    )
    supervised = method != "SimCLR"
    return Curve(f"{method} {seed}", method, seed, MEASUREMENT, points, supervised, (("method", method),))


def saved(*curves: Curve) -> dict[tuple[str, str], object]:
    (panel,) = arrange(curves)
    return {(s.cost, s.seed): s for s in savings(panel, "top1")}


# ------------------------------------------------------------------------------------------------- by hand
def test_crossing_by_hand():
    assert crossing([10, 20, 30], [0.2, 0.4, 0.8], 0.5, linear=True) == pytest.approx(22.5)
    assert crossing([10, 20, 30], [0.2, 0.4, 0.8], 0.5, linear=False) == 30
    assert crossing([10, 20, 30], [0.2, 0.4, 0.8], 0.4, linear=True) == 20
    assert crossing([10, 20, 30], [0.2, 0.4, 0.8], 0.81, linear=True) is None
    assert crossing([10, 20, 30], [0.5, 0.1, 0.9], 0.3, linear=True) == 10, (
        "the first of several, not the last"
    )


def test_savings_by_updates_and_by_flops():
    # 0.6 is SimCLR's best, at 30 of its 40 updates; ours crosses it half-way from 10 to 20, at 1.5 times the FLOPs.
    found = saved(
        curve("SimCLR", [0.3, 0.5, 0.6, 0.55]), curve("SimCLR + SuNCEt", [0.4, 0.8, 0.9], per_step=1.5)
    )
    updates, flops = found["updates", "0"], found["petaflops", "0"]
    assert (updates.target, updates.total, updates.own) == (0.6, 40, 30)
    assert updates.shares[0] == pytest.approx(15 / 40)
    assert updates.shares[1] == pytest.approx(20 / 40)
    assert flops.shares[0] == pytest.approx(22.5 / 40)
    assert flops.equivalent_epochs == pytest.approx(22.5 / 40 * 4)
    assert "epochs" not in {cost for cost, _ in found}, "epochs of two methods are not the same work"


def test_savings_never_reached_or_at_the_first_checkpoint():
    never = saved(curve("SimCLR", [0.6]), curve("SimCLR + SuNCEt", [0.1, 0.59]))["updates", "0"]
    assert never.linear is never.checkpoint is never.shares is never.equivalent_epochs is None
    first = saved(curve("SimCLR", [0.5, 0.6]), curve("SimCLR + SuNCEt", [0.7]))["updates", "0"]
    assert first.at_first and first.shares[0] == first.shares[1] == pytest.approx(10 / 20)


def test_savings_compare_runs_of_the_same_seed():
    runs = [curve("SimCLR", [0.4, 0.6], seed=0), curve("SimCLR", [0.4, 0.5], seed=1)]
    runs += [curve("SimCLR + SuNCEt", [0.6, 0.7], seed=0), curve("SimCLR + SuNCEt", [0.3, 0.7], seed=1)]
    found = saved(*runs)
    assert found["updates", "0"].shares[0] == pytest.approx(10 / 20)
    assert found["updates", "1"].shares[0] == pytest.approx(15 / 20)
    assert found["updates", MEAN_OF_SEEDS].shares[0] == pytest.approx(12.5 / 20)
    # The mean curves: 0.45 then 0.7 against a best of 0.55.
    assert found["updates", MEAN_CURVE].shares[0] == pytest.approx((10 + 10 * 0.1 / 0.25) / 20)


def test_savings_have_no_mean_with_a_seed_that_never_got_there():
    runs = [curve("SimCLR", [0.4, 0.6], seed=s) for s in (0, 1)]
    runs += [curve("SimCLR + SuNCEt", [0.5, 0.7], seed=0), curve("SimCLR + SuNCEt", [0.3, 0.4], seed=1)]
    mean = saved(*runs)["updates", MEAN_OF_SEEDS]
    assert mean.shares is None and mean.reached == (1, 2)


def test_savings_need_one_baseline_or_its_name():
    runs = [curve("SimCLR", [0.5]), curve("SwAV", [0.6]), curve("SimCLR + SuNCEt", [0.7])]
    runs[1] = Curve(**{**vars(runs[1]), "supervised": False})
    assert saved(*runs) == {}
    (panel,) = arrange(runs, "SwAV 0")
    assert {s.method for s in savings(panel, "top1")} == {"SimCLR", "SimCLR + SuNCEt"}


# --------------------------------------------------------------------------------------------- properties
ACCURACIES = st.lists(st.integers(0, 100), min_size=1, max_size=8).map(lambda v: [x / 100 for x in v])


@given(ours=ACCURACIES, theirs=ACCURACIES, scale=st.floats(1e-6, 1e6))
def test_savings_do_not_depend_on_the_unit_of_the_cost(ours, theirs, scale):
    one, other = (
        saved(curve("SimCLR", theirs, factor), curve("SimCLR + SuNCEt", ours, 1.5 * factor))[
            "petaflops", "0"
        ].shares
        for factor in (1.0, scale)
    )
    assert (one is None and other is None) or other == pytest.approx(one, rel=1e-9)


@given(values=ACCURACIES, target=st.integers(0, 100).map(lambda x: x / 100))
def test_crossing_lies_between_the_right_checkpoints(values, target):
    costs = [3.0 * (i + 1) for i in range(len(values))]
    linear, checkpoint = (crossing(costs, values, target, linear=rule) for rule in (True, False))
    assert (linear is None) == (checkpoint is None) == (max(values) < target)
    if linear is not None:
        assert costs[0] <= linear <= checkpoint * (1 + 1e-12)
        assert checkpoint - linear < 3.0, "within one interval"


@given(values=ACCURACIES, low=st.integers(0, 100), high=st.integers(0, 100))
def test_crossing_of_a_higher_target_is_never_earlier(values, low, high):
    low, high = sorted((low / 100, high / 100))
    costs = list(range(1, len(values) + 1))
    early, late = (crossing(costs, values, target, linear=True) for target in (low, high))
    assert late is None or early <= late + 1e-12


# ------------------------------------------------------------------------------------------- several lengths
def as_runs(published: Curve, seed: int = 0) -> list[Curve]:
    """Return each point of a published curve as a run of that length, with an earlier and worse checkpoint."""
    runs = []
    for point in published.points:
        epochs = int(point.costs["epochs"])
        costs = {name: cost / 10 for name, cost in point.costs.items()}
        early = Point(1, costs, {name: value - 0.3 for name, value in point.metrics.items()})
        last = replace(point, step=epochs * 100)
        settings = ((LENGTHS[0], str(epochs)), ("method", published.method))
        run = f"{published.method}-{epochs}-{seed}"
        runs.append(
            replace(published, run=run, seed=seed, points=(early, last), settings=settings, published=False)
        )
    return runs


def test_join_lengths_of_the_papers_runs_saves_what_its_curve_saves():
    published = paper.curves("imagenet-10pct")
    runs = [run for curve in published for run in as_runs(curve)]
    joined = join_lengths(runs)
    assert len(runs) == 9 and len(joined) == 2
    for ours, theirs in zip(joined, published):
        assert [(p.metrics, p.costs) for p in ours.points] == [(p.metrics, p.costs) for p in theirs.points]
    found, wanted = (
        {s.cost: s.shares for panel in arrange(curves) for s in savings(panel, "top1")}
        for curves in (joined, published)
    )
    assert found == wanted and found["petaflops"][0] == pytest.approx(0.505, abs=0.001)


def test_join_lengths_keeps_seeds_apart_and_single_runs_whole():
    simclr, ours = paper.curves("imagenet-10pct")
    runs = [*as_runs(simclr, seed=0), *as_runs(simclr, seed=1), as_runs(ours)[0]]
    joined = join_lengths(runs)
    assert [(curve.seed, len(curve.points)) for curve in joined] == [(0, 5), (1, 5), (0, 2)]
    assert joined[0].run == "SimCLR-1000-0" and LENGTHS[0] not in dict(joined[0].settings)
    assert joined[2] == runs[-1]


# ------------------------------------------------------------------------------------------- committed numbers
RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("folder", ["digits", "cifar10-small"])
def test_report_reproduces_the_committed_tables_from_their_points(folder):
    runs: dict[tuple, list[Point]] = {}
    with open(RESULTS / folder / "points.csv", newline="") as stream:
        for r in csv.DictReader(stream):
            costs = {c: float(r[c]) for c in ("epochs", "petaflops", "hours") if r[c]}
            metrics = {m: float(r[m]) for m in ("top1", "top5")}
            key = (r["run"], r["method"], int(r["seed"]), r["evaluation"], r["labels"])
            costs["updates"] = int(r["updates"])
            runs.setdefault(key, []).append(Point(int(r["step"]), costs, metrics))
    curves = [
        Curve(run, method, seed, Measurement(*what), tuple(points), method != "SimCLR")
        for (run, method, seed, *what), points in runs.items()
    ]
    panels = arrange(curves)
    found = [s for panel in panels for s in savings(panel, "top1")]
    head, _, plain = methods_table(panels, "top1", found)
    assert as_csv(head, plain) == (RESULTS / folder / "table.csv").read_bytes()
    assert as_csv(SAVED_CSV, saved_plain(found)) == (RESULTS / folder / "saved.csv").read_bytes()


# ---------------------------------------------------------------------------------------------- the paper's
OURS, SIMCLR = paper.RECIPES["SimCLR + SuNCEt", "10"], paper.RECIPES["SimCLR", "10"]
CLAIMS = "\n".join(paper.claims())


def epochs_of_simclr(recipe: paper.Recipe, epochs: int) -> float:
    return equivalent_epochs(recipe.samples(epochs), paper.IMAGES, paper.BATCH)


def test_recipe_costs_are_those_of_the_papers_batches():
    assert SIMCLR.costs(1)["updates"] == 312, "section 4.1"
    assert OURS.costs(1)["updates"] == 454
    supervised = 2 * 2_816 + 2_560
    assert OURS.samples(300) == 454 * (250 * supervised + 50 * 2 * 2_816)
    macs = network_cost("resnet50", "imagenet", 224).macs
    assert OURS.costs(300)["petaflops"] == pytest.approx(petaflops(macs, OURS.samples(300)))


@pytest.mark.parametrize("figure", [paper.TEN, paper.ONE])
@pytest.mark.parametrize("metric", ["top1", "top5"])
def test_claims_table_is_what_the_rule_makes_of_the_papers_points(figure, metric):
    (panel,) = arrange(paper.curves(figure))
    found = {s.cost: s for s in savings(panel, metric)}
    label = "10 % labels" if figure == paper.TEN else "1 % labels"
    printed = {(p.measurement.rpartition(", ")[2], p.metric): p.percent for p in paper.printed_savings()}
    cells = [f"{printed[label, metric]:g}"]
    for cost in ("petaflops", "updates"):
        bound = "at most " if found[cost].at_first else ""
        cells += [f"{bound}{100 * share:.1f}" for share in found[cost].shares]
    assert f"| {figure}, {metric} | {' | '.join(cells)} |" in CLAIMS


@pytest.mark.parametrize(
    ("metric", "percent", "a", "b", "best"), [("top1", 45, 65.6, 66.7, 66.1), ("top5", 44, 87.6, 88.2, 87.8)]
)
def test_claims_explain_the_percentages_at_10_percent_labels(metric, percent, a, b, best):
    """By hand: accuracy a at 300 epochs and b at 500, to reach SimCLR's best of 1000; both costs are linear there."""
    below, above = epochs_of_simclr(OURS, 300), epochs_of_simclr(OURS, 500)
    crossing_at = below + (above - below) * (best - a) / (b - a)
    (panel,) = arrange(paper.curves(paper.TEN))
    saving = next(s for s in savings(panel, metric) if s.cost == "petaflops")
    assert saving.equivalent_epochs == pytest.approx(crossing_at)
    share = (10 * percent - below) / (above - below)
    epochs, there = 300 + 200 * share, a + (b - a) * share
    needed = a + (best - a) * (epochs_of_simclr(OURS, 400) - below) / (10 * percent - below)
    assert f"crosses it at {crossing_at / 10:.1f} %" in CLAIMS
    assert (
        f"paper's {percent} % is the compute of about {epochs:.0f} epochs, where the line is at {there:.1f}"
        in CLAIMS
    )
    assert f"(appendix G has one) would have to reach {needed:.1f}" in CLAIMS


def test_claims_explain_the_percentages_at_1_percent_labels():
    recipe = paper.RECIPES["SimCLR + SuNCEt", "1"]
    longer, shorter = epochs_of_simclr(recipe, 500), epochs_of_simclr(recipe, 400)
    assert (
        f"at 500 epochs, the compute of {longer:.1f} epochs" in CLAIMS
        and f"at most {longer / 5:.1f} %" in CLAIMS
    )
    assert f"400 epochs costs {shorter:.1f} epochs of SimCLR, {shorter / 5:.1f} % of 500" in CLAIMS
    assert round(shorter / 5) == 83


def test_paper_points_have_a_source_and_a_value_or_a_note():
    points = paper.load()
    assert {p.row for p in points} == set(range(1, 29)), "every experiment of the paper"
    assert all(p.source for p in points)
    assert all(p.note for p in points if p.value is None)
    drawn = [p for p in points if p.drawn]
    assert all(p.value is not None for p in drawn)
    keys = [(p.figure, p.method, p.labels, p.epochs, p.kind, p.metric) for p in drawn]
    assert len(keys) == len(set(keys)), "one point for each method, epochs and metric"


ROW_21 = {
    (800, 70.2),
    (400, 70.8),
    (500, 66.7),
    (1000, 65.6),
    (200, 56.4),
    (None, 68.8),
    (300, 71.5),
    (1200, 68.4),
}


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (7, {(100, 61.8), (200, 63.8), (300, 64.8)}),
        (8, {(100, 63.4), (200, 64.8), (300, 65.6)}),
        (10, {(None, 45.0)}),
        (11, {(None, 83.0)}),
        (21, ROW_21),
        (28, {(None, 51.8), (100, 64.4), (100, 75.6)}),
    ],
)
def test_paper_points_of_top1_are_the_papers(row, wanted):
    chosen = [p for p in paper.load() if p.row == row and p.metric == "top1"]
    assert {(p.epochs, p.value) for p in chosen if p.drawn or row in (10, 11, 28)} == wanted
