"""The demo: its verdict follows from its numbers, and the two methods that it compares cost the same."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsuncet.commands.demo import demo, verdict
from fastsuncet.commands.report.curves import Curve, Measurement, Point

pytestmark = pytest.mark.slow


ALONE = "labels alone, cross-entropy"


def curves(baseline: list[float], ours: list[float], labels="10 % labels", dearer=1.0) -> list[Curve]:
    made = []
    for method, accuracies in ((ALONE, [0.7] * len(ours)), ("SimCLR", baseline), ("SimCLR + SuNCEt", ours)):
        steps = [60 * (i + 1) for i in range(len(accuracies))]
        each = {ALONE: 0.25e-6, "SimCLR": 1e-6}.get(method, 1e-6 * dearer)
        points = [Point(s, {"petaflops": each * s}, {"top1": a}) for s, a in zip(steps, accuracies)]
        made.append(Curve("", method, 0, Measurement("linear", labels), tuple(points), method != "SimCLR"))
    return made


def test_verdict_follows_from_the_numbers():
    gain = verdict(*curves([0.80, 0.90, 0.92, 0.91], [0.915, 0.93, 0.94, 0.95]))
    for said in (
        "After the same compute a linear classifier on 10 % of the labels is right on "
        "95.0 % of the test digits with SuNCEt and on 91.0 % without: 4.0 points more.",
        "The labels alone have 70.0 % for 25% of the compute.",
        "SimCLR's final accuracy (91.0 %, after 240 updates) after 60 updates: 25% of the compute.",
        "SimCLR's best accuracy (92.0 %, after 180 updates) after 120 updates: 67% of the compute.",
    ):
        assert said in gain
    loss = verdict(*curves([0.80, 0.95], [0.85, 0.90]))
    assert "5.0 points less." in loss
    assert "never reached SimCLR's best accuracy (95.0 %, after 120 updates)" in loss
    assert "no difference." in verdict(*curves([0.9], [0.9]))
    other = verdict(*curves([0.80, 0.90], [0.91, 0.95], "all labels", 1.5))
    for said in (
        "After 150% of SimCLR's compute a linear classifier on all labels is right on 95.0 %",
        "The labels alone have 70.0 % for 17% of SuNCEt's compute.",
        "(90.0 %, after 120 updates) after 60 updates: 75% of the compute.",
    ):
        assert said in other


def test_demo_checks_all_configs_before_it_trains(run_cli):
    said = run_cli("demo optimization.steps=60", code=2)  # with 14 an epoch; the others have fewer
    assert "must be shorter than the run: 5 epochs are 70 steps of 60" in said and not Path("runs").exists()


def test_demo_compares_at_equal_compute_and_writes_its_pictures(capsys):
    folder = Path("seed #3")  # in YAML a comment
    few = ("optimization.steps=12", "optimization.warmup=0", "checkpoint.every=6", "meta.threads=1")
    # The optimum of six fits takes longer than all else.
    few += ("linear.max_iterations=20", "checkpoint.export=[]", "data.split.fraction=0.2")
    seen = demo(folder, seed=3, overrides=few)
    kept = json.loads((folder / "demo_seed3.json").read_text())
    assert list(kept) == [ALONE, "SimCLR", "SimCLR + SuNCEt"]
    alone, simclr, suncet = kept.values()
    assert alone["updates"] == simclr["updates"] == suncet["updates"] == [6, 12]
    assert simclr["petaflops"] == suncet["petaflops"]
    assert alone["petaflops"][1] == pytest.approx(60 / 256 * suncet["petaflops"][1], rel=0.01)
    assert min(*simclr["accuracy"], *suncet["accuracy"]) > 0.6, "chance is 0.1"
    assert simclr["accuracy"] == [p.metrics["top1"] for p in seen[1].points]
    assert {curve.measurement.labels for curve in seen} == {"20 % labels"}
    assert verdict(*seen) in capsys.readouterr().out
    for name in ("demo_seed3.png", "views.png"):
        pixels = np.asarray(Image.open(folder / name).convert("L"))
        assert pixels.std() > 10, f"{name} is blank"
