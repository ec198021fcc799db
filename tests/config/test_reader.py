"""What a config file can hold, its base, and the overrides."""

import os
from pathlib import Path

import pytest

from fastsuncet.config import ConfigErrors, load_config
from fastsuncet.config.reader import MAX_BYTES
from fastsuncet.config.shipped import SHIPPED
from tests.support.configs import GOOD, load, refusal

NUMBERS = ["1e-4", "1E-4", "+1e-4", ".5", "2.", "1_000", "3", "1.5e3", "4.8", "010"]


@pytest.mark.parametrize("written", NUMBERS)
def test_reader_numbers(written):
    assert load(GOOD.replace("lr: 1.0", f"lr: {written}")).optimization.lr == float(written)
    assert load(GOOD, f"optimization.lr={written}").optimization.lr == float(written)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("digits", ["{}", "{}x", "{}.x", "+{}e", "1e{}x", "{}_x"])
def test_reader_takes_linear_time_for_digits(digits):
    """A pattern that tries every way to split these digits takes minutes."""
    refusal(GOOD + f"meta: {{seed: {digits.format('9' * 200_000)}}}\n")


def test_reader_switches_empty_sections_and_what_stays_text():
    for written, value in (("yes", True), ("Off", False)):
        assert load(GOOD, f"meta.compile={written}").meta.compile is value
    assert load(GOOD, "logging.write_tag=2026-11-21").logging.write_tag == "2026-11-21"
    assert load(GOOD, "logging.folder=1:30").logging.folder == "1:30"
    assert load(GOOD + "meta:\nlogging: null\n") == load(GOOD)


@pytest.mark.timeout(60)
def test_reader_refuses_what_is_not_a_config_unread():
    Path("run.yaml").write_text(GOOD + "# " + "x" * MAX_BYTES)
    with pytest.raises(ConfigErrors, match=r"run\.yaml is larger than 1 MB: this is not a config"):
        load_config("run.yaml")
    with pytest.raises(ConfigErrors, match="larger than 1 MB"):
        load_config("/dev/zero")  # never ends: only the first megabyte is read
    assert "too deeply nested" in refusal(f"a: {'[' * 999}{']' * 999}\n")


def test_reader_bytes_that_are_not_text():
    assert refusal(GOOD + "meta: {seed: \0}\n") == (
        "  run.yaml:10\n      not valid YAML: the character U+0000 is not allowed in it"
    )
    Path("run.yaml").write_bytes(GOOD.encode() + b"logging: {folder: caf\xe9}\n")
    with pytest.raises(ConfigErrors, match=r"run\.yaml:10\n +not UTF-8 text: save the file as UTF-8"):
        load_config("run.yaml")
    Path("run.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())  # with a byte order mark
    assert load_config("run.yaml").data.root == "/images"


@pytest.mark.parametrize("tag", ["object/apply", "object/new", "name"])
def test_reader_executes_nothing(tag):
    refusal(GOOD + f"meta: {{seed: !!python/{tag}:os.mkdir ['executed']}}\n")
    refusal(GOOD, f"meta.seed=!!python/{tag}:os.mkdir ['executed']")
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("runn.yaml", r"runn\.yaml\n +no such file; did you mean run\.yaml\?"),
        ("./zzz", r"\./zzz\n +no such file$"),
        (".", r"\. is a folder, not a config; `fastsuncet init \.` writes a config for a folder"),
        ("in1k_10pc", r"no such file; did you mean in1k_10pct, a config of the package\?"),
        ("configs/in1k_10pct.yaml", "did you mean in1k_10pct, a config of the package"),
    ],
)
def test_reader_missing_file(path, message):
    load()
    with pytest.raises(ConfigErrors, match=message):
        load_config(path)


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)


def test_reader_base_is_merged_key_by_key():
    """A base can have a base; the last file has the last word."""
    write("configs/base.yaml", GOOD + "model: {hidden: 512, output: 64}\nmeta: {seed: 1}\n")
    write("middle.yaml", "base: configs/base.yaml\nmodel: {output: 32}\ndata:\n  augmentation: {size: 96}\n")
    write("run.yaml", "base: middle.yaml\nmeta: {seed: 2}\n")
    config = load_config("run.yaml")
    assert (config.model.hidden, config.model.output, config.meta.seed) == (512, 32, 2)
    assert (config.data.root, config.data.augmentation.size) == ("/images", 96)
    assert config.where("model.output").startswith("middle.yaml:2") and config.logging.write_tag == "run"


def test_reader_paths_are_relative_to_the_file_that_has_them(tmp_path, monkeypatch):
    """Those of overrides, of the package's configs and logging.folder are relative to the working directory."""
    write("lists/base.yaml", GOOD.replace("/images", "../photos") + "model: {init: w/a.pth}\n")
    write(
        "mine/run.yaml", "base: ../lists/base.yaml\ndata: {csv: a.csv, kind: csv}\nlogging: {folder: all}\n"
    )
    config = load_config("mine/run.yaml", ["data.index=i.npz", "transfer={root: ~/c}"])
    assert [config.data.root, config.data.csv, config.data.index, config.model.init] == [
        f"{tmp_path}/{path}" for path in ("photos", "mine/a.csv", "i.npz", "lists/w/a.pth")
    ]
    assert (config.transfer.root, config.logging.folder) == ("~/c", "all")
    write("run/config.yaml", config.to_yaml())
    monkeypatch.chdir("mine")
    assert load_config("../run/config.yaml") == config
    assert load_config("cifar10_simclr").data.root == f"{tmp_path}/mine/data/cifar10"
    Path(unreadable := os.fsdecode(b"caf\xe9")).mkdir()
    monkeypatch.chdir(unreadable)
    with pytest.raises(
        ConfigErrors, match=r"data\.root: data/cifar10\n .*/cifar10\s+is\s+not\s+UTF-8"
    ) as caught:
        load_config("cifar10_simclr")
    assert len(caught.value.problems) == 1


def test_reader_problems_in_a_base_name_its_file():
    write("configs/base.yaml", GOOD.replace("lr: 1.0", "lr: -1"))
    write("configs/run.yaml", "base: base.yaml\n\nmeta: {sed: 3}\ncriterion: {unsupervised_batch_size: 1}\n")
    with pytest.raises(ConfigErrors) as caught:
        load_config("configs/run.yaml")
    assert [(str(p.origin), p.key) for p in caught.value.problems] == [
        ("configs/base.yaml:9", "optimization.lr"),
        ("configs/run.yaml:3", "meta.sed"),
        ("configs/run.yaml:4", "criterion.unsupervised_batch_size"),
    ]


@pytest.mark.parametrize(
    ("written", "override", "length"),
    [
        ("steps: 9", "epochs=20", (20, None)),
        ("steps: 9", "epochs=null", (None, 9)),
        ("epochs: 100", "steps=9", (100, 9)),
        ("{epochs: 100, steps: 9, lr: 1.0}", "lr=2.0", (100, 9)),
    ],
)
def test_reader_epochs_replace_steps_that_were_written_before(written, override, length):
    run = load(f"{GOOD.split('  epochs')[0]}  {written}\n", "optimization.lr=1.0", f"optimization.{override}")
    assert (run.optimization.epochs, run.optimization.steps) == length


def test_reader_batch_sizes_replace_each_other():
    """A size over all processes replaces one per process, and the other way round."""
    write("base.yaml", GOOD.replace("size: 256", "size: {per_rank: 32}"))
    write("run.yaml", "base: base.yaml\ncriterion: {unsupervised_batch_size: 64}\n")
    assert load_config("run.yaml").criterion.unsupervised_batch_size == 64
    for override in ("unsupervised_batch_size={per_rank: 8}", "unsupervised_batch_size.per_rank=8"):
        assert load_config("run.yaml", [f"criterion.{override}"]).resolve(2, 100).global_unlabeled == 16


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("bse.yaml", r"run\.yaml:1: base: bse\.yaml\n      no such file; did you mean base\.yaml\?"),
        ("[a, b]", r"run\.yaml:1: base: \[a, b\]\n      must be the name of another config file"),
        ("", r"run\.yaml:1: base: null\n      must be the name of another config file"),
        ("run.yaml", r"run\.yaml:1: base: run\.yaml\n      leads in a circle: run\.yaml -> run\.yaml\. Remove"),
        ("back.yaml", r"back\.yaml:1: base: \./run\.yaml\n .*: run\.yaml -> back\.yaml -> run\.yaml\. Remove"),
        (".", r"run\.yaml:1: base: \.\n      \. is a folder, not a config; `fastsuncet init"),
    ],
)  # fmt: skip
def test_reader_wrong_base(base, message):
    write("base.yaml", GOOD)
    write("back.yaml", "base: ./run.yaml\n")
    write("run.yaml", f"base: {base}\n")
    with pytest.raises(ConfigErrors, match=message):
        load_config("run.yaml")


def test_reader_overrides():
    """Overrides are YAML, and the last one of a key counts."""
    words = (
        "optimization.lr=2.0 optimization.lr=4.8 data.validation= logging.wandb=null logging.folder=a=b meta="
    )
    lists = ("data.augmentation.crop_scale=[0.2, 1.0]", "model={output: 64}")
    config = load(GOOD.replace("lr: 1.0", "lr: fast"), *words.split(), *lists)
    assert (config.optimization.lr, config.data.augmentation.crop_scale) == (4.8, (0.2, 1.0))
    assert (config.data.validation, config.logging.wandb, config.logging.folder) == (None, None, "a=b")
    assert (config.model.output, config.model.hidden) == (64, 2048)


def test_reader_shipped_config_is_found_by_its_name():
    """A file of the same name wins; a folder does not."""
    assert load_config("in1k_10pct") == load_config(SHIPPED / "in1k_10pct.yaml")
    Path("in1k_10pct").mkdir()
    write("run.yaml", "base: in1k_simclr\nmodel: {output: 32}\n")
    assert load_config("in1k_10pct").logging.write_tag == "in1k_10pct"
    assert load_config("run.yaml") == load_config("in1k_simclr", ["model.output=32", "logging.write_tag=run"])
    write("in1k_simclr", GOOD)
    assert load_config("run.yaml").data.root == "/images"
