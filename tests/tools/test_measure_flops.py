"""The tool that counts: torch's counter and the arithmetic agree, and the table says what a run costs."""

import dataclasses
from pathlib import Path

import pytest

from tools.measure_flops import count, main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_torch_counts_a_resnet50_as_the_arithmetic_does_but_for_the_images_gradient():
    found = count("resnet50", "torchvision", "imagenet", 224, 2048, 128)
    assert found.agrees
    assert found.macs == 4_091_592_704
    assert (found.forward + found.backward) / 1e9 == pytest.approx(24.31, abs=0.005)
    assert (found.analytic_forward + found.analytic_backward) / 1e9 == pytest.approx(24.55, abs=0.005)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
@pytest.mark.parametrize(("name", "size"), [("resnet18", 33), ("resnet50", 32)])
def test_both_libraries_and_odd_sizes_are_counted_alike(library, name, size):
    assert count(name, library, "cifar", size, 64, 16, head_batchnorm=True).agrees


@pytest.mark.parametrize("change", [{"macs": 1}, {"forward": 2}, {"backward": 2}, {"image_gradient": 2}])
def test_a_count_that_is_off_by_one_does_not_agree(change):
    found = count("resnet_tiny", "torchvision", "cifar", 16, 64, 16)
    ((field, by),) = change.items()
    assert not dataclasses.replace(found, **{field: getattr(found, field) + by}).agrees


def table(capsys):
    """The printed rows by their name: {"epoch": ["2,555,904", "62.746"], ...}."""
    rows = [line.rsplit(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 3}


def test_the_papers_runs_cost_what_the_recipe_says(capsys):
    assert main([str(CONFIGS / "in1k_simclr.yaml"), "optimization.epochs=100"]) == 0
    rows = table(capsys)
    assert rows["GMAC forward"] == ["4.0916", "4.0916"]
    assert rows["epoch"] == ["2,555,904", "62.746"]
    assert rows["run of 31,200 updates"][1] == "6274.6"
    assert main([str(CONFIGS / "in1k_10pct.yaml"), "optimization.epochs=100"]) == 0
    rows = table(capsys)
    assert rows["update with labels"] == ["8,192", "0.20111"]
    assert float(rows["run of 45,400 updates"][1]) / 6274.6 == pytest.approx(1.455, abs=5e-4)


def test_another_number_of_images_changes_the_epoch_and_not_the_update(capsys):
    assert main([str(CONFIGS / "cifar10_simclr.yaml"), "--images", "2560", "optimization.epochs=20"]) == 0
    rows = table(capsys)
    assert rows["update"][0] == "512" and rows["epoch"][0] == "5,120"
    assert float(rows["update"][1]) == pytest.approx(0.0040, rel=1e-3)


def test_a_wrong_config_ends_with_its_message_and_code(capsys):
    assert main([str(CONFIGS / "in1k_10pct.yaml"), "model.nam=resnet50"]) == 2
    assert "did you mean model.name?" in capsys.readouterr().err
