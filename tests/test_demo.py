"""The demo says what its numbers say, and no more; the preview shows what training sees."""

import json

import numpy as np
import pytest
from PIL import Image

from fastsuncet.demo import METHODS, Curve, demo, table, verdict
from fastsuncet.preview import preview, sheet
from tests.runs import CONFIGS, small_config


def curves(baseline: list[float], ours: list[float]) -> dict[str, Curve]:
    updates = [60 * (i + 1) for i in range(len(baseline))]
    spent = [1e-6 * u for u in updates]
    return {name: Curve(updates, spent, accuracy) for name, accuracy in zip(METHODS, (baseline, ours))}


def test_the_verdict_names_the_gain_and_the_compute_at_which_the_baselines_best_was_reached():
    text = verdict(curves([0.80, 0.90, 0.92, 0.91], [0.85, 0.93, 0.94, 0.95]))
    assert "95.0 % of the test digits with SuNCEt and on 91.0 % without: 4.0 points more." in text
    assert "SimCLR's best (92.0 %) after 120 of 240 updates, 50% of the compute" in text


def test_the_verdict_admits_a_loss_and_a_draw():
    worse = verdict(curves([0.80, 0.95], [0.85, 0.90]))
    assert "5.0 points less." in worse
    assert "never reached SimCLR's best (95.0 %)" in worse
    assert "no difference." in verdict(curves([0.9], [0.9]))


def test_the_table_has_a_line_a_checkpoint_with_both_methods():
    head, *lines = table(curves([0.8, 0.9], [0.85, 0.95]))
    assert all(name in head for name in METHODS)
    assert lines[1].split() == ["120", "120.0", "90.0%", "95.0%"]


def test_the_demo_spends_the_same_compute_on_both_methods_and_draws_both_pictures(tmp_path, capsys):
    seen = demo(CONFIGS, tmp_path, seed=3, overrides=("optimization.steps=120", "meta.threads=1"))
    simclr, suncet = (seen[name] for name in METHODS)
    assert simclr.updates == suncet.updates == [60, 120]
    assert simclr.petaflops == suncet.petaflops
    assert min(simclr.best, suncet.best) > 0.6  # chance is 0.1
    kept = json.loads((tmp_path / "demo_seed3.json").read_text())
    assert kept["SimCLR"]["accuracy"] == simclr.accuracy
    said = capsys.readouterr().out
    assert verdict(seen) in said
    for name in ("demo_seed3.png", "views.png"):
        pixels = np.asarray(Image.open(tmp_path / name).convert("L"))
        assert pixels.std() > 10, f"{name} is blank"


def test_the_preview_shows_the_views_of_its_step_by_both_back_ends_alike(tmp_path):
    config = small_config(tmp_path)
    rows = dict(sheet(config, step=2))
    for number in (1, 2):
        ours, theirs = (
            np.stack([p for p, _ in rows[f"view {number}\n{who}"]]) for who in ("DALI", "torchvision")
        )
        assert np.abs(ours - theirs).mean() < 2 / 255
    assert not np.allclose(rows["view 1\nDALI"][0][0], rows["view 2\nDALI"][0][0])
    classes = [caption for _, caption in rows["labeled"]]
    assert classes[0::2] == classes[1::2], "a person reads pairs of one class"


def test_a_preview_is_a_picture_file(tmp_path):
    path = preview(small_config(tmp_path), tmp_path / "new folder" / "views.png")
    assert Image.open(path).format == "PNG"


@pytest.mark.parametrize("name", METHODS.values())
def test_both_methods_of_the_demo_show_256_views_an_update(name):
    from fastsuncet.config import load_config

    assert load_config(CONFIGS / name).resolve(1, 1442, 10).samples(0) == 256
