"""The shipped configs have the paper's values, and the commands in their headers are valid."""

import re
import shlex
from pathlib import Path

import pytest

from fastsuncet.config import Config, load_config

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
IN1K, CIFAR = ["in1k_simclr", "in1k_10pct", "in1k_1pct"], ["cifar10_simclr", "cifar10_suncet"]
IMAGENET, CIFAR10, DIGITS = 1_281_167, 50_000, 1_442


def shipped(name: str, *overrides: str) -> Config:
    return load_config(FOLDER / f"{name}.yaml", overrides)


def header(name: str) -> str:
    """Return the comment at the top of a config, without its marks."""
    lines = (FOLDER / f"{name}.yaml").read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in lines)
    return "\n".join(line.lstrip("#").strip() for line in lines)


def commands(name: str) -> list[list[str]]:
    """Return the words of each `fastsuncet train` line in a header, continued lines joined."""
    return [
        shlex.split(line) for line in re.findall(r"fastsuncet train .*", header(name).replace("\\\n", " "))
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_config_header(name):
    """A header names paper, hardware, time, accuracy and command, and every command is valid."""
    page = header(name)
    assert re.match(r"(ImageNet|CIFAR-10|The demo)", page)
    for entry in ("Paper ", "Hardware ", "Accuracy ", "Command ", "(Hours|Minutes) "):
        assert re.search(rf"\n{entry}", page), entry
    assert shipped(name).run_folder == Path("runs") / name
    assert commands(name)
    for _, _, config, *overrides in commands(name):
        assert load_config(config, overrides)
        assert config == name


@pytest.mark.parametrize("name", [*IN1K, *CIFAR])
def test_shipped_config_hyper_parameters_are_the_papers(name):
    config = shipped(name)
    c, o = config.criterion, config.optimization
    imagenet = name in IN1K
    assert (o.start_lr, o.lr, o.final_lr, o.warmup) == (
        (0.6, 4.8, 0.0, 10) if imagenet else (0.125, 1.0, 0.0, 10)
    )
    assert (c.temperature, o.epochs) == (0.1 if imagenet else 0.5, 500)
    assert (o.momentum, o.weight_decay, o.trust_coefficient) == (0.9, 1e-6, 0.001)
    assert not (o.nesterov or o.lr_in_momentum or o.exclude_bias_and_norm or o.legacy_schedule)
    a, m = config.data.augmentation, config.model
    assert (a.size, a.strength, a.blur) == ((224, 1.0, 0.5) if imagenet else (32, 0.5, 0.0))
    assert (a.crop_scale, a.crop_ratio, a.flip) == ((0.08, 1.0), (3 / 4, 4 / 3), 0.5)
    assert (a.jitter, a.gray, a.blur_sigma) == (0.8, 0.2, (0.1, 2.0))
    assert (a.brightness, a.contrast, a.saturation, a.hue) == (0.8, 0.8, 0.8, 0.2)
    assert (a.mean, a.std) == ((0.0,) * 3, (1.0,) * 3)
    assert (m.name, m.stem) == ("resnet50", "imagenet" if imagenet else "cifar")
    assert (m.hidden, m.output, m.head_batchnorm, m.sync_batchnorm) == (2048, 128, False, True)
    assert config.meta.seed == 0


@pytest.mark.parametrize(
    ("name", "images", "world_size", "unlabeled", "labeled", "views", "steps", "off"),
    [  # for each process, as in the paper (recipe 4.3)
        ("in1k_simclr", IMAGENET, 64, 64, 0, 128, 312, 0),
        ("in1k_10pct", IMAGENET, 64, 44, 40, 128, 454, 250),
        ("in1k_1pct", IMAGENET, 64, 44, 40, 128, 454, 30),
        ("cifar10_simclr", CIFAR10, 1, 256, 0, 512, 195, 0),
        ("cifar10_suncet", CIFAR10, 1, 128, 280, 536, 390, 100),
    ],
)
def test_shipped_config_batches_are_the_papers(
    name, images, world_size, unlabeled, labeled, views, steps, off
):
    sizes = shipped(name).resolve(world_size, images)
    assert (sizes.local_unlabeled, sizes.global_labeled // sizes.world_size) == (unlabeled, labeled)
    assert sizes.update_views(True) == views * world_size
    assert (sizes.steps_per_epoch, sizes.supervised_steps) == (steps, off * steps)
    assert (sizes.warmup_steps, sizes.steps) == (10 * steps, 500 * steps)
    if images == IMAGENET and labeled:
        assert (sizes.classes_per_batch, sizes.global_images_per_class) == (20, 2 * 64)


def test_shipped_config_demo_gives_both_methods_the_same_compute():
    suncet = shipped("digits_demo").resolve(1, DIGITS, 10)
    simclr = shipped("digits_simclr").resolve(1, DIGITS, 10)
    assert suncet.update_views(True) == simclr.update_views(True) == 256
    assert suncet.steps == simclr.steps == 600
    assert (suncet.supervised_steps, simclr.supervised_steps) == (600, 0)
    # It runs on two processes too.
    assert shipped("digits_demo").resolve(2, DIGITS).local_labeled == 30


@pytest.mark.parametrize("names", [("in1k_simclr", "in1k_10pct"), ("cifar10_simclr", "cifar10_suncet")])
def test_shipped_config_baseline_differs_only_in_labels_and_batch(names):
    baseline, suncet = map(shipped, names)
    changed = {key for key, _, _ in baseline.changed_keys(suncet.canonical())} - {"criterion.temperature"}
    assert {key.rpartition(".")[0] for key in changed} == {"criterion", "data.split"}
    assert baseline.criterion.temperature == suncet.criterion.temperature
