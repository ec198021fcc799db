"""The report: one folder of runs whose report is kept in golden_report/, what it refuses, and its pictures."""

import csv
import json
import os
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsuncet import versions
from fastsuncet.commands import report as reports
from fastsuncet.commands.report import figures, methods_tables, report
from fastsuncet.commands.report.curves import Curve, Measurement, Point, arrange, join_lengths
from fastsuncet.commands.report.reading import read_runs
from fastsuncet.config import ConfigErrors
from tests.support.reports import LABELS, make_run, result, write_lines

GOLDEN = Path(__file__).parent / "golden_report"
RUNS = [Path("runs", name) for name in ("simclr_0", "simclr_1", "suncet_0", "suncet_1", "short", "new")]
KNN = {"epoch": 1.0, "views": 8, "updates": 4, "petaflops": 2.0, "seconds": 7.2, "joules": 3.0}
KNN |= {"knn_accuracy": 0.5, "knn_supports": 16, "rankme": 42.5}


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Draw fewer pixels than for a user, since most of the time goes into them."""
    monkeypatch.setattr(figures, "DPI", 60)


@pytest.fixture
def seeds() -> list[Path]:
    """Two seeds of SimCLR and of SimCLR + SuNCEt, one of them fine-tuned with all labels too."""
    folder = Path("runs")
    simclr_0 = make_run(folder, "simclr_0", 0.4, 0.5, 0.6, seed=0, suncet=False)
    simclr_1 = make_run(folder, "simclr_1", 0.3, 0.5, 0.6, seed=1, suncet=False)
    ours = [make_run(folder, f"suncet_{seed}", 0.5, 0.7, 0.8 + seed / 10, seed=seed) for seed in (0, 1)]
    result(ours[0], 10, 0.6, labels={"kind": "bernoulli", "fraction": 1.0, "count": 1600})
    return [simclr_0, simclr_1, *ours]


@pytest.fixture
def runs(seeds):
    """The seeds with every kind of result, a run of other settings, a new one."""
    folder, (simclr_0, simclr_1, *ours) = Path("runs"), seeds
    short = make_run(folder, "short", 0.75, overrides=("criterion.supervised_epochs=1",))
    unlabeled = ("data.split.kind=none", "data.split.fraction=null")
    new = make_run(folder, "new", seed=7, suncet=False, overrides=unlabeled)
    # An encoder of another run keeps its run; one of a run that is gone, and a file, are runs of their own.
    result(ours[1], 40, 0.65, home=simclr_1)
    result(ours[1], 40, 0.66, home=folder / "gone")
    result(ours[1], None, 0.67, source="/weights/resnet50.pth")
    # All labels are one share, however they were chosen, and 20 % are another.
    result(short, 10, 0.5, labels={"kind": "all", "fraction": 1.0, "count": 1600})
    result(ours[0], 10, 0.7, labels={"kind": "bernoulli", "fraction": 0.2, "count": 300})
    # What varies for one encoder makes two measurements; what varies in one kind does not matter in another.
    for k, top1 in ((10, 0.4), (20, 0.3)):
        result(ours[0], 10, top1, kind="knn", k=k)
    result(ours[1], 10, 0.2, kind="knn", k=10)
    result(ours[0], 10, 0.1, kind="npi", k=10)
    # An encoder before and after a fine-tuning, and after two of them.
    for run in ours:
        for tag, top1 in (("bernoulli0.1-step_00000010", 0.6), ("labels1", 0.5)):
            result(run, 10, top1, kind="accuracy", home=run / "finetune" / tag, finetuned=60)
    # Seeds of the evaluation are averaged; a precision belongs to the machine.
    for seed, top1 in enumerate((0.4, 0.6, 0.8)):
        result(ours[0], 10, top1, kind="linear", seed=seed, precision="bf16")
    result(simclr_0, 10, 0.5, kind="linear", precision="fp32")
    for run in (simclr_0, ours[0], new):
        write_lines(run, {"step": 4, "kind": "knn", **KNN}, {"step": 4, "kind": "train", "loss": 1.0})
    make_run(folder, "empty")
    return [*RUNS, folder / "empty"]


def test_report_is_the_golden_one(runs, monkeypatch, capsys):
    """Each line of `runs` shows there. Read what changed before you copy it."""
    monkeypatch.setattr(reports, "_draw", lambda *_: [])
    path = report(runs, Path("out"), metrics=["top1", "rankme"], figures=["imagenet-10pct", "npi"])
    assert capsys.readouterr().out.startswith(path.read_text().split("## Pictures")[0].rstrip())
    for name in ("report.md", "table.csv", "saved.csv", "points.csv"):
        assert Path("out", name).read_text().splitlines() == (GOLDEN / name).read_text().splitlines(), name


@pytest.mark.slow
def test_report_draws_pictures_with_the_same_bytes_for_the_same_numbers(seeds, monkeypatch):
    report(seeds, Path("one"), figures=["imagenet-10pct"])
    assert {path.suffix for path in Path("one").iterdir()} == {".md", ".csv", ".png", ".svg"}
    draw = reports._draw  # the second time one panel, which stands for all
    monkeypatch.setattr(reports, "_draw", lambda panels, by, *_: draw(panels[:1], by, [], False, Path("two")))
    report(seeds, Path("two"), figures=["imagenet-10pct"])
    same = [path for path in Path("two").iterdir() if path.name != "report.md"]
    assert {path.suffix for path in same} == {".csv", ".png", ".svg"}
    for path in same:
        assert path.read_bytes() == Path("one", path.name).read_bytes(), path
    for picture in ("finetune-10-labels-top1", "saved"):
        pixels = np.asarray(Image.open(Path("one", f"{picture}.png")).convert("L"))
        assert pixels.std() > 10, f"{picture} is blank"
        assert f"({picture}.png)" in (text := Path("one", "report.md").read_text()) and ".svg)" not in text
    svg = Path("one", "finetune-10-labels-top1.svg").read_text()
    methods = ("SimCLR + SuNCEt (paper)", "SimCLR, mean of 2 seeds")
    for label in ("top-1 accuracy, %", "200k", "compute, exaFLOPs", "20", *methods):
        assert f">{label}</text>" in svg, label
    # The paper's points stand only next to results of their kind and share of labels.
    assert "(paper)" not in Path("one", "finetune-all-labels-top1.svg").read_text()


@pytest.mark.slow
def test_report_of_the_paper_alone_has_its_percentages(run_cli):
    out = run_cli("report --paper --output paper")
    assert "| imagenet-10pct, top1 | 45 | 50.5 |" in out and "| imagenet-1pct, top5 | 81 |" in out
    assert "top-" not in run_cli("report --paper transfer --output transfer")
    for name in ("finetune-10-labels-top1", "finetune-10-labels-top5", "finetune-1-labels-top1", "saved"):
        assert np.asarray(Image.open(f"paper/{name}.png").convert("L")).std() > 10


def test_report_figure_shows_the_spread_of_a_single_checkpoint(tmp_path):
    curves = [
        Curve("", "SimCLR", seed, Measurement("linear", ""), (Point(1, {"updates": 1}, {"top1": top1}),))
        for seed, top1 in enumerate((0.2, 0.8))
    ]
    (panel,) = arrange(curves)
    named = replace(panel, measurement=Measurement("linear", "", ", ".join(f"key{i}={i}" for i in range(50))))
    assert figures.draw_panel(named, "top1", tmp_path)[0].name.startswith("linear-key0-0-key1-1-")
    png, _ = figures.draw_panel(panel, "top1", tmp_path)
    red, _, blue = np.moveaxis(np.asarray(Image.open(png).convert("RGB"), int), 2, 0)
    assert (blue - red > 20).sum(0).max() > 0.3 * len(red)  # a bar, not the marker alone
    many = [replace(curve, run=str(i), settings=(("lr", i),)) for i in range(40) for curve in curves[:1]]
    tall, _ = figures.draw_panel(arrange(many)[0], "top1", tmp_path)
    assert Image.open(tall).height > 1.3 * len(red)


def test_write_puts_the_legend_below_the_panels(tmp_path):
    figure = figures.Figure(figsize=(4, 3))
    figure.subplots().plot([0, 1], [0, 1], label="a")
    figures.write(figure, tmp_path / "one")
    assert figure.legends[0].get_window_extent().y1 < figure.axes[0].get_tightbbox().y0


def test_table_counts_the_seeds_of_its_number_where_no_checkpoint_is_common():
    point = Point(1, {}, {"top1": 0.5})
    points = [(point,), (replace(point, step=2),)]
    curves = [Curve("", "SimCLR", seed, Measurement("linear", ""), points[seed]) for seed in (0, 1)]
    assert [row[3] for row in methods_tables(arrange(curves), "top1")[1][1]] == [1]


def test_read_runs_recognizes_a_run_that_was_moved():
    run = make_run(Path("old"), "a", 0.5)
    Path("new").mkdir()
    for name in ("renamed", "a"):
        run = run.rename(Path("new", name))
        assert [curve.run for curve in read_runs([run])[0]] == [str(run)]
    new = make_run(Path("old"), "a", 0.6)  # in the place of the moved one
    result(new, None, 0.7, source=new / "w.pth")
    nameless = result(new, 20, 0.8)
    nameless.write_text(nameless.read_text().replace('"source"', '"other"'))
    found = {curve.run: curve.points[0].metrics["top1"] for curve in read_runs([run, new])[0]}
    assert found == {str(run): 0.5, str(new): 0.6, f"{new}/w.pth": 0.7}
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("\nmodel:\n", "\nmodel:\n  tomorrow: 1\n"))
    with pytest.raises(ConfigErrors, match=r"config\.yaml:\d+: model\.tomorrow"):
        read_runs([run])


def test_report_draws_and_lists_a_run_of_any_name_once():
    names = [os.fsdecode(b"\xff$\\frac$"), "<b>\n|", 150 * "x"]
    runs = [make_run(Path("runs"), f"run{i}", 0.5, 0.6).rename(name) for i, name in enumerate(names)]
    Path("link").symlink_to(runs[0])
    with warnings.catch_warnings(record=True) as caught:
        path = report([*runs, Path("link")], Path("out"), baseline=runs[0])
    assert "| SimCLR + SuNCEt, \\<b> \\| |" in path.read_text() and "their mean" not in path.read_text()
    assert b"\xff$" in Path("out", "points.csv").read_bytes()
    assert ">SimCLR + SuNCEt, ?$" in Path("out", "finetune-10-labels-top1.svg").read_text()
    assert not caught, "matplotlib warns where a name leaves no room for the axes"


def test_read_runs_takes_lines_of_metrics_that_hold_anything():
    split = "data.split={kind: stratified, fraction: null, images: 100}"
    run = make_run(Path("runs"), "a", overrides=[split])
    changes = [{}, {"seconds": "soon"}, {"seconds": -1}, {"seconds": float("inf")}, {"seconds": 10**400}]
    changes += [{"knn_accuracy": None}, {"knn_accuracy": float("nan")}]
    lines = [{"step": 9, "kind": "knn", "epoch": 1}]
    lines += [{"step": step, "kind": "knn"} | KNN | change for step, change in enumerate(changes)]
    write_lines(run, *lines)
    labels = {"kind": "stratified", "fraction": 0.05, "count": 80}  # some are validation images
    result(run, 9, 0.5, labels=labels, asked={"data.split.images": 125, "data.validation": 0.2})
    evaluated, curve = read_runs([run])[0]
    assert curve.measurement.labels == evaluated.measurement.labels == "100 labels"
    assert ["hours" in point.costs for point in curve.points] == [True] + 4 * [False]
    assert {point.metrics["knn"] for point in curve.points} == {0.5}
    ten = ["data.kind=image_folder", "data.root=x", "data.split={kind: names, fraction: null, file: ten.txt}"]
    run = make_run(Path("runs"), "b", overrides=[*ten, "data.download=false"])
    write_lines(run, lines[1])
    assert read_runs([run])[0][0].measurement.labels == "labels of ten.txt"


def test_read_runs_averages_the_seeds_of_a_draw_and_no_other_labels():
    run = make_run(Path("runs"), "a")
    for top1, kind, share, count, names in (
        *((0.4, "bernoulli", 0.1, 160, None), (0.6, "bernoulli", 0.1, 150, "aa")),
        *((0.5, "names", 0.1, 160, "bb"), (0.7, "names", 0.1, 160, "cc")),
        *((0.2, "bernoulli", 0.0005, 8, None), (0.4, "bernoulli", 0.0005, 9, None)),
        *((0.1, "stratified", 0.0003, 8, None), (0.2, "stratified", 0.0003, 9, None)),
        *((0.3, "csv", 0.0, 3, "dd"), (0.9, "csv", 1.0, 1600, "ee")),
    ):
        labels = {"kind": kind, "fraction": share, "count": count} | ({"names": names} if names else {})
        # Each seed holds out other images.
        more = {"validation": f"{count}", "asked": {"data.validation": 0.2}} if kind == "bernoulli" else {}
        metrics = {"top1": top1} | ({} if names else {"top5": top1})  # an older result can lack one
        result(run, 10, top1, labels=labels, metrics=metrics, **more)
    curves = read_runs([run])[0]
    found = {", ".join(curve.measurement[1:]): curve.points[0].metrics["top1"] for curve in curves}
    assert found == {
        **{"10 % labels, split=bernoulli": 0.5, "10 % labels, names=bb, split=names": 0.5},
        **{"10 % labels, names=cc, split=names": 0.7, "8 labels, ": 0.1, "9 labels, ": 0.2},
        **{"3 labels, ": 0.3, "all labels, ": 0.9, "0.05 % labels, ": pytest.approx(0.3)},
    }


def test_read_runs_averages_seeds_of_two_machines_and_no_two_initial_weights():
    sha = f"model.init_sha256={'a' * 64}"
    settings = [["meta.device=cpu", "meta.threads=1"], ["meta.device=auto", "meta.threads=2"]]
    settings += [["model.init=one.pth"], ["model.init=one/w.pth", sha], ["model.init=two/w.pth", sha]]
    runs = [make_run(Path("runs"), f"run{i}", 0.5, seed=i, overrides=each) for i, each in enumerate(settings)]
    curves, notes = read_runs(runs)
    found = {re.sub(".*(, init|/)", "", g.name).strip(): len(g.curves) for g in arrange(curves)[0].groups}
    assert found == {"None": 2, "one.pth": 1, "w.pth aaaaaaaa": 2}
    assert {
        "not all runs were trained with the same meta.device, meta.threads: their hours can differ by that",
        "the cost of the initial weights (model.init) is not counted: runs/run2, runs/run3, runs/run4",
    } <= set(notes)
    simclr = make_run(Path("runs"), "simclr", 0.5, suncet=False, overrides=settings[2])
    for others, baseline in ((runs[:3], None), (runs[2:], "SimCLR")):
        chosen = arrange(read_runs([simclr, *others])[0])[0].baseline
        assert (chosen and chosen.name) == baseline, "one from weights only where no run is from scratch"


def test_report_names_runs_that_were_not_measured_at_their_end(monkeypatch):
    monkeypatch.setattr(reports, "_draw", lambda *_: [])
    length = ["optimization.steps=null", "optimization.warmup=0", "optimization.epochs=3"]
    early, whole = (
        make_run(Path("runs"), name, *tops, overrides=length)
        for name, tops in (("early", (0.5, 0.6)), ("whole", (0.5, 0.6, 0.7)))
    )
    short = make_run(Path("runs"), "short", 0.4, overrides=[*length, "optimization.epochs=1"])
    text = report([early, whole, short], Path("out"), lengths=True).read_text()
    said = "the last measured checkpoint is taken for the end, and left out with --lengths: runs/early (2 of 3 epochs)"
    assert f"fine-tuning, 10 % labels: {said}.\n" in text
    assert text.count("| SimCLR + SuNCEt | 10 % labels | fine-tuning | 1 | 3 | 30 |") == 1, "whole's last"
    two = make_run(Path("runs"), "two", 0.3, 0.4, overrides=[*length, "optimization.epochs=2"])
    (kept,) = join_lengths(read_runs([early, two])[0])
    assert (kept.run, len(kept.points)) == ("runs/two", 2), "the whole curve of the only one with an end"


def test_report_compares_no_two_data_sets_and_names_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr(reports, "_draw", lambda *_: [])
    runs = [make_run(Path("runs"), "simclr", 0.5, 0.6, suncet=False)]
    other = ["data.kind=image_folder", "data.root=photos", "data.download=false"]
    runs.append(make_run(Path("runs"), "photos", 0.5, 0.6, overrides=other))
    for run in runs:
        result(run, 10, 0.5, kind="transfer")
        write_lines(run, {"step": 4, "kind": "knn", **KNN})
    runs.append(make_run(Path("runs"), "ranked"))
    result(runs[2], 10, 0.5, kind="transfer", metrics={"map11": 0.5})
    Path("runs", "indices").mkdir()
    Path("runs", "demo.json").touch()
    text = report(sorted(Path("runs").iterdir()), Path("out")).read_text()
    evaluations = [line.split(" | ")[2] for line in text.splitlines() if line.startswith("| SimCLR")]
    assert evaluations == ["fine-tuning, data=photos", "transfer", "transfer", "fine-tuning, data=digits"]
    for said in (
        "Nothing to compare: this takes a baseline and a method of the same images, evaluated alike.",
        "left out, no folder of a run: runs/demo.json, runs/indices.",
        "runs/ranked: not shown, it was not measured by top1; --metric takes its map11.",
    ):
        assert f"\n{said}\n" in text
    (record,) = (path for path in (runs[0] / "results").glob("finetune*.json") if "0.5" in path.read_text())
    record.write_text(json.dumps(json.loads(record.read_text()) | {"learned": 3}))
    knn = report(runs[:2], Path("out"), metrics=["knn", "top1", "top5"]).read_text()
    said = "1 result too high, on labels that the network has learned from."
    assert said in knn and said not in text
    assert "training, data=digits |" in knn and "Nothing to compare" in knn
    assert knn.count("| KNN, % |") == knn.count("| top-1, % | top-5, % |") == 1


def test_report_says_where_seeds_are_not_those_of_the_baseline(seeds, monkeypatch):
    monkeypatch.setattr(reports, "_draw", lambda *_: [])
    for run, labels in zip(seeds[::2], (LABELS, LABELS | {"count": 150, "names": "aa"})):
        result(run, 10, 0.5, kind="linear", labels=labels)
    text = report([*seeds[:1], *seeds[2:]], Path("out")).read_text()
    for said in (
        "a linear classifier, 10 % labels: not all runs of seed 0 were evaluated on the same draw of labels.",
        "fine-tuning, 10 % labels: the baseline has no run of seed 1: compared with the mean of its seeds.",
    ):
        assert text.count(said.split(": ")[1]) == 1 and f"\n{said}\n" in text
    uneven = make_run(Path("runs"), "simclr_2", 0.4, seed=2, suncet=False)
    text = report([seeds[0], uneven, *seeds[2:]], Path("out")).read_text()
    lacks = "no run of that seed, and its seeds were not evaluated at the same checkpoints."
    left = "left out: SimCLR + SuNCEt, seed 1: the baseline has"
    assert f"\nfine-tuning, 10 % labels: {left} {lacks}\n" in text


def test_report_refuses_with_a_message_and_writes_nothing(runs, run_cli):
    for words, code, said in (
        ([RUNS[0], "--metric", "map11"], 2, "measured by --metric map11; there is knn, rankme, top1"),
        (["runs"], 3, "holds no config.yaml"),
        ([RUNS[0], "--baseline", "runs"], 3, "holds no config.yaml"),
        (["runs/empty"], 3, "nothing was evaluated yet"),
        ([], 2, "which runs?"),
        (["--paper", "fig99"], 2, "there is imagenet-10pct, imagenet-1pct"),
    ):
        assert said in run_cli("report", *words, code=code)
    assert not Path("report").exists()
    (RUNS[0] / "results" / "broken.json").write_text("{")
    assert "broken.json" in run_cli("report", RUNS[0], code=5)


def test_report_without_matplotlib_takes_a_baseline_and_says_what_to_install(runs, monkeypatch, run_cli):
    monkeypatch.setattr(versions, "installed", lambda package: None)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "fastsuncet.commands.report.figures", raising=False)
    # `--paper RUN`: the name of a figure was left out.
    text = run_cli("report --paper", RUNS[2], "--baseline", RUNS[0])
    assert "| SimCLR | 10 % labels | fine-tuning | 1 |" in text and "(paper)" in text
    written = {path.name for path in Path("report").iterdir()}
    assert written == {"report.md", "table.csv", "saved.csv", "points.csv"}
    assert all("pip install matplotlib" in said for said in (text, Path("report/report.md").read_text()))
    with open("report/saved.csv", newline="") as stream:
        assert {row["baseline"] for row in csv.DictReader(stream)} == {"SimCLR"}
