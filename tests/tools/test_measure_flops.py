"""measure_flops prints what a run costs, as the ledger counts."""

import json

import pytest

from tools.measure_flops import main


@pytest.fixture
def cost_of(capsys):
    """Return the printed rows by name: {"epoch": ["2,555,904", "62.746"], ...}."""

    def run(config: str, *overrides: str) -> dict[str, list[str]]:
        assert main([config, *overrides]) == 0
        rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
        return {row[0]: row[1:] for row in rows}

    return run


def test_measure_flops_of_the_papers_runs_are_the_recipes(cost_of):
    rows = cost_of("in1k_simclr", "optimization.epochs=100")
    assert rows["epoch"] == ["2,555,904", "62.746"] and rows["run of 31,200 updates"][1] == "6274.6"
    rows = cost_of("in1k_10pct", "optimization.epochs=100")
    assert rows["update with labels"] == ["8,192", "0.20111"] and "update" not in rows  # as long as it lasts
    assert cost_of("in1k_10pct")["update"][0] == "5,632"
    assert float(rows["run of 45,400 updates"][1]) / 6274.6 == pytest.approx(1.455, abs=5e-4)
    rows = cost_of("cifar10_simclr", "--images", "2560", "optimization.epochs=20")
    assert rows["update"][0] == "512" and rows["epoch"][0] == "5,120"
    assert float(rows["update"][1]) == pytest.approx(0.0040, rel=1e-3)
    # As `train --dry-run` has it.
    rows = cost_of("digits_alone", "--labels", "160", "optimization.steps=null", "optimization.epochs=40")
    assert rows["run of 80 updates"] == ["4,800", "1.0233e-05"]


def test_measure_flops_asks_for_numbers_that_no_public_data_set_has(capsys):
    for words, said in (
        (["digits_alone"], "--labels N"),
        (["digits_simclr", "data.kind=synthetic"], "--images N"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert f"give it as {said}" in capsys.readouterr().err


@pytest.mark.parametrize(("flop", "micro_batch"), [(6, "null"), (8, "256")])
def test_measure_flops_prints_its_numbers_as_json(flop, micro_batch, capsys):
    settings = ["optimization.epochs=20", "model.name=resnet_tiny", f"criterion.micro_batch={micro_batch}"]
    assert main(["cifar10_simclr", "--json", *settings]) == 0
    costs = json.loads(capsys.readouterr().out)
    view, update = costs["view"], costs["run"]["update"]
    assert update["views"] == 512 and list(view) == ["MAC, forward"], (
        "a view can cost 6 or 8 FLOP a multiply-add"
    )
    assert update["petaflops"] == pytest.approx(512 * flop * 1e-15 * view["MAC, forward"])
