"""The tables of RESULTS.md recompute from the committed points, by the rules that were committed before the runs."""

import re
from pathlib import Path

import pytest

from tools import results
from tools.results import decision, decision_on_cost, interval

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted((ROOT / "docs" / "results").glob("*/points.csv"))


INTERVAL = r"[+-]\d+\.\d+ ± \d+\.\d+"


def tables_of(points):
    paired = (points.parent / "rules.md").exists()
    return results.show(points) if paired else results.show_small(results.read_report(points))


@pytest.mark.parametrize("points", EXPERIMENTS, ids=lambda path: path.parent.name)
def test_results_page_holds_the_tables_of_the_points(points):
    page = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    assert all(table in page for table in tables_of(points))


@pytest.mark.parametrize("name", ["README.md", "RESULTS.md"])
def test_page_names_no_interval_that_is_not_in_a_table(name):
    known = {each for points in EXPERIMENTS for each in re.findall(INTERVAL, "".join(tables_of(points)))}
    named = set(re.findall(INTERVAL, " ".join((ROOT / name).read_text(encoding="utf-8").split())))
    assert named and named <= known


def test_pages_hold_the_tables_of_the_demo():
    summary, *tables = results.show_demo(results.read_demo(ROOT / "docs" / "demo"))
    assert summary in (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(table in (ROOT / "RESULTS.md").read_text(encoding="utf-8") for table in tables)


@pytest.mark.parametrize(
    ("name", "one", "others"),
    [("digits", "SimCLR,0,", ",0,finetune,"), ("cifar10-plateau", "plateau,0,", "fixed,0,")],
)
def test_results_pair_seeds_where_a_method_lacks_one(name, one, others, tmp_path):
    """The differences are those without the seed in any method."""
    lines = (ROOT / "docs" / "results" / name / "points.csv").read_text().splitlines(keepends=True)
    path, shown = tmp_path / "points.csv", []
    for dropped in ([one], [one, others]):
        path.write_text("".join(line for line in lines if not any(each in line for each in dropped)))
        tables = results.show_small(results.read_report(path)) if name == "digits" else results.show(path)
        shown.append(re.findall(INTERVAL, "".join(tables)))
    assert shown[0] == shown[1] and shown[0]


def test_interval_is_that_of_students_t():
    center, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert center == 3.0 and half == pytest.approx(2.776 * (2.5 / 5) ** 0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("center", "half", "expected"),
    [
        (2.0, 1.0, "supported"),
        (-1.0, 1.0, "refuted"),
        (0.5, 0.4, "supported, and smaller than one point"),
        (0.5, 2.0, "undecided"),
        (1.0, 1.0, "undecided"),
    ],
)
def test_decision_follows_the_rule_of_the_interval(center, half, expected):
    assert decision(center, half) == expected


@pytest.mark.parametrize(
    ("center", "half", "arrived", "expected"),
    [
        (-5.0, 10.0, True, "supported"),
        (20.0, 15.0, True, "refuted"),
        (6.0, 3.0, True, "it saves less, by under 10 points"),
        (8.0, 9.0, True, "undecided"),
        (-5.0, 10.0, False, "undecided"),
    ],
)
def test_decision_on_cost_follows_the_rule_of_the_plateau(center, half, arrived, expected):
    assert decision_on_cost(center, half, most_arrived=arrived) == expected
