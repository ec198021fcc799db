"""`configs`: those of the package, listed, printed and copied. `config`: of every key what the schema says."""

import json
import re
from pathlib import Path

import pytest

from fastsuncet import cli
from fastsuncet.commands.sweep import runs
from fastsuncet.commands.sweep.runs import read_sweep
from fastsuncet.config import Config, load_config
from fastsuncet.config.messages import describe
from fastsuncet.config.schema import CONFIG
from fastsuncet.config.shipped import shipped

NAMES = list(shipped())


def test_configs_lists_every_file_with_its_first_comment(run_cli):
    lines = run_cli("configs").splitlines()
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


def test_configs_keeps_a_file_and_suggests_the_nearest_name(run_cli):
    Path("my.yaml").write_text("mine")
    said = run_cli("configs in1k_simclr --copy my.yaml", code=2)
    assert said == "error: my.yaml: File exists. Name another file: --copy FILE\n"
    assert Path("my.yaml").read_text() == "mine"
    said = run_cli("configs in1k_simclr --copy missing/my.yaml", code=2)
    assert "error: missing/my.yaml: No such file or directory." in said
    assert "did you mean in1k_10pct?" in run_cli("configs in1k_10", code=2)


@pytest.mark.slow
def test_configs_name_stands_for_its_run_in_export_and_embed(capsys):
    """A folder of this name wins: it can be a run."""
    for words in ("export digits_demo --to torchvision", "embed digits_demo . --output a.npz"):
        assert cli.main(words.split()) != 0
        assert "runs/digits_demo" in capsys.readouterr().err
    Path("digits_demo").mkdir()
    assert cli.main(["export", "digits_demo", "--to", "torchvision"]) != 0
    assert "runs/digits_demo" not in capsys.readouterr().err


def test_config_has_the_meaning_of_every_key():
    for key in CONFIG.values:
        name, *lines = describe(key)
        assert name == key
        facts = {line.split()[0]: line.split(maxsplit=1)[1:] for line in lines}
        assert list(facts) == ["meaning", "default", "allowed"] and all(facts.values()), key
        (words,) = facts["allowed"]
        assert not words.startswith(("<", "[")) and "Annotated" not in words, key


def test_config_of_a_key_and_of_a_section(run_cli):
    assert run_cli("config logging.wandb").splitlines() == [
        "logging.wandb",
        "  meaning  project of Weights & Biases; null: none",
        "  default  null",
        "  allowed  text, not empty and without control characters, or null",
    ]
    assert "  default  none: it must be written" in describe("criterion.temperature")
    assert [line.split()[0] for line in describe("linear")] == ["linear.strength", "linear.max_iterations"]
    assert {line.split()[0] for line in describe("")} == set(CONFIG.sections[""])


def test_config_unknown_key_suggests_the_nearest(run_cli):
    for key, near in (
        ("temperature", "no such key here; temperature is criterion.temperature or npi.temperature"),
        ("criterion.temprature", "no such key; did you mean criterion.temperature?"),
        ("optimisation.lr", "no such key here; lr is optimization.lr or finetune.lr"),
    ):
        assert run_cli(f"config {key}", code=2) == f"error: {key}: there is {near}\n"


def test_config_json_schema_has_every_key_and_requires_none(run_cli):
    schema = json.loads(run_cli("config --json-schema"))
    for key in CONFIG.values:
        part = schema
        for name in key.split("."):
            part = part["properties"][name]
            while "$ref" in part:
                part = schema["$defs"][part["$ref"].rpartition("/")[2]]
    assert "base" in schema["properties"] and '"required"' not in json.dumps(schema["$defs"]["DataSection"])
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["LoggingSection"]["properties"]["wandb"]["description"].startswith("project of")
