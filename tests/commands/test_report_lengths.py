"""Runs of several lengths as one curve: the paper's own rows, run by run, give what they give as a curve."""

from dataclasses import replace

import pytest

from fastsuncet.commands.report import paper
from fastsuncet.commands.report.compute_saved import savings
from fastsuncet.commands.report.curves import Curve
from fastsuncet.commands.report.groups import arrange
from fastsuncet.commands.report.join_lengths import LENGTHS, join_lengths


def as_runs(curve: Curve, *, seed: int = 0) -> list[Curve]:
    """Each point of a published curve as a run of that length, with an earlier and worse checkpoint before it."""
    runs = []
    for point in curve.points:
        epochs, metrics = point.costs["epochs"], point.metrics
        early = replace(
            point,
            step=1,
            costs={name: cost / 10 for name, cost in point.costs.items()},
            metrics={name: value - 0.3 for name, value in metrics.items()},
        )
        settings = ((LENGTHS[0], str(int(epochs))), ("method", curve.method))
        run = f"{curve.method}-{epochs:g}-{seed}"
        last = replace(point, step=int(epochs) * 100)
        runs.append(
            replace(curve, run=run, seed=seed, points=(early, last), settings=settings, published=False)
        )
    return runs


def test_the_papers_lengths_as_runs_save_what_the_papers_curve_saves():
    published = paper.curves("imagenet-10pct")
    runs = [run for curve in published for run in as_runs(curve)]
    joined = join_lengths(runs)
    assert len(runs) == 9 and len(joined) == 2
    for ours, theirs in zip(joined, published):
        assert [p.metrics for p in ours.points] == [p.metrics for p in theirs.points]
        assert [p.costs for p in ours.points] == [p.costs for p in theirs.points]
    found, expected = (
        {(s.cost, s.method): s.share() for panel in arrange(curves) for s in savings(panel, "top1") if s.seed != "mean"}
        for curves in (joined, published)
    )  # fmt: skip
    shares = {cost: share for (cost, _), share in found.items()}
    assert shares["petaflops"] == pytest.approx(0.505, abs=0.001)
    assert {share for share in found.values() if share} == {share for share in expected.values() if share}


def test_seeds_stay_apart_and_a_run_of_one_length_stays_whole():
    simclr, ours = paper.curves("imagenet-10pct")
    runs = [*as_runs(simclr, seed=0), *as_runs(simclr, seed=1), as_runs(ours)[0]]
    joined = join_lengths(runs)
    assert [(curve.seed, len(curve.points)) for curve in joined] == [(0, 5), (1, 5), (0, 2)]
    assert joined[0].run == "SimCLR-1000-0" and LENGTHS[0] not in dict(joined[0].settings)
    assert joined[2] == runs[-1]
