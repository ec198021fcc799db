"""The report: what it reads from runs, how it groups them, the files it writes, and what it refuses."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsuncet import versions
from fastsuncet.cli import main
from fastsuncet.commands.report import figures, report
from fastsuncet.commands.report.curves import Measurement, Panel, arrange
from fastsuncet.commands.report.figures import unit
from fastsuncet.commands.report.reading import read_runs
from fastsuncet.config import ConfigErrors
from fastsuncet.metrics.results import write_result
from tests.support.reports import LABELS, make_run, result


def panels_of(*runs: Path) -> dict[str, Panel]:
    return {str(panel.measurement): panel for panel in arrange(read_runs(runs)[0])}


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Draw fewer pixels than for a user, since most of the time goes into them."""
    monkeypatch.setattr(figures, "DPI", 60)


@pytest.fixture
def runs(tmp_path):
    """SimCLR and SimCLR + SuNCEt, two seeds of each."""
    return [
        make_run(tmp_path, "simclr_0", 0.4, 0.5, 0.6, seed=0, suncet=False),
        make_run(tmp_path, "simclr_1", 0.3, 0.5, 0.6, seed=1, suncet=False),
        make_run(tmp_path, "suncet_0", 0.5, 0.7, 0.8, seed=0),
        make_run(tmp_path, "suncet_1", 0.5, 0.7, 0.9, seed=1),
    ]


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))


# ------------------------------------------------------------------------------------------- reading and grouping
def test_arrange_joins_runs_that_differ_only_in_their_seed(runs):
    (panel,) = panels_of(*runs).values()
    assert panel.measurement == Measurement("finetune", "10 % labels")
    assert [(g.name, len(g.curves)) for g in panel.groups] == [("SimCLR", 2), ("SimCLR + SuNCEt", 2)]
    assert panel.baseline is panel.groups[0], "the one that pre-trains without labels"
    assert panel.groups[1].common("top1")[-1].metrics["top1"] == [0.8, 0.9]
    costs = {"epochs": 1, "updates": 10, "petaflops": 5, "hours": 0.1}
    assert panel.groups[0].common("top1")[0].costs == costs


def test_arrange_names_the_setting_that_differs_and_all_labels(tmp_path):
    """All labels are one share, however they were chosen."""
    short = make_run(tmp_path, "b", overrides=("criterion.supervised_epochs=1",))
    runs = [make_run(tmp_path, "a"), short]
    result(runs[0], 10, 0.6, labels={"kind": "bernoulli", "fraction": 1.0, "count": 1600})
    result(runs[1], 10, 0.5, labels={"kind": "all", "fraction": 1.0, "count": 1600})
    (panel,) = panels_of(*runs).values()
    names = [group.name for group in panel.groups]
    assert names == ["SimCLR + SuNCEt, supervised_epochs all", "SimCLR + SuNCEt, supervised_epochs 1"]
    assert panel.measurement.labels == "all labels"


def test_read_runs_separates_labels_kinds_and_settings(tmp_path):
    run = make_run(tmp_path, "a", 0.5)
    result(run, 10, 0.6, labels={"kind": "bernoulli", "fraction": 0.2, "count": 300})
    result(run, 10, 0.4, kind="knn", k=10)
    result(run, 10, 0.3, kind="knn", k=20)
    other = make_run(tmp_path, "b", seed=1)
    result(other, 10, 0.2, kind="knn", k=10)
    result(run, 10, 0.1, kind="npi", k=10)  # what varies in one kind does not matter in another
    panels = panels_of(run, other)
    assert set(panels) == {
        "fine-tuning, 10 % labels",
        "fine-tuning, 20 % labels",
        "nearest neighbors, 10 % labels, k=10",
        "nearest neighbors, 10 % labels, k=20",
        "SuNCEt's own classifier, 10 % labels",
    }
    assert [len(g.curves) for g in panels["nearest neighbors, 10 % labels, k=10"].groups] == [2]
    assert [len(g.curves) for g in panels["nearest neighbors, 10 % labels, k=20"].groups] == [1]


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ((), ("10 % labels", "")),  # seeds draw other numbers of labels, and stay one group
        (("data.split.kind=none", "data.split.fraction=null"), ("all labels", "16 supports")),
    ],
)
def test_read_runs_reads_knn_lines_of_the_training(tmp_path, changes, measured):
    run = make_run(tmp_path, "a", suncet=not changes, overrides=changes)
    costs = {"epoch": 1.0, "images": 8, "updates": 4, "petaflops": 2.0, "seconds": 7.2, "joules": 3.0}
    lines = [
        {"step": 4, "kind": "knn", **costs, "knn_accuracy": 0.5, "knn_supports": 16},
        {"step": 4, "kind": "train", "loss": 1.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = read_runs([run])[0]
    assert found.measurement == Measurement("online knn", *measured)
    (point,) = found.points
    assert point.costs == {"epochs": 1, "updates": 4, "petaflops": 2, "hours": 0.002, "joules": 3}
    assert point.metrics == {"knn": 0.5}


def test_report_shows_rankme_as_a_number_of_directions(tmp_path):
    """An accuracy is in %; and nothing is saved by a rank."""
    for name, suncet in (("a", True), ("b", False)):
        line = {"step": 4, "kind": "knn", "petaflops": 2.0, "updates": 4, "knn_accuracy": 0.5, "rankme": 42.5}
        line["knn_supports"] = 16
        (make_run(tmp_path, name, suncet=suncet) / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    runs = [tmp_path / "a", tmp_path / "b"]
    text = report(runs, tmp_path / "out", metrics=["rankme"]).read_text()
    assert "| RankMe of the embeddings |" in text and "| 42.5 |" in text and "%" not in text.split("##")[1]
    assert rows(tmp_path / "out" / "saved.csv") == []
    (picture,) = (tmp_path / "out").glob("*rankme.svg")
    assert ">RankMe of the embeddings</text>" in picture.read_text()


def test_read_runs_keeps_the_name_of_another_runs_encoder(tmp_path):
    simclr = make_run(tmp_path, "simclr", 0.4, suncet=False)
    suncet = make_run(tmp_path, "suncet", 0.6)
    result(suncet, 20, 0.5, home=simclr)  # `finetune suncet.yaml --encoder simclr`
    found = {curve.method: curve for curve in read_runs([simclr, suncet])[0]}
    assert [p.step for p in found["SimCLR"].points] == [10, 20]
    assert [p.step for p in found["SimCLR + SuNCEt"].points] == [10]
    result(suncet, 30, 0.5, home=tmp_path / "gone")
    foreign = [curve for curve in read_runs([suncet])[0] if curve.run.endswith("gone")]
    assert [(c.method, c.supervised, c.seed) for c in foreign] == [("SimCLR + SuNCEt", True, None)]
    other = make_run(tmp_path, "other", 0.4)
    for file in (simclr / "export" / "torchvision.pth", tmp_path / "encoder.pth", other / "encoder.pth"):
        result(other, 20, 0.3, source=file)
    curves = {curve.run: [p.metrics["top1"] for p in curve.points] for curve in read_runs([other])[0]}
    assert curves == {str(other): [0.4, 0.3], str(simclr): [0.3], str(tmp_path / "encoder.pth"): [0.3]}


def test_read_runs_averages_evaluations_that_differ_only_in_their_seed(tmp_path):
    run = make_run(tmp_path, "a")
    for seed, top1 in enumerate((0.4, 0.6, 0.8)):
        result(run, 10, top1, seed=seed, lr=0.1)
    (curve,), (note,) = read_runs([run])
    assert [p.metrics["top1"] for p in curve.points] == [pytest.approx(0.6)]
    assert note.endswith(
        "10 % labels: 3 results of one checkpoint that differ only in their seed: their mean"
    )


@pytest.mark.parametrize(
    ("kind", "words"), [("knn", "nearest neighbors"), ("accuracy", "the network's own classifier")]
)
def test_read_runs_separates_fine_tuned_encoders(tmp_path, kind, words):
    runs = [make_run(tmp_path, "a", seed=0), make_run(tmp_path, "b", seed=1)]
    for run in runs:
        result(run, 10, 0.4, kind="knn", k=10)
        for tag, top1 in (("bernoulli0.1-step_00000010", 0.6), ("labels1", 0.5)):
            result(run, 10, top1, kind=kind, k=10, home=run / "finetune" / tag, finetuned=60)
    panels = panels_of(*runs)
    tuned = (f"{words}, 10 % labels, fine-tuned first ({tag})" for tag in ("bernoulli0.1", "labels1"))
    assert set(panels) == {"nearest neighbors, 10 % labels", *tuned}
    for panel in panels.values():
        assert [(group.name, len(group.curves)) for group in panel.groups] == [("SimCLR + SuNCEt", 2)]


def test_read_runs_recognizes_a_run_that_was_moved_and_an_encoder_from_a_file(tmp_path):
    run = make_run(tmp_path / "old", "a", 0.5)
    (tmp_path / "new").mkdir()
    moved = run.rename(tmp_path / "new" / "renamed")
    assert [curve.run for curve in read_runs([moved])[0]] == [str(moved)]
    moved = moved.rename(tmp_path / "new" / "a")
    encoder = {"source": "/weights/resnet50.pth", "step": None, "epoch": None, "method": None, "ledger": None}
    record = {"kind": "finetune", "metrics": {"top1": 0.7}, "images": 355, "labels": LABELS}
    write_result(moved, {**record, "encoder": encoder, "setting": {}, "run": "a", "versions": {}})
    assert {curve.run for curve in read_runs([moved])[0]} == {str(moved), "/weights/resnet50.pth"}
    text = report([moved], tmp_path / "out").read_text()
    assert "| resnet50.pth | 10 % labels | fine-tuning | 1 | - | - | - | - | - | 70.0 |" in text


def test_read_runs_refuses_a_config_with_an_unknown_key(tmp_path):
    run = make_run(tmp_path, "a", 0.5)
    path = run / "config.yaml"
    config = path.read_text()
    assert "\nmodel:\n" in config
    path.write_text(config.replace("\nmodel:\n", "\nmodel:\n  tomorrow: 1\n"))
    with pytest.raises(ConfigErrors, match=r"config\.yaml:\d+: model\.tomorrow"):
        read_runs([run])


@pytest.mark.slow
def test_report_compares_no_runs_of_other_settings(tmp_path):
    ours, theirs = make_run(tmp_path, "a"), make_run(tmp_path, "b", suncet=False)
    result(ours, 10, 0.6, epochs=90, precision="bf16")
    result(theirs, 10, 0.5, epochs=30, precision="fp32")
    found = set(panels_of(ours, theirs))
    assert found == {"fine-tuning, 10 % labels, epochs=90", "fine-tuning, 10 % labels, epochs=30"}
    alike = make_run(tmp_path, "c", suncet=False)
    result(alike, 10, 0.5, epochs=90, precision="fp32")
    text = report([ours, alike], tmp_path / "out").read_text()
    assert "fine-tuning, 10 % labels: not all runs were evaluated with the same precision." in text
    assert "| petaFLOPs | at most 100.0 %; 1 of 1 seeds reached it |" in text, "and they are compared"


@pytest.mark.slow
def test_report_notes_checkpoints_that_some_seeds_lack(tmp_path):
    runs = [make_run(tmp_path, "a", 0.5, 0.6, seed=0), make_run(tmp_path, "b", 0.7, seed=1)]
    (panel,) = panels_of(*runs).values()
    assert [(p.step, p.mean("top1")) for p in panel.groups[0].common("top1")] == [(10, pytest.approx(0.6))]
    text = report(runs, tmp_path / "out").read_text()
    assert "SimCLR + SuNCEt, fine-tuning, 10 % labels: averaged at 1 of 2 checkpoints" in text
    assert "(seed 0: 2, 1: 1)." in text


# ---------------------------------------------------------------------------------------------------- files
@pytest.mark.slow
def test_report_holds_table_savings_and_pictures(runs, tmp_path, capsys):
    path = report(runs, tmp_path / "out")
    text = path.read_text()
    assert capsys.readouterr().out.startswith(text.split("## Pictures")[0].rstrip())
    line = "| SimCLR + SuNCEt | 10 % labels | fine-tuning | 2 | 3 | 30 | 15 | 0.3 | - | 85.0 (80.0 to 90.0) |"
    assert line in text
    assert "A training sample costs 6 x MAC of encoder and head" in text and "averaged at" not in text
    # To reach 0.6 from 0.5 at 10 to 0.7 at 20: 15 of 30 updates, and the same share of FLOPs.
    cell = "50.0 %, first checkpoint 66.7 %; 2 of 2 seeds reached it"
    for cost in ("petaFLOPs", "updates"):
        assert (
            f"| SimCLR + SuNCEt | SimCLR | fine-tuning, 10 % labels | top1 | {cost} | {cell} | {cell} |"
            in text
        )
    for picture in ("finetune-10-labels-top1", "saved"):
        pixels = np.asarray(Image.open(tmp_path / "out" / f"{picture}.png").convert("L"))
        assert pixels.std() > 10, f"{picture} is blank"
        assert f"({picture}.png)" in text
    svg = (tmp_path / "out" / "finetune-10-labels-top1.svg").read_text()
    for label in ("top-1 accuracy, %", "model updates", "compute, petaFLOPs", "time, minutes"):
        assert f">{label}</text>" in svg

    points = rows(tmp_path / "out" / "points.csv")
    assert len(points) == 12 and float(points[0]["petaflops"]) == 5 and points[0]["joules"] == ""
    last = rows(tmp_path / "out" / "table.csv")[-1]
    assert (last["method"], last["seeds"]) == ("SimCLR + SuNCEt", "2")
    assert float(last["top-1, %"]) == pytest.approx(0.85)
    saved = {(r["cost"], r["rule"], r["seed"]): r for r in rows(tmp_path / "out" / "saved.csv")}
    assert len(saved) == 3 * 2 * 2
    assert float(saved["updates", "best", "1"]["linear_percent"]) == pytest.approx(50)
    assert float(saved["hours", "final", "0"]["first_checkpoint_percent"]) == pytest.approx(200 / 3)


@pytest.mark.slow
def test_report_of_the_same_numbers_has_the_same_bytes(runs, tmp_path):
    for name in ("one", "two"):
        report(runs, tmp_path / name, figures=["imagenet-10pct"])
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {Path(name).suffix for name in files} == {".md", ".csv", ".png", ".svg"}
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    svg = (tmp_path / "one" / "finetune-10-labels-top1.svg").read_text()
    assert "SimCLR + SuNCEt (paper)" in svg and "SimCLR + SuNCEt, mean of 2 seeds" in svg


@pytest.mark.slow
def test_report_draws_the_papers_points_only_next_to_their_kind_and_labels(tmp_path):
    run = make_run(tmp_path, "a", 0.5)
    result(run, 10, 0.3, labels={"kind": "bernoulli", "fraction": 0.01, "count": 16})
    text = report([run], tmp_path / "out", figures=["imagenet-10pct", "npi"]).read_text()
    assert "(paper)" in (tmp_path / "out" / "finetune-10-labels-top1.svg").read_text()
    assert "(paper)" not in (tmp_path / "out" / "finetune-1-labels-top1.svg").read_text()
    assert "no results of SuNCEt's own classifier, 10 % labels, so it is drawn alone" in text
    assert "| SimCLR + SuNCEt (paper) | 10 % labels | SuNCEt's own classifier | 1 | 400 | 181,600 |" in text


@pytest.mark.slow
def test_report_of_the_paper_alone_has_its_percentages(tmp_path, capsys):
    assert main(["report", "--paper", "--output", str(tmp_path / "paper")]) == 0
    out = capsys.readouterr().out
    assert "| imagenet-10pct, top1 | 45 | 50.5 |" in out and "| imagenet-1pct, top5 | 81 |" in out
    for name in ("finetune-10-labels-top1", "finetune-10-labels-top5", "finetune-1-labels-top1", "saved"):
        assert np.asarray(Image.open(tmp_path / "paper" / f"{name}.png").convert("L")).std() > 10


@pytest.mark.parametrize(
    ("cost", "largest", "wanted"),
    [
        ("petaflops", 3.3e-4, (1e-6, "compute, gigaFLOPs")),
        ("petaflops", 390, (1, "compute, petaFLOPs")),
        ("petaflops", 62_746, (1000, "compute, exaFLOPs")),
        ("hours", 20 / 3600, (1 / 3600, "time, seconds")),
        ("updates", 600, (1, "model updates")),
        ("joules", 7.2e6, (3.6e6, "energy of the GPUs, kWh")),
    ],
)
def test_unit_fits_the_largest_value(cost, largest, wanted):
    assert unit(cost, largest) == wanted


# --------------------------------------------------------------------------------------------------- refusals
def test_report_refuses_with_a_message_and_writes_nothing(runs, tmp_path, capsys):
    new, out = make_run(tmp_path, "new"), ["--output", str(tmp_path / "out")]
    for words, code, said in (
        (
            [runs[0], "--metric", "map11"],
            2,
            "nothing here was measured by --metric map11; there is top1, top5",
        ),
        ([tmp_path / "nowhere"], 3, "nowhere does not exist"),
        ([tmp_path], 3, "holds no config.yaml"),
        ([new], 3, "nothing was evaluated yet"),
        ([], 2, "which runs?"),
        (["--paper", "fig99"], 2, "there is imagenet-10pct, imagenet-1pct"),
    ):
        assert main(["report", *map(str, words), *out]) == code
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (runs[0] / "results" / "broken.json").write_text("{")
    assert main(["report", str(runs[0]), *out]) == 5
    assert "broken.json" in capsys.readouterr().err


@pytest.mark.slow
def test_report_notes_a_run_without_results_and_takes_a_baseline(runs, tmp_path, capsys):
    out = ["--output", str(tmp_path / "out")]
    new = make_run(tmp_path, "new")
    # `--paper RUN`: the name of a figure was left out.
    assert main(["report", "--paper", str(runs[2]), str(new), "--baseline", str(runs[0]), *out]) == 0
    text = capsys.readouterr().out
    assert "new: nothing was evaluated yet." in text
    assert "| SimCLR | 10 % labels | fine-tuning | 1 |" in text and "(paper)" in text


def test_report_without_matplotlib_writes_tables_and_says_what_to_install(
    runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(versions, "installed", lambda package: None)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "fastsuncet.commands.report.figures", raising=False)
    text = report(runs, tmp_path / "out").read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.md",
        "table.csv",
        "saved.csv",
        "points.csv",
    }
    assert "pip install matplotlib" in text and "pip install matplotlib" in capsys.readouterr().out
