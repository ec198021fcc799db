"""A config is read as it is meant, refused with everything that is wrong with it, and its numbers add up."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from fastsuncet.config import Config, ConfigErrors, load_config
from fastsuncet.config.keys import KEYS, SECTIONS, VALUES, allowed
from fastsuncet.config.reader import MAX_BYTES, MAX_VALUES
from fastsuncet.config.rules import RULES
from fastsuncet.config.schema import Sections

GOOD = """\
data:
  kind: image_folder
  root: /images
criterion:
  temperature: 0.1
  unsupervised_batch_size: 256
optimization:
  epochs: 100
  lr: 1.0
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(text: str = GOOD, *overrides: str) -> Config:
    Path("run.yaml").write_text(text)
    return load_config("run.yaml", overrides)


def refusal(text: str = GOOD, *overrides: str) -> str:
    """The message for a wrong config, without its first line."""
    with pytest.raises(ConfigErrors) as caught:
        load(text, *overrides)
    first, empty, *rest = str(caught.value).split("\n")
    count = len(caught.value.problems)
    assert (first, empty) == (f"{count} problem{'s' * (count > 1)} in the config", "")
    assert caught.value.exit_code == 2
    return "\n".join(rest) + "\n"


# ----------------------------------------------------------------------------------------------- what people are told
class Case(NamedTuple):
    name: str
    text: str
    overrides: list[str]
    message: str


def cases() -> list[Case]:
    """The cases of wrong_configs.txt; its head explains the format."""
    blocks = (Path(__file__).parent / "wrong_configs.txt").read_text().split("\n=== ")[1:]
    found, sound = [], {}
    for block in blocks:
        head, _, message = block.partition("\n---\n")
        name, *lines = head.split("\n")
        whole = [line[2:] for line in lines if line.startswith("| ")]
        overrides = [line[2:] for line in lines if line.startswith("$ ")]
        if name.startswith("sound"):
            sound[name.removeprefix("sound")] = whole
            continue
        text = whole or list(sound[" (supervised)" if name.endswith(" (supervised)") else ""])
        for line in reversed([line for line in lines if line[0].isdigit()]):
            number, insert, new = re.fullmatch(r"(\d+)(\+|:) ?(.*)", line).groups()
            at = int(number)
            text[at if insert == "+" else at - 1 : at] = [new] if new else []
        found.append(
            Case(name, "".join(f"{line}\n" for line in text), overrides, message.rstrip("\n") + "\n")
        )
    return found


def test_there_are_more_than_sixty_wrong_configs_and_no_two_are_the_same():
    assert len(cases()) > 100
    assert len({(case.text, *case.overrides) for case in cases()}) == len(cases())
    assert len({case.name for case in cases()}) == len(cases())


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_wrong_config_is_refused_in_these_words(case):
    assert refusal(case.text, *case.overrides) == case.message


def test_everything_wrong_is_said_at_once_in_the_order_of_the_file_and_the_command_line_last():
    text = """\
data: {kind: image_folder, roots: /images}
criterion:
  temprature: 0.1
  unsupervised_batch_size: 256
  supervised_epochs: 10
optimization:
  epochs: 5
  warmup: 10
  lr: "1.0"
"""
    with pytest.raises(ConfigErrors) as caught:
        load(text, "meta.precision=fp15", "optimization.momentum")
    assert (
        str(caught.value)
        == """\
9 problems in the config

  run.yaml:1: data.roots: /images
      there is no such key; did you mean data.root?
  run.yaml:1: data.split.kind
      none leaves no labeled image, and criterion.supervised_epochs is 10; choose names, bernoulli, all or
      csv, or write supervised_epochs: 0 for SimCLR
  run.yaml:2: criterion.classes_per_batch
      must be 2 or more while supervised_epochs is 10: SuNCEt contrasts classes. For SimCLR alone write
      supervised_epochs: 0
  run.yaml:2: criterion.supervised_imgs_per_class
      must be 2 or more while supervised_epochs is 10: an image alone in its class has no positive. For
      SimCLR alone write supervised_epochs: 0
  run.yaml:3: criterion.temprature: 0.1
      there is no such key; did you mean criterion.temperature?
  run.yaml:8: optimization.warmup: 10
      must be shorter than the run: 10 epochs of 5
  run.yaml:9: optimization.lr: "1.0"
      must be a number above 0; without the quotes it is a number
  command line: optimization.momentum
      an override is written section.key=value, without spaces around the =
  command line: meta.precision=fp15
      must be bf16, fp16 or fp32"""
    )


def test_a_rule_reads_no_key_that_it_does_not_name():
    # A rule that did would be asked about a default in the place of a typo, and blame the person for it.
    for keys, rule in RULES:
        read = set()

        class Watched:
            def __init__(self, value, key, read=read):
                self._value, self._key, self._read = value, key, read

            def __getattr__(self, name):
                value, key = getattr(self._value, name), f"{self._key}.{name}".lstrip(".")
                if key in SECTIONS:
                    return Watched(value, key)
                if key in KEYS:
                    self._read.add(key)
                elif name == "supervised":  # a property of one key
                    self._read.add(f"{self._key}.supervised_epochs")
                return value

        for kind in ("digits", "csv", "image_folder", "cifar10"):
            for split in ("none", "names", "csv", "bernoulli"):
                config = Sections.from_values(
                    {
                        "data": {"kind": kind, "split": {"kind": split}},
                        "criterion": {"temperature": 1, "unsupervised_batch_size": 8, "supervised_epochs": 3},
                        "optimization": {"lr": 1},
                    }
                )
                list(rule(Watched(config, "")))
        assert read <= set(keys), rule.__name__
        assert set(keys) <= KEYS, rule.__name__


def test_a_blur_may_be_as_wide_as_its_mirrored_view_allows():
    # 13 pixels reach 6 beyond a border, and a view of 7 has 6 pixels to mirror; wrong_configs.txt has the view of 6.
    assert load(GOOD, "data.augmentation.size=7").data.augmentation.size == 7
    assert load(GOOD, "data.augmentation={size: 6, blur: 0}").data.augmentation.size == 6


def test_a_message_repeats_no_control_characters_and_no_endless_value():
    said = refusal(GOOD, "logging.folder=\x1b[2J", f"meta.seed={'9' * 1000}")
    assert "\x1b" not in said
    assert (
        "command line: logging.folder=?[2J\n      not valid YAML: the character U+001B is not allowed in it"
        in said
    )
    assert f"command line: meta.seed={'9' * 47}...\n" in said


def test_every_key_says_in_words_what_it_may_be():
    for key in VALUES:
        assert re.fullmatch(r"[^<>\[\]|]+.*", allowed(key)), key
        assert "Annotated" not in allowed(key)


# ----------------------------------------------------------------------------------------------- what a file may hold
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1e-4", 0.0001),
        ("1E-4", 0.0001),
        ("+1e-4", 0.0001),
        (".5", 0.5),
        ("2.", 2.0),
        ("1_000", 1000.0),
        ("3", 3.0),
        ("1.5e3", 1500.0),
        ("4.8", 4.8),
        ("010", 10.0),
    ],
)
def test_a_number_is_read_the_way_it_is_meant(written, meant):
    assert load(GOOD.replace("lr: 1.0", f"lr: {written}")).optimization.lr == meant
    assert load(GOOD, f"optimization.lr={written}").optimization.lr == meant


def test_what_looks_like_a_date_or_base_sixty_stays_text():
    assert load(GOOD, "logging.write_tag=2026-11-21").logging.write_tag == "2026-11-21"
    assert load(GOOD, "logging.folder=1:30").logging.folder == "1:30"


@pytest.mark.parametrize(("written", "meant"), [("yes", True), ("Off", False), ("true", True), ("NO", False)])
def test_a_switch_may_be_yes_or_off(written, meant):
    assert load(GOOD, f"meta.compile={written}").meta.compile is meant


def test_a_file_larger_than_a_megabyte_is_not_read_on():
    Path("run.yaml").write_text(GOOD + "# " + "x" * MAX_BYTES)
    with pytest.raises(ConfigErrors, match=r"run\.yaml is larger than 1 MB: this is not a config"):
        load_config("run.yaml")
    began = time.monotonic()
    with pytest.raises(ConfigErrors, match="larger than 1 MB"):
        load_config("/dev/zero")  # never ends: only the first megabyte is asked for
    assert time.monotonic() - began < 5


def test_a_file_of_endless_values_is_given_up_early():
    assert "more than 5,000 values" in refusal("a: [" + "1, " * (MAX_VALUES + 1) + "1]\n")


def test_a_nul_byte_and_wrong_encodings_are_named_by_line():
    assert refusal(GOOD + "meta: {seed: \0}\n") == (
        "  run.yaml:10\n      not valid YAML: the character U+0000 is not allowed in it\n"
    )
    Path("run.yaml").write_bytes(GOOD.encode() + b"logging: {folder: caf\xe9}\n")
    with pytest.raises(ConfigErrors, match=r"run\.yaml:10\n +not UTF-8 text: save the file as UTF-8"):
        load_config("run.yaml")


def test_a_byte_order_mark_is_no_part_of_the_first_key():
    Path("run.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_config("run.yaml").data.root == "/images"


def test_nothing_in_a_file_is_ever_executed(tmp_path):
    victim = tmp_path / "executed"
    for tag in ("!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir", "!!python/name:os.mkdir"):
        refusal(GOOD + f"meta: {{seed: {tag} ['{victim}']}}\n")
        refusal(GOOD, f"meta.seed={tag} ['{victim}']")
    assert not victim.exists()


def test_an_empty_section_is_one_without_keys():
    assert load(GOOD + "meta:\nlogging: null\n") == load(GOOD)


def test_a_person_who_misspells_the_file_is_shown_the_nearest_one():
    load()
    with pytest.raises(ConfigErrors, match=r"runn\.yaml\n +no such file; did you mean run\.yaml\?"):
        load_config("runn.yaml")
    with pytest.raises(ConfigErrors, match=r"\./zzz\n +no such file; \. holds run\.yaml"):
        load_config("./zzz")
    with pytest.raises(ConfigErrors, match="no such file: there is no folder nowhere"):
        load_config("nowhere/run.yaml")
    with pytest.raises(ConfigErrors, match="is a folder; a config is a YAML file in it"):
        load_config(".")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every file")
def test_a_file_without_permission_is_named():
    load()
    Path("run.yaml").chmod(0)
    with pytest.raises(ConfigErrors, match=r"run\.yaml cannot be read: Permission denied"):
        load_config("run.yaml")


# --------------------------------------------------------------------------------------------------- base and overrides
def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)


def test_a_file_is_laid_on_its_base_key_by_key():
    write("configs/base.yaml", GOOD + "model: {hidden: 512, output: 64}\nmeta: {seed: 1}\n")
    write("configs/run.yaml", "base: base.yaml\nmodel: {output: 32}\ndata:\n  augmentation: {size: 96}\n")
    config = load_config("configs/run.yaml")
    assert (config.model.hidden, config.model.output, config.meta.seed) == (512, 32, 1)
    assert (config.data.root, config.data.augmentation.size) == ("/images", 96)
    assert config.logging.write_tag == "run"


def test_an_error_in_a_base_names_the_file_of_the_base():
    write("configs/base.yaml", GOOD.replace("lr: 1.0", "lr: -1"))
    write("configs/run.yaml", "base: base.yaml\nmeta: {sed: 3}\n")
    with pytest.raises(ConfigErrors) as caught:
        load_config("configs/run.yaml")
    assert str(caught.value).split("\n\n")[1] == (
        "  configs/base.yaml:9: optimization.lr: -1\n"
        "      must be a number above 0\n"
        "  configs/run.yaml:2: meta.sed: 3\n"
        "      there is no such key; did you mean meta.seed?"
    )


def test_a_key_written_twice_in_a_base_is_found_there():
    write("base.yaml", GOOD + "  lr: 2.0\n")
    write("run.yaml", "base: base.yaml\n")
    with pytest.raises(ConfigErrors, match=r"  base\.yaml:10: optimization\.lr: 2\.0\n +written twice"):
        load_config("run.yaml")


def test_a_value_that_replaces_the_base_has_its_own_line_in_errors():
    write("base.yaml", GOOD.replace("size: 256", "size: {per_rank: 32}"))
    write("run.yaml", "base: base.yaml\n\ncriterion: {unsupervised_batch_size: 1}\n")
    with pytest.raises(ConfigErrors, match=r"run\.yaml:3: criterion\.unsupervised_batch_size: 1\n"):
        load_config("run.yaml")


def test_a_global_batch_size_replaces_one_per_rank_and_the_other_way_round():
    write("base.yaml", GOOD.replace("size: 256", "size: {per_rank: 32}"))
    write("run.yaml", "base: base.yaml\ncriterion: {unsupervised_batch_size: 64}\n")
    assert load_config("run.yaml").criterion.unsupervised_batch_size == 64
    for override in ("unsupervised_batch_size={per_rank: 8}", "unsupervised_batch_size.per_rank=8"):
        assert load_config("run.yaml", [f"criterion.{override}"]).resolve(2, 100).global_unlabeled == 16


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("bse.yaml", r"run\.yaml:1: base: bse\.yaml\n      no such file; did you mean base\.yaml\?"),
        ("[a, b]", r"run\.yaml:1: base: \[a, b\]\n      must be the name of another config file"),
        ("", r"run\.yaml:1: base: null\n      must be the name of another config file"),
        (
            "run.yaml",
            r"run\.yaml:1: base: run\.yaml\n      run\.yaml has a base of its own, run\.yaml; one level",
        ),
        (
            "chain.yaml",
            r"base: chain\.yaml\n      chain\.yaml has a base of its own, base\.yaml; one level is all",
        ),
        (".", r"run\.yaml:1: base: \.\n      \. is a folder"),
    ],
)
def test_a_base_that_cannot_be_is_refused_where_it_is_asked_for(base, said):
    write("base.yaml", GOOD)
    write("chain.yaml", "base: base.yaml\n")
    write("run.yaml", f"base: {base}\n")
    with pytest.raises(ConfigErrors, match=said):
        load_config("run.yaml")


def test_overrides_are_yaml_and_the_last_one_counts():
    config = load(
        GOOD,
        "optimization.lr=2.0",
        "data.augmentation.crop_scale=[0.2, 1.0]",
        "optimization.lr=4.8",
        "data.validation=",
        "logging.wandb=null",
        "model={output: 64}",
        "logging.folder=a=b",
        "meta=",
    )
    assert (config.optimization.lr, config.data.augmentation.crop_scale) == (4.8, (0.2, 1.0))
    assert (config.data.validation, config.logging.wandb, config.logging.folder) == (None, None, "a=b")
    assert (config.model.output, config.model.hidden) == (64, 2048)


def test_an_override_mends_a_wrong_value_in_the_file():
    assert load(GOOD.replace("lr: 1.0", "lr: fast"), "optimization.lr=1.0") == load(GOOD)


def test_what_is_missing_beside_an_override_is_blamed_on_the_file():
    said = refusal("data: {kind: digits}\ncriterion: {temperature: 1}\n", "optimization.epochs=3")
    assert "  run.yaml: optimization.lr\n      is missing; it must be a number above 0\n" in said


# ------------------------------------------------------------------------------------------------------------- speed
def test_a_config_is_checked_without_torch_or_dali():
    load()
    code = (
        "import sys; from fastsuncet.config import load_config; load_config('run.yaml').resolve(1, 1000);"
        "print(sorted({'torch', 'nvidia', 'timm'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == "[]\n"
