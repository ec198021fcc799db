"""The configs of the package: listed, printed, and copied so that they work in any folder."""

import re
from pathlib import Path

import pytest

from fastsuncet import cli
from fastsuncet.commands.sweep import runs
from fastsuncet.commands.sweep.runs import read_sweep
from fastsuncet.config import Config, load_config
from fastsuncet.config.shipped import shipped

NAMES = list(shipped())


def test_configs_lists_every_file_with_its_first_comment(capsys):
    assert cli.main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES and len(NAMES) > 20
    (main,) = [line for line in lines if line.startswith("in1k_10pct ")]
    assert main.endswith("  ImageNet, SimCLR + SuNCEt with 10 % of the labels: the paper's main result.")


def configs_of(sweep: str) -> list[Config]:
    return [job.config for run in runs.expand(read_sweep(sweep)) for job in run.jobs]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_configs_copy_means_the_same_in_another_folder(name, monkeypatch):
    """tests/test_paper.py loads every config of the paper's sweeps."""
    file, cases = Path(name).name + ".yaml", runs._cases
    assert cli.main(["configs", name, "--copy"]) == 0
    if re.search(r"(?m)^commands:", Path(file).read_text()):
        # A copy has other lines of a base only: one case of each base is enough, and 2,000 configs take many seconds.
        few = lambda group: {x.settings.get("base"): x for x in cases(group)}.values()  # noqa: E731
        monkeypatch.setattr(runs, "_cases", few)
        assert configs_of(file) == configs_of(name)
    else:
        assert load_config(file) == load_config(name)


def test_configs_keeps_a_file_and_suggests_the_nearest_name(capsys):
    Path("my.yaml").write_text("mine")
    assert cli.main(["configs", "in1k_simclr", "--copy", "my.yaml"]) == 2
    assert capsys.readouterr().err == "error: my.yaml exists; name another file: --copy FILE\n"
    assert Path("my.yaml").read_text() == "mine"
    assert cli.main(["configs", "in1k_simclr", "--copy", "missing/my.yaml"]) == 2
    assert "error: missing does not exist; make this folder first" in capsys.readouterr().err
    assert cli.main(["configs", "in1k_10"]) == 2
    assert "did you mean in1k_10pct?" in capsys.readouterr().err


@pytest.mark.slow
def test_configs_name_stands_for_its_run_in_export_and_embed(capsys):
    """A folder of this name wins: it can be a run."""
    for words in ("export digits_demo --to torchvision", "embed digits_demo . --output a.npz"):
        assert cli.main(words.split()) != 0
        assert "runs/digits_demo" in capsys.readouterr().err
    Path("digits_demo").mkdir()
    assert cli.main(["export", "digits_demo", "--to", "torchvision"]) != 0
    assert "runs/digits_demo" not in capsys.readouterr().err
