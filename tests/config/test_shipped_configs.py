"""The shipped configs hold the paper's values, and open as pages of the lab book whose commands are true."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from fastsuncet.config import Config, load_config
from fastsuncet.config.schema import SECTIONS

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
IMAGENET, CIFAR10, DIGITS = 1_281_167, 50_000, 1_442


def shipped(name: str, *overrides: str) -> Config:
    return load_config(FOLDER / f"{name}.yaml", overrides)


def header(name: str) -> str:
    """The comment a config opens with, without its marks."""
    lines = (FOLDER / f"{name}.yaml").read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in lines)
    return "\n".join(line.lstrip("#").strip() for line in lines)


def commands(name: str) -> list[list[str]]:
    """The words of each `fastsuncet ...` line in a header, continued lines joined."""
    text = header(name).replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"fastsuncet train .*", text)]


def test_every_experiment_of_the_issue_has_its_config():
    assert {
        "in1k_simclr",
        "in1k_10pct",
        "in1k_1pct",
        "cifar10_simclr",
        "cifar10_suncet",
        "digits_demo",
    } <= set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_opens_as_a_page_of_the_lab_book(name):
    page = header(name)
    assert re.match(r"(ImageNet|CIFAR-10|The demo)", page)
    for entry in ("Paper ", "Hardware ", "Accuracy ", "Command "):
        assert f"\n{entry}" in page
    assert re.search(r"\n(Hours|Minutes) ", page)
    assert shipped(name).run_folder == Path("runs") / name


@pytest.mark.parametrize("name", CONFIGS)
def test_the_commands_on_its_page_are_sound(name):
    assert commands(name)
    for _, _, config, *overrides in commands(name):
        assert load_config(FOLDER.parent / config, overrides)
        assert Path(config).stem == name


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("cifar10_suncet",)])
def test_an_inherited_config_repeats_nothing_of_its_base(name):
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    base = values.pop("base", None)
    if base is None:
        return
    below = yaml.safe_load((FOLDER / base).read_text())

    def repeated(over, under, above=""):
        for key, value in over.items():
            if isinstance(value, dict) and isinstance(under.get(key), dict):
                yield from repeated(value, under[key], f"{above}{key}.")
            elif key in under and under[key] == value:
                yield above + key

    assert list(repeated(values, below)) == []


def hyper(config: Config) -> dict:
    c, o = config.criterion, config.optimization
    return {
        "lr": (o.start_lr, o.lr, o.final_lr, o.warmup),
        "tau": c.temperature,
        "momentum": o.momentum,
        "wd": o.weight_decay,
        "trust": o.trust_coefficient,
        "profile": (o.nesterov, o.lr_in_momentum, o.exclude_bias_and_norm, o.legacy_schedule),
        "epochs": o.epochs,
    }


PROFILE = {"momentum": 0.9, "wd": 1e-6, "trust": 0.001, "profile": (False,) * 4, "epochs": 500}


@pytest.mark.parametrize("name", ["in1k_simclr", "in1k_10pct", "in1k_1pct"])
def test_imagenet_has_the_papers_hyper_parameters(name):
    assert hyper(shipped(name)) == {**PROFILE, "lr": (0.6, 4.8, 0.0, 10), "tau": 0.1}


@pytest.mark.parametrize("name", ["cifar10_simclr", "cifar10_suncet"])
def test_cifar10_has_the_papers_hyper_parameters(name):
    assert hyper(shipped(name)) == {**PROFILE, "lr": (0.125, 1.0, 0.0, 10), "tau": 0.5}


@pytest.mark.parametrize(
    ("name", "images", "world_size", "unlabeled", "labeled", "views", "steps", "off"),
    [  # per process, as the paper prints them                                 (recipe 4.3)
        ("in1k_simclr", IMAGENET, 64, 64, 0, 128, 312, 0),
        ("in1k_10pct", IMAGENET, 64, 44, 40, 128, 454, 250),
        ("in1k_1pct", IMAGENET, 64, 44, 40, 128, 454, 30),
        ("cifar10_simclr", CIFAR10, 1, 256, 0, 512, 195, 0),
        ("cifar10_suncet", CIFAR10, 1, 128, 280, 536, 390, 100),
    ],
)
def test_a_process_has_the_papers_batch(name, images, world_size, unlabeled, labeled, views, steps, off):
    sizes = shipped(name).resolve(world_size, images)
    assert (sizes.local_unlabeled, sizes.local_labeled) == (unlabeled, labeled)
    assert sizes.samples(0) == views * world_size
    assert (sizes.steps_per_epoch, sizes.supervised_steps) == (steps, off * steps)
    assert (sizes.warmup_steps, sizes.steps) == (10 * steps, 500 * steps)


def test_imagenet_batches_are_twenty_classes_of_128():
    for name in ("in1k_10pct", "in1k_1pct"):
        sizes = shipped(name).resolve(64, IMAGENET, 1000)
        assert (sizes.classes_per_batch, sizes.global_images_per_class, sizes.local_images_per_class) == (
            20,
            128,
            2,
        )
        assert (sizes.global_unlabeled, sizes.global_labeled) == (2816, 2560)
        assert shipped(name).resolve(8, IMAGENET).local_images_per_class == 16


@pytest.mark.parametrize("epochs", [100, 200, 300, 500, 1000])
def test_imagenet_switches_supervision_off_at_the_same_epoch_for_every_length_of_run(epochs):
    sizes = shipped("in1k_10pct", f"optimization.epochs={epochs}").resolve(64, IMAGENET)
    assert sizes.supervised_steps == min(250, epochs) * 454


def test_imagenet_views_are_the_papers():
    for name in ("in1k_simclr", "in1k_10pct", "in1k_1pct"):
        a = shipped(name).data.augmentation
        assert (a.size, a.crop_scale, a.crop_ratio, a.flip) == (224, (0.08, 1.0), (3 / 4, 4 / 3), 0.5)
        assert (a.jitter, a.strength, a.grey, a.blur, a.blur_sigma) == (0.8, 1.0, 0.2, 0.5, (0.1, 2.0))
        assert (a.mean, a.std, a.color) == ((0.0,) * 3, (1.0,) * 3, "exact")


def test_cifar10_views_are_the_papers():
    for name in ("cifar10_simclr", "cifar10_suncet"):
        a = shipped(name).data.augmentation
        assert (a.size, a.crop_scale, a.crop_ratio, a.flip) == (32, (0.08, 1.0), (3 / 4, 4 / 3), 0.5)
        assert (a.jitter, a.strength, a.grey, a.blur) == (0.8, 0.5, 0.2, 0.0)
        assert (a.mean, a.std, a.color) == ((0.0,) * 3, (1.0,) * 3, "exact")


@pytest.mark.parametrize(
    "name", [name for name in CONFIGS if not name.startswith(("digits", "cifar10_small"))]
)
def test_the_network_is_the_papers(name):
    m = shipped(name).model
    stem = "imagenet" if name.startswith("in1k") else "cifar"
    assert (m.name, m.stem, m.hidden, m.output, m.head_batchnorm, m.sync_batchnorm) == (
        ("resnet50", stem, 2048, 128, False, True)
    )
    assert shipped(name).meta.seed == 0


def test_the_labels_are_the_papers():
    assert shipped("in1k_simclr").data.split.kind == shipped("cifar10_simclr").data.split.kind == "none"
    for name, file in (("in1k_10pct", "10percent.txt"), ("in1k_1pct", "1percent.txt")):
        split = shipped(name).data.split
        assert (split.kind, Path(split.file).name, split.fraction) == ("names", file, None)
    split = shipped("cifar10_suncet").data.split
    assert (split.kind, split.fraction, split.seed) == ("bernoulli", 0.1, 0)


@pytest.mark.parametrize("p", [0.01, 0.05, 0.1, 0.2, 0.5, 1.0])
def test_the_share_of_cifar10_labels_is_an_override(p):
    assert shipped("cifar10_suncet", f"data.split.fraction={p}").data.split.fraction == p


def test_with_all_labels_of_cifar10_supervision_stays_on():
    (all_labels,) = [words for words in commands("cifar10_suncet") if "data.split.fraction=1.0" in words]
    sizes = shipped("cifar10_suncet", *all_labels[3:]).resolve(1, CIFAR10)
    assert sizes.supervised_steps == sizes.steps == 500 * 390


def test_the_demo_gives_both_methods_the_same_compute():
    suncet = shipped("digits_demo").resolve(1, DIGITS, 10)
    simclr = shipped("digits_simclr").resolve(1, DIGITS, 10)
    assert suncet.samples(0) == simclr.samples(0) == 256
    assert suncet.steps == simclr.steps == 600
    assert suncet.total_samples() == simclr.total_samples()
    assert (suncet.supervised_steps, simclr.supervised_steps) == (600, 0)
    assert shipped("digits_demo").resolve(2, DIGITS).local_labeled == 30  # it runs on two processes too


def test_the_baselines_differ_from_their_partners_only_in_labels_and_batch():
    changed = {
        key
        for first, second in (("in1k_simclr", "in1k_10pct"), ("cifar10_simclr", "cifar10_suncet"))
        for key, _, _ in shipped(first).changed_keys(shipped(second).canonical())
    }
    assert {key.rpartition(".")[0] for key in changed} == {"criterion", "data.split"}
    assert "criterion.temperature" not in changed
    assert set(SECTIONS) >= {"criterion", "data.split"}
