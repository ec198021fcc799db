"""`fastsuncet config` says of every key what the schema says."""

import json

import pytest

from fastsuncet import cli
from fastsuncet.config.messages import describe, json_schema
from fastsuncet.config.schema import CONFIG


def test_config_has_the_meaning_of_every_key():
    for key in CONFIG.values:
        name, *lines = describe(key)
        assert name == key
        facts = {line.split()[0]: line.split(maxsplit=1)[1:] for line in lines}
        assert list(facts) == ["meaning", "default", "allowed"] and all(facts.values()), key


def test_config_of_a_key(capsys):
    assert cli.main(["config", "logging.wandb"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "logging.wandb",
        "  meaning  project of Weights & Biases; null: none",
        "  default  null",
        "  allowed  text, not empty and without control characters, or null",
    ]
    assert "  default  none: it must be written" in describe("criterion.temperature")


def test_config_of_a_section_lists_its_keys():
    assert [line.split()[0] for line in describe("linear")] == ["linear.strength", "linear.max_iterations"]
    assert {line.split()[0] for line in describe("")} == set(CONFIG.sections[""])


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("temperature", "criterion.temperature or npi.temperature"),
        ("criterion.temprature", "criterion.temperature"),
        ("optimisation", "optimization"),
    ],
)
def test_config_unknown_key_suggests_the_nearest(key, near, capsys):
    assert cli.main(["config", key]) == 2
    assert capsys.readouterr().err == f"error: a config has no key {key}; did you mean {near}?\n"


def test_config_json_schema_has_every_key_and_requires_none(capsys):
    assert cli.main(["config", "--json-schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == json.loads(json.dumps(json_schema()))
    for key in CONFIG.values:
        part = schema
        for name in key.split("."):
            part = part["properties"][name]
            while "$ref" in part:
                part = schema["$defs"][part["$ref"].rpartition("/")[2]]
    assert "base" in schema["properties"] and '"required"' not in json.dumps(schema["$defs"]["DataSection"])
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["LoggingSection"]["properties"]["wandb"]["description"].startswith("project of")
