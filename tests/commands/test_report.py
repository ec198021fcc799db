"""The report: what it reads from runs, how it groups them, the files it writes, and what it refuses."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsuncet.cli import main
from fastsuncet.commands.report import figure, report
from fastsuncet.commands.report.curves import Evaluation
from fastsuncet.commands.report.figure import unit
from fastsuncet.commands.report.groups import arrange
from fastsuncet.commands.report.reading import read_runs
from fastsuncet.metrics.results import write_result
from tests.support.runs import small_config

LABELS = {"kind": "bernoulli", "fraction": 0.1, "count": 160}


def result(
    run: Path, step: int, top1: float, *, kind: str = "finetune", labels=LABELS, home=None, **setting
) -> None:
    """One evaluation of the checkpoint of `step` of `home` (this very run), an epoch of 10 updates."""
    book = {"images": 100 * step, "updates": step, "petaflops": 0.5 * step, "seconds": 36.0 * step}
    source = f"{home or run}/checkpoints/step_{step:08d}"
    encoder = {
        "source": source,
        "step": step,
        "epoch": step / 10,
        "method": "SimCLR + SuNCEt",
        "ledger": book,
    }
    record = {
        "kind": kind,
        "metrics": {"top1": top1, "top5": 1 - (1 - top1) / 2},
        "images": 355,
        "labels": labels,
    }
    write_result(run, {**record, "encoder": encoder, "setting": setting, "run": run.name, "versions": {}})


def make_run(
    folder: Path, name: str, *accuracies: float, seed: int = 0, suncet: bool = True, overrides=()
) -> Path:
    """A run's folder with a config and a fine-tuning result every 10 updates."""
    off = () if suncet else ("criterion.supervised_epochs=0",)
    config = small_config(folder, f"meta.seed={seed}", f"logging.write_tag={name}", *off, *overrides)
    run = config.run_folder
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config.to_yaml())
    for i, accuracy in enumerate(accuracies):
        result(run, 10 * (i + 1), accuracy)
    return run


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Fewer pixels than a person gets: most of the time goes into them."""
    monkeypatch.setattr(figure, "DPI", 60)


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
def test_runs_that_only_the_seed_sets_apart_are_one_group_with_mean_lowest_and_highest(runs):
    (panel,) = arrange(read_runs(runs))
    assert panel.evaluation == Evaluation("finetune", "10 % labels")
    assert [(group.name, len(group.curves)) for group in panel.groups] == [
        ("SimCLR", 2),
        ("SimCLR + SuNCEt", 2),
    ]
    assert panel.baseline is panel.groups[0], "the one that pre-trains without labels"
    assert panel.groups[1].spread("top1")[-1] == pytest.approx((0.85, 0.8, 0.9))
    assert panel.groups[0].with_metric("top1")[0].costs == {
        "epochs": 1,
        "updates": 10,
        "petaflops": 5,
        "hours": 0.1,
    }


def test_another_setting_is_another_experiment_and_its_name_says_which(tmp_path):
    long = make_run(tmp_path, "a", 0.5)
    short = make_run(tmp_path, "b", 0.5, overrides=("criterion.supervised_epochs=1",))
    (panel,) = arrange(read_runs([long, short]))
    names = [group.name for group in panel.groups]
    assert names == ["SimCLR + SuNCEt, supervised_epochs all", "SimCLR + SuNCEt, supervised_epochs 1"]


def test_seeds_are_averaged_only_where_all_of_them_were_evaluated(tmp_path):
    runs = [make_run(tmp_path, "a", 0.5, 0.6, seed=0), make_run(tmp_path, "b", 0.7, seed=1)]
    ((group,),) = [panel.groups for panel in arrange(read_runs(runs))]
    assert [(p.step, p.metrics["top1"]) for p in group.with_metric("top1")] == [(10, pytest.approx(0.6))]


def test_numbers_of_different_labels_kinds_or_settings_are_never_in_one_panel(tmp_path):
    run = make_run(tmp_path, "a", 0.5)
    result(run, 10, 0.6, labels={"kind": "bernoulli", "fraction": 0.2, "count": 300})
    result(run, 10, 0.4, kind="knn", k=10)
    result(run, 10, 0.3, kind="knn", k=20)
    other = make_run(tmp_path, "b", seed=1)
    result(other, 10, 0.2, kind="knn", k=10)
    result(run, 10, 0.1, kind="npi", k=10)  # what varies in one kind is no matter in another
    panels = {str(panel.evaluation): panel for panel in arrange(read_runs([run, other]))}
    assert set(panels) == {
        "fine-tuning, 10 % labels",
        "fine-tuning, 20 % labels",
        "nearest neighbours, 10 % labels, k=10",
        "nearest neighbours, 10 % labels, k=20",
        "SuNCEt's own classifier, 10 % labels",
    }
    assert [len(g.curves) for g in panels["nearest neighbours, 10 % labels, k=10"].groups] == [2]
    assert [len(g.curves) for g in panels["nearest neighbours, 10 % labels, k=20"].groups] == [1]


def test_lines_of_nearest_neighbours_while_training_are_a_curve_with_its_own_labels(tmp_path):
    run = make_run(tmp_path, "a")
    line = {
        "step": 4,
        "kind": "knn",
        "epoch": 1.0,
        "images": 8,
        "updates": 4,
        "petaflops": 2.0,
        "seconds": 7.2,
    }
    text = "\n".join(json.dumps({**line, "knn_accuracy": 0.5, "joules": 3.0}) for _ in range(1))
    (run / "metrics.jsonl").write_text(
        text + "\n" + json.dumps({"step": 4, "kind": "train", "loss": 1.0}) + "\n"
    )
    (found,) = read_runs([run])
    assert found.evaluation == Evaluation("online knn", "10 % labels")
    (point,) = found.points
    assert point.costs == {"epochs": 1, "updates": 4, "petaflops": 2, "hours": 0.002, "joules": 3}
    assert point.metrics == {"knn": 0.5}


def test_an_encoder_of_another_run_keeps_its_own_name_wherever_it_was_evaluated(tmp_path):
    simclr = make_run(tmp_path, "simclr", 0.4, suncet=False)
    suncet = make_run(tmp_path, "suncet", 0.6)
    result(suncet, 20, 0.5, home=simclr)  # `finetune suncet.yaml --encoder simclr`
    found = {curve.method: curve for curve in read_runs([simclr, suncet])}
    assert [p.step for p in found["SimCLR"].points] == [10, 20]
    assert [p.step for p in found["SimCLR + SuNCEt"].points] == [10]
    result(suncet, 30, 0.5, home=tmp_path / "gone")
    foreign = [curve for curve in read_runs([suncet]) if curve.run.endswith("gone")]
    assert [(c.method, c.supervised, c.seed) for c in foreign] == [("SimCLR + SuNCEt", True, None)]


def test_a_fine_tuned_encoder_is_its_runs_and_never_beside_one_that_is_not(tmp_path):
    runs = [make_run(tmp_path, "a", seed=0), make_run(tmp_path, "b", seed=1)]
    for run in runs:
        result(run, 10, 0.4, kind="knn", k=10)
        for tag, top1 in (("bernoulli0.1-step_00000010", 0.6), ("labels1", 0.5)):
            result(run, 10, top1, kind="knn", k=10, home=run / "finetune" / tag, finetuned=60)
    panels = {str(panel.evaluation): panel for panel in arrange(read_runs(runs))}
    knn = "nearest neighbours, 10 % labels"
    tuned = (f"{knn}, fine-tuned first ({tag})" for tag in ("bernoulli0.1", "labels1"))
    assert set(panels) == {knn, *tuned}
    for panel in panels.values():
        assert [(group.name, len(group.curves)) for group in panel.groups] == [("SimCLR + SuNCEt", 2)]


def test_a_run_that_was_moved_is_still_itself(tmp_path):
    run = make_run(tmp_path / "old", "a", 0.5)
    (tmp_path / "new").mkdir()
    moved = run.rename(tmp_path / "new" / "a")
    (found,) = read_runs([moved])
    assert found.run == str(moved)


def test_runs_that_were_evaluated_with_other_numbers_are_not_compared(tmp_path):
    ours, theirs = make_run(tmp_path, "a"), make_run(tmp_path, "b", suncet=False)
    result(ours, 10, 0.6, epochs=90, precision="bf16")
    result(theirs, 10, 0.5, epochs=30, precision="fp32")
    found = {str(panel.evaluation): panel for panel in arrange(read_runs([ours, theirs]))}
    assert set(found) == {"fine-tuning, 10 % labels, epochs=90", "fine-tuning, 10 % labels, epochs=30"}
    alike = make_run(tmp_path, "c", suncet=False)
    result(alike, 10, 0.5, epochs=90, precision="fp32")
    text = report([ours, alike], tmp_path / "out").read_text()
    assert "fine-tuning, 10 % labels: not all runs were evaluated with the same precision." in text
    assert "at least 0 % of FLOPs" in text, "and they are compared"


def test_checkpoints_that_some_seeds_lack_are_told_of(tmp_path):
    runs = [make_run(tmp_path, "a", 0.5, 0.6, seed=0), make_run(tmp_path, "b", 0.7, seed=1)]
    text = report(runs, tmp_path / "out").read_text()
    assert (
        "SimCLR + SuNCEt, fine-tuning, 10 % labels: averaged at 1 of 2 checkpoints, those that all seeds"
        in text
    )
    assert "(seed 0: 2, 1: 1), so no compute saved is told of the mean." in text
    text = report([runs[0]], tmp_path / "out").read_text()
    assert "averaged at" not in text


def test_a_baseline_that_lacks_checkpoints_of_a_seed_makes_no_saving_of_a_mean(tmp_path):
    runs = [
        make_run(tmp_path, "simclr_0", 0.4, 0.5, 0.6, seed=0, suncet=False),
        make_run(tmp_path, "simclr_1", 0.4, seed=1, suncet=False),  # its evaluations go on
        make_run(tmp_path, "suncet_0", 0.5, 0.7, 0.8, seed=0),
        make_run(tmp_path, "suncet_1", 0.5, 0.7, 0.8, seed=1),
    ]
    text = report(runs, tmp_path / "out").read_text()
    # The mean of both seeds ends at 0.4: SuNCEt would have saved nothing of a baseline of 10 updates.
    assert "| top1 | - | updates | - | - | 50.0 %, at most 100.0 % | - | - |" in text
    assert {r["seed"] for r in rows(tmp_path / "out" / "saved.csv")} == {"0", "1"}
    (line,) = [line for line in text.splitlines() if line.startswith("| SimCLR + SuNCEt | 10 % labels |")]
    assert line.endswith("| - |")


def test_what_took_more_than_the_baseline_is_not_a_negative_saving(tmp_path):
    runs = [make_run(tmp_path, "a", 0.5, suncet=False), make_run(tmp_path, "b", 0.4, 0.5)]
    assert "| 100 % more FLOPs, 100 % more updates |" in report(runs, tmp_path / "out").read_text()


def test_all_labels_are_all_labels_however_they_were_drawn(tmp_path):
    run, other = make_run(tmp_path, "a"), make_run(tmp_path, "b", suncet=False)
    result(run, 10, 0.6, labels={"kind": "bernoulli", "fraction": 1.0, "count": 1600})
    result(other, 10, 0.5, labels={"kind": "all", "fraction": 1.0, "count": 1600})
    (panel,) = arrange(read_runs([run, other]))
    assert panel.evaluation.labels == "all labels" and len(panel.groups) == 2


# ---------------------------------------------------------------------------------------------------- files
def test_the_report_holds_table_savings_formula_and_pictures(runs, tmp_path, capsys):
    path = report(runs, tmp_path / "out")
    text = path.read_text()
    assert capsys.readouterr().out.startswith(text.split("## Pictures")[0].rstrip())
    line = "| SimCLR + SuNCEt | 10 % labels | fine-tuning | 2 | 3 | 30 | 15 | 0.3 | - | 85.0 (80.0 to 90.0) |"
    assert line in text
    # To reach 0.6 from 0.5 at 10 to 0.7 at 20: 15 of 30 updates, and at the same price a FLOP.
    assert "| 50 % of FLOPs, 50 % of updates |" in text
    assert "A training sample costs 6 x MAC of encoder and head" in text
    saving = "| top1 | 60.0 | petaFLOPs | 50.0 % | 66.7 % | 50.0 %, 50.0 % | 1.5 | 100.0 % |"
    assert saving in text
    for picture in ("finetune-10-labels-top1", "saved"):
        pixels = np.asarray(Image.open(tmp_path / "out" / f"{picture}.png").convert("L"))
        assert pixels.std() > 10, f"{picture} is blank"
        assert f"({picture}.png)" in text
    svg = (tmp_path / "out" / "finetune-10-labels-top1.svg").read_text()
    for label in ("top-1 accuracy, %", "model updates", "compute, petaFLOPs", "time, minutes"):
        assert f">{label}</text>" in svg


def test_the_tables_for_a_spreadsheet_hold_every_number(runs, tmp_path):
    report(runs, tmp_path / "out")
    points = rows(tmp_path / "out" / "points.csv")
    assert len(points) == 12 and float(points[0]["petaflops"]) == 5 and points[0]["joules"] == ""
    last = rows(tmp_path / "out" / "table.csv")[-1]
    assert (last["method"], last["seeds"], float(last["top-1, %"])) == (
        "SimCLR + SuNCEt",
        "2",
        pytest.approx(0.85),
    )
    saved = {(r["cost"], r["seed"]): r for r in rows(tmp_path / "out" / "saved.csv")}
    assert float(saved["updates", "mean curve"]["linear_percent"]) == pytest.approx(50)
    assert float(saved["hours", "0"]["first_checkpoint_percent"]) == pytest.approx(200 / 3)
    assert {seed for _, seed in saved} == {"mean curve", "0", "1", "mean of seeds"}


def test_never_reached_is_written_as_such(tmp_path):
    runs = [make_run(tmp_path, "a", 0.6, suncet=False), make_run(tmp_path, "b", 0.5)]
    text = report(runs, tmp_path / "out").read_text()
    assert text.count("never reached") >= 3


def test_an_encoder_from_a_file_stands_in_the_table_without_costs(tmp_path):
    run = make_run(tmp_path, "a", 0.5)
    encoder = {"source": "/weights/resnet50.pth", "step": None, "epoch": None, "method": None, "ledger": None}
    record = {
        "kind": "finetune",
        "metrics": {"top1": 0.7},
        "images": 355,
        "labels": LABELS,
        "encoder": encoder,
    }
    write_result(run, {**record, "setting": {}, "run": "a", "versions": {}})
    text = report([run], tmp_path / "out").read_text()
    assert "| resnet50.pth | 10 % labels | fine-tuning | 1 | - | - | - | - | - | 70.0 | - |" in text


def test_the_same_numbers_give_the_same_bytes(runs, tmp_path):
    for name in ("one", "two"):
        report(runs, tmp_path / name, figures=["imagenet-10pct"])
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {Path(name).suffix for name in files} == {".md", ".csv", ".png", ".svg"}
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_the_papers_points_are_drawn_beside_results_of_their_kind_and_by_themselves_else(runs, tmp_path):
    report(runs, tmp_path / "out", figures=["imagenet-10pct"])
    svg = (tmp_path / "out" / "finetune-10-labels-top1.svg").read_text()
    assert "SimCLR + SuNCEt (paper)" in svg and "SimCLR + SuNCEt, mean of 2 seeds" in svg
    text = report(runs, tmp_path / "npi", figures=["npi"]).read_text()
    assert "no results of SuNCEt's own classifier, 10 % labels, so it is drawn by itself" in text
    assert "| SimCLR + SuNCEt (paper) | 10 % labels | SuNCEt's own classifier | 1 | 400 | 181,600 |" in text


def test_the_papers_points_never_stand_beside_results_of_another_share_of_labels(tmp_path):
    run = make_run(tmp_path, "a", 0.5)
    result(run, 10, 0.3, labels={"kind": "bernoulli", "fraction": 0.01, "count": 16})
    report([run], tmp_path / "out", figures=["imagenet-10pct"])
    assert "(paper)" in (tmp_path / "out" / "finetune-10-labels-top1.svg").read_text()
    assert "(paper)" not in (tmp_path / "out" / "finetune-1-labels-top1.svg").read_text()


def test_the_paper_alone_is_drawn_with_its_percentages_and_ours(tmp_path, capsys):
    assert main(["report", "--paper", "--output", str(tmp_path / "paper")]) == 0
    out = capsys.readouterr().out
    assert "| imagenet-10pct, top1 | 45 | 50.5 |" in out and "| imagenet-1pct, top5 | 81 |" in out
    for name in ("finetune-10-labels-top1", "finetune-10-labels-top5", "finetune-1-labels-top1", "saved"):
        assert np.asarray(Image.open(tmp_path / "paper" / f"{name}.png").convert("L")).std() > 10


def test_units_suit_what_is_drawn():
    assert unit("petaflops", 3.3e-4) == (1e-6, "compute, gigaFLOPs")
    assert unit("petaflops", 390) == (1, "compute, petaFLOPs")
    assert unit("petaflops", 62_746) == (1000, "compute, exaFLOPs")
    assert unit("hours", 20 / 3600) == (1 / 3600, "time, seconds")
    assert unit("updates", 600) == (1, "model updates")
    assert unit("joules", 7.2e6) == (3.6e6, "energy of the GPUs, kWh")


# --------------------------------------------------------------------------------------------------- refusals
def refused(capsys, *arguments: str) -> tuple[int, str]:
    code = main(["report", *map(str, arguments)])
    return code, capsys.readouterr().err


def test_what_cannot_be_reported_is_refused_with_what_there_is(runs, tmp_path, capsys):
    out = ("--output", tmp_path / "out")
    code, said = refused(capsys, runs[0], *out, "--metric", "map11")
    assert code == 2 and "nothing here was measured by --metric map11; there is top1, top5" in said
    code, said = refused(capsys, tmp_path / "nowhere", *out)
    assert code == 3 and "nowhere is not there" in said
    code, said = refused(capsys, tmp_path, *out)
    assert code == 3 and "holds no config.yaml" in said
    code, said = refused(capsys, make_run(tmp_path, "new"), *out)
    assert code == 3 and "nothing was evaluated yet" in said
    code, said = refused(capsys, *out)
    assert code == 2 and "which runs?" in said
    code, said = refused(capsys, *out, "--paper", "fig99")
    assert code == 2 and "there is imagenet-10pct, imagenet-1pct" in said
    assert not (tmp_path / "out").exists(), "a refused report writes nothing"
    (runs[0] / "results" / "broken.json").write_text("{")
    code, said = refused(capsys, runs[0], *out)
    assert code == 5 and "broken.json" in said


def test_a_run_without_results_yet_is_said_beside_those_that_have_some(runs, tmp_path):
    text = report([*runs, make_run(tmp_path, "new")], tmp_path / "out").read_text()
    assert "new: nothing was evaluated yet." in text


def test_the_baseline_and_a_forgotten_figure_can_be_given_in_any_order(runs, tmp_path, capsys):
    out = ["--output", str(tmp_path / "out")]
    assert main(["report", "--paper", str(runs[2]), "--baseline", str(runs[0]), *out]) == 0
    text = capsys.readouterr().out
    assert "| SimCLR | 10 % labels | fine-tuning | 1 |" in text and "(paper)" in text
