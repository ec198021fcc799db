"""All problems of a config are reported at once, each with its line, its key and what is allowed."""

from pathlib import Path

import pytest

from fastsuncet.config import ConfigErrors
from fastsuncet.config.schema import CONFIG
from tests.support.configs import GOOD, load, refusal, wrong_files


@pytest.mark.parametrize("case", wrong_files(Path(__file__).parent / "wrong_configs.txt"))
def test_messages_wrong_config(case):
    with pytest.raises(ConfigErrors) as caught:
        load(case.text, *case.overrides)
    case.check(caught.value)


def test_messages_all_at_once():
    """The problems come in the order of the file, with those of the command line last."""
    text = GOOD.replace("root:", "roots:").replace("epochs: 100", "epochs: 5\n  warmup: 10")
    expected = """\
  run.yaml:3: data.roots: /images
      there is no such key; did you mean data.root?
  run.yaml:9: optimization.warmup: 10
      must be shorter than the run: 10 epochs of 5
  run.yaml:10: optimization.lr: "1.0"
      must be a number above 0 and up to 1,000,000,000
  command line: optimization.momentum
      an override is written section.key=value, without spaces around the =
  command line: meta.precision=fp15
      must be auto, bf16, fp16 or fp32"""
    assert refusal(text.replace("1.0", '"1.0"'), "meta.precision=fp15", "optimization.momentum") == expected


@pytest.mark.parametrize("instance", ["none", "paws"])
def test_messages_switch_off_no_method_that_needs_labels(instance):
    keys = [f"criterion.instance={instance}", "criterion.supervision=none", "criterion.supervised_epochs=all"]
    found = refusal(GOOD, *keys, "criterion.classes_per_batch=0")
    assert "needs labeled images" in found and "all or csv" in found and "supervised_epochs: 0" not in found


def test_messages_control_characters_and_long_values():
    message = refusal(GOOD, "logging.folder=\x1b[2J", f"meta.seed={'9' * 1000}")
    assert "\x1b" not in message
    assert "command line: logging.folder=?[2J\n      not valid YAML: the character U+001B is" in message
    assert f"command line: meta.seed={'9' * 57}...\n" in message


ABSURD = [10**30, 2**63, -1, "1e308", ".nan", "-.inf", '""', [-1, -1], "[.nan, .inf, 1e400]", "{per_rank: 0}"]


@pytest.mark.parametrize("value", ABSURD)
def test_messages_every_key_refuses_absurd_numbers(value):
    found = refusal(GOOD, *(f"{key}={value}" for key in CONFIG.values))
    assert [key for key in CONFIG.values if f"command line: {key}={value}\n      must be " not in found] == []
