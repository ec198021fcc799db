"""The tables of RESULTS.md recompute from the committed points, by the rules that were committed before the runs."""

import functools
import re
from itertools import product
from pathlib import Path

import pytest

from tools import points, results
from tools.points import COLUMNS, HELD_OUT_SEED

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
    assert len(tables) == 6 and all(table in PAGE for table in tables)


def test_results_pair_seeds_where_a_method_lacks_one(tmp_path):
    """The differences are those without the seed in any method."""
    lines = (ROOT / "docs/results/cifar10-plateau/points.csv").read_text().splitlines(keepends=True)
    path, shown = tmp_path / "points.csv", []
    for dropped in ("fixed,0,|alone_cross_entropy,0,", "fixed,0,|plateau,0,|alone_cross_entropy,0,"):
        path.write_text("".join(line for line in lines if not re.search(dropped, line)))
        shown.append(re.findall(INTERVAL, "".join(results.show(path))))
    assert shown[0] == shown[1] and shown[0]


def test_interval_is_that_of_students_t():
    half = 2.776 * (2.5 / 5) ** 0.5
    assert points.interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3 - half, 3 + half), rel=1e-3)


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


def test_photos_are_judged_by_the_measure_that_was_best_on_held_out_photos(tmp_path, monkeypatch):
    """SimCLR is 4 points above the labels alone by its best measure there, SuNCEt is level; other measures mislead."""
    kinds = ("linear_auto", "finetune_linear", "finetune_lr0.005", "finetune_lr0.015", "finetune")
    best = {
        "alone_cross_entropy": ("finetune_lr0.015", 50),
        "alone_suncet": ("linear_auto", 45),
        "simclr": ("finetune_linear", 54),
        "suncet": ("linear_auto", 50),
    }
    rows = [",".join(COLUMNS)]
    for method, kind in product(best, kinds):
        chosen, top1 = best[method]
        rows.append(f"300,{method},{HELD_OUT_SEED},{kind},9,9,{top1 if kind == chosen else 30}")
        for labels, seed in product((100, 300), range(1, 6)):
            value = top1 + 0.1 * seed * (method == "simclr") if kind == chosen else 20
            rows.append(f"{labels},{method},{seed},{kind},9,9,{value}")
    monkeypatch.setattr(results, "photo_variants", lambda *_: [])
    path = tmp_path / results.PHOTOS / "points.csv"
    path.parent.mkdir()
    path.write_text("\n".join(rows) + "\n")
    choices, many, few, gains, decisions = results.show(path)
    head = "| labels alone, cross-entropy | "
    assert f"{head}30.00 | 30.00 | 30.00 | 50.00 | 30.00 | fine-tuned at lr 0.015 |" in choices
    alone = "| labels alone, cross-entropy | 20.00, 5 seeds | 20.00, 5 seeds | 50.00, 5 seeds |"
    assert alone in many and alone in few
    low, high = points.interval([4.1, 4.2, 4.3, 4.4, 4.5])
    for labels in (100, 300):
        assert f"| {labels} labels: SimCLR | +4.30 ± {(high - low) / 2:.2f} | +0.00 ± 0.00 |" in gains
    assert decisions.count("| 0.000 | **helps** |") == 2 and decisions.count("**does not help** |") == 2


def test_holm_by_hand(monkeypatch):
    monkeypatch.setattr(points, "p_value", lambda values: values[0])
    found = points.holm({"a": [0.01], "b": [0.04], "c": [0.03], "d": [0.005]})
    assert found == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})


def test_p_value_is_that_of_students_t():
    assert points.p_value([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(0.0132, abs=1e-4)  # t = 4.243
    assert points.p_value([0.4] * 5) == 0 and points.p_value([0.0] * 5) == 1


def test_collect_keeps_other_points_and_averages_draws(tmp_path, monkeypatch):
    run, output = tmp_path / "few_labels_gate-alone_suncet_100labels", tmp_path / "points.csv"
    write = [("finetune", 0.3, 0, 0.05), ("finetune", 0.4, 1000, 0.05), ("npi", 0.25, None, None)]
    found = [
        {
            "kind": kind,
            "metrics": {"top1": top1},
            "labels": {"kind": "stratified", "count": 100},
            "encoder": {"ledger": {"updates": 5, "petaflops": 0.5}},
            "setting": {"seed": seed, "lr": lr},
        }
        for kind, top1, seed, lr in write
    ]
    monkeypatch.setattr(points, "read_results", lambda folder: found)
    run.mkdir()
    (run / "config.yaml").write_text("meta: {seed: 100, speed: of an older commit}\n")
    output.write_text(",".join(COLUMNS[1:]) + "\nsimclr,0,linear,7,0.7,41.5\n")
    points.collect([run], output)
    assert output.read_text().splitlines()[1:] == [
        ",simclr,0,linear,7,0.7,41.5",
        "100,alone_suncet,100,finetune,5,0.5,35.00",
        "100,alone_suncet,100,own,5,0.5,25.00",
    ]
    points.collect([run], output)
    assert len(output.read_text().splitlines()) == 4
