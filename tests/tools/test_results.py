"""The tables of RESULTS.md recompute from the committed points, by the rules that were committed before the runs."""

import functools
import re
from pathlib import Path

import pytest

from tools import points, results
from tools.points import COLUMNS

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted((ROOT / "docs" / "results").glob("*/points.csv"))
SUGGESTIONS = ROOT / "docs" / "results" / "suggestions" / "accuracies.csv"
STRENGTHS = ROOT / "docs" / "results" / "linear-strength" / "accuracies.csv"
PAGE = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
show = functools.cache(results.show)

INTERVAL = r"[+-]\d+\.\d+ ± \d+\.\d+"
RANGE = r"\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)"  # accuracies of seeds, in percent


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.parent.name)
def test_results_page_holds_the_tables_of_the_points(path):
    assert all(table in PAGE for table in show(path))


@pytest.mark.parametrize("name", ["README.md", "RESULTS.md"])
def test_page_names_no_interval_that_is_not_in_a_table(name):
    tables = [
        *(each for path in EXPERIMENTS for each in show(path)),
        *results.show_arms(SUGGESTIONS),
        *results.show_strengths(STRENGTHS),
    ]
    page = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    for pattern in (INTERVAL, RANGE):
        known = set(re.findall(pattern, "".join(tables)))
        named = set(re.findall(pattern, page))
        assert named and named <= known


def test_pages_hold_the_other_tables():
    readme, *tables = results.show_demo(ROOT / "docs" / "demo")
    tables += [*results.show_arms(SUGGESTIONS), *results.show_strengths(STRENGTHS)]
    tables += results.show_runs(ROOT / "docs" / "results" / "clothing-paws" / "accuracies.csv")
    assert readme in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(tables) == 7 and all(table in PAGE for table in tables)


@pytest.mark.parametrize(
    ("decide", "given", "expected"),
    [
        (points.decision, (1.0, 3.0), "supported"),
        (points.decision, (-2.0, 0.0), "refuted"),
        (points.decision, (0.1, 0.9), "supported, and smaller than one point"),
        (points.decision, (-1.5, 2.5), "undecided"),
        (points.decision, (0.0, 1.0), "undecided"),
        (points.decision_on_cost, (-15.0, 5.0, True), "supported"),
        (points.decision_on_cost, (5.0, 35.0, True), "refuted"),
        (points.decision_on_cost, (3.0, 9.0, True), "it saves less, by under 10 points"),
        (points.decision_on_cost, (-1.0, 17.0, True), "undecided"),
        (points.decision_on_cost, (-15.0, 5.0, False), "undecided"),
        (points.decision_on_ratio, (0.3, 0.79), "confirmed, as large as in the paper"),
        (points.decision_on_ratio, (0.7, 0.99), "confirmed"),
        (points.decision_on_ratio, (0.92, 0.99), "confirmed, by less than a tenth"),
        (points.decision_on_ratio, (0.92, 1.3), "refuted"),
        (points.decision_on_ratio, (0.7, 1.01), "undecided"),
    ],
)
def test_decision_follows_its_rule(decide, given, expected):
    assert decide(*given) == expected


def test_draw_leaves_no_plot_out(tmp_path, monkeypatch):
    path = ROOT / "docs" / "results" / results.FEW_LABELS / "points.csv"
    every = points.read(path, range(points.HELD_OUT_SEED))
    del every["100"]["finetune"]
    monkeypatch.setattr(points, "read", lambda *_: every)
    with pytest.raises(ValueError, match="longer"):
        results.draw(path, tmp_path / "accuracy.png")


def test_collect_keeps_other_points_and_averages_draws(tmp_path, monkeypatch):
    run, output = tmp_path / "few_labels_gate-alone_suncet_100labels", tmp_path / "points.csv"
    write = [("finetune", 0.3, 0, 0.05), ("finetune", 0.4, 1000, 0.05), ("npi", 0.25, None, None)]
    write += [("linear", 0.2, 0, 1), ("linear", 0.4, 0, "auto")]
    found = [
        {
            "kind": kind,
            "metrics": {"top1": top1},
            "labels": {"kind": "stratified", "count": 100},
            "encoder": {"ledger": {"updates": 5, "petaflops": 0.5}},
            "setting": {"seed": seed, "lr": value, "strength": value},
        }
        for kind, top1, seed, value in write
    ]
    monkeypatch.setattr(points, "read_results", lambda folder: found)
    run.mkdir()
    (run / "config.yaml").write_text("meta: {seed: 100, speed: of an older commit}\n")
    output.write_text(",".join(COLUMNS[1:]) + "\nsimclr,0,linear,7,0.7,41.5\n")
    points.collect([run], output)
    assert output.read_text().splitlines()[1:] == [
        ",simclr,0,linear,7,0.7,41.5",
        "100,alone_suncet,100,finetune,5,0.5,35.00",
        "100,alone_suncet,100,linear,5,0.5,20.00",
        "100,alone_suncet,100,linear_auto,5,0.5,40.00",
        "100,alone_suncet,100,own,5,0.5,25.00",
    ]
    points.collect([run], output)
    assert len(output.read_text().splitlines()) == 6
