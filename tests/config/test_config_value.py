"""A config is a value: it does not change, it survives being written down, and its numbers add up."""

import json
import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from fastsuncet.config import FREE_ON_RESUME, Config, ConfigErrors, load_config
from fastsuncet.config.keys import KEYS, VALUES, field_of

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


# ------------------------------------------------------------------------------------------------ the config as a value
def test_a_config_cannot_be_changed_and_counts_by_its_values():
    config = load()
    with pytest.raises(ValidationError, match="frozen"):
        config.optimization.lr = 3.0
    with pytest.raises(ValidationError, match="frozen"):
        config.optimization = None
    assert config == load("\n\n" + GOOD) != load(GOOD, "meta.seed=1")
    assert hash(config) == hash(load("\n\n" + GOOD))
    assert config != "a config"


def test_a_config_survives_its_own_yaml_and_json():
    config = load(
        GOOD + "model: {hidden: 7}\n", "criterion.unsupervised_batch_size={per_rank: 8}", "logging.folder=ä"
    )
    Path("again.yaml").write_text(config.to_yaml())
    assert load_config("again.yaml") == config
    assert Config.from_values(json.loads(json.dumps(config.canonical()))) == config
    assert "crop_scale: [0.08, 1.0]" in config.to_yaml()


def test_a_config_built_without_a_file_obeys_the_same_rules():
    values = load().canonical()
    values["optimization"]["start_lr"] = 9.0
    with pytest.raises(ConfigErrors, match="must not be above lr"):
        Config.from_values(values)


def test_a_config_names_its_run_after_its_file_unless_it_has_a_name():
    Path("p01.yaml").write_text(GOOD)
    assert load_config("p01.yaml").run_folder == Path("runs/p01")
    assert load_config("p01.yaml", ["logging.write_tag=mine", "logging.folder=~/r"]).run_folder == (
        Path.home() / "r" / "mine"
    )
    Path("my run.yaml").write_text(GOOD)
    with pytest.raises(
        ConfigErrors, match=r"my run\.yaml: logging\.write_tag: my run \(from the name of the file\)"
    ):
        load_config("my run.yaml")


def test_another_part_can_blame_a_key_and_the_person_sees_its_line():
    error = load().error("optimization.lr", "is more than this data set can bear")
    assert str(error) == "1 problem in the config\n\n  run.yaml:9: optimization.lr: 1.0\n      " + (
        "is more than this data set can bear"
    )


# --------------------------------------------------------------------------------------------------------- resuming
def test_only_what_changes_the_weights_forbids_to_continue():
    saved = load().canonical()
    free = [
        "logging.log_every=7",
        "checkpoint.keep=9",
        "checkpoint.every=5",
        "evaluation.knn_k=3",
        "data.root=/b",
    ]
    free += [
        "data.prefetch=9",
        "data.decode_threads=8",
        "data.bad_images=4",
        "logging.folder=x",
        "data.index=i",
    ]
    assert load(GOOD, *free).changed_keys(saved) == []
    assert load(GOOD, "meta.threads=1", "optimization.epochs=200").changed_keys(saved) == [
        ("meta.threads", None, 1),
        ("optimization.epochs", 100, 200),
    ]


@pytest.mark.parametrize("key", VALUES)
def test_every_key_is_either_free_on_resume_or_guarded(key):
    config = load()
    saved = config.canonical()
    holder = saved
    *above, name = key.split(".")
    for part in above:
        holder = holder[part]
    holder[name] = "something else"
    free = any(key == entry or key.startswith(entry + ".") for entry in FREE_ON_RESUME)
    assert [changed[0] for changed in config.changed_keys(saved)] == ([] if free else [key])


def test_what_is_free_on_resume_exists():
    assert set(FREE_ON_RESUME) <= KEYS


def test_a_key_newer_than_the_checkpoint_counts_as_its_default():
    saved = load().canonical()
    del saved["optimization"]["nesterov"]
    saved["meta"]["gone"] = 3
    assert load().changed_keys(saved) == [("meta.gone", 3, None)]
    assert load(GOOD, "optimization.nesterov=true").changed_keys(saved) == [
        ("meta.gone", 3, None),
        ("optimization.nesterov", False, True),
    ]


def test_a_run_from_before_there_was_tf32_goes_on_in_float32_or_is_refused():
    def saved(*overrides: str) -> dict:
        old = load(GOOD, *overrides).canonical()
        del old["criterion"]["products"]
        return old

    assert load().changed_keys(saved()) == [("criterion.products", "fp32", "tf32")]
    assert load(GOOD, "criterion.products=fp32").changed_keys(saved()) == []
    single = "meta.precision=fp32"  # the losses behind it are in float32 either way
    assert load(GOOD, single).changed_keys(saved(single)) == []


def test_a_batch_per_rank_is_not_the_same_as_the_batch_it_comes_to():
    saved = load().canonical()
    assert load(GOOD, "criterion.unsupervised_batch_size={per_rank: 32}").changed_keys(saved) == [
        ("criterion.unsupervised_batch_size", 256, {"per_rank": 32})
    ]


# ------------------------------------------------------------------------------------------------------- arithmetic
IMAGENET, CIFAR10 = 1_281_167, 50_000
SUPERVISED = ("data.split.kind=all", "criterion.classes_per_batch=20")


@pytest.mark.parametrize(
    ("images", "batch", "steps"),
    [(IMAGENET, 4096, 312), (IMAGENET, 2816, 454), (CIFAR10, 256, 195), (CIFAR10, 128, 390)],
)
def test_an_epoch_has_the_papers_number_of_updates(images, batch, steps):
    assert (
        load(GOOD, f"criterion.unsupervised_batch_size={batch}").resolve(1, images).steps_per_epoch == steps
    )


@pytest.mark.parametrize("world_size", [1, 8, 64])
def test_a_global_batch_is_the_same_experiment_on_any_number_of_processes(world_size):
    config = load(
        GOOD,
        *SUPERVISED,
        "criterion.unsupervised_batch_size=2816",
        "criterion.supervised_imgs_per_class=128",
        "criterion.supervised_epochs=50",
    )
    sizes = config.resolve(world_size, IMAGENET, 1000)
    assert (sizes.global_unlabeled, sizes.global_labeled) == (2816, 2560)
    assert (sizes.local_unlabeled, sizes.local_labeled) == (2816 // world_size, 2560 // world_size)
    assert (sizes.steps_per_epoch, sizes.steps, sizes.supervised_steps) == (454, 45_400, 22_700)
    assert (sizes.samples(0), sizes.samples(22_699), sizes.samples(22_700)) == (8192, 8192, 5632)
    assert sizes.total_samples() == 22_700 * 8192 + 22_700 * 5632


def test_per_rank_sizes_multiply_by_the_number_of_processes():
    config = load(
        GOOD,
        *SUPERVISED,
        "criterion.unsupervised_batch_size={per_rank: 44}",
        "criterion.supervised_imgs_per_class={per_rank: 2}",
        "criterion.supervised_epochs=all",
    )
    sizes = config.resolve(64, IMAGENET)
    assert (sizes.global_unlabeled, sizes.local_unlabeled) == (2816, 44)
    assert (sizes.global_images_per_class, sizes.local_images_per_class) == (128, 2)
    assert sizes.supervised_steps == sizes.steps == 45_400


def test_a_switch_off_after_the_end_is_supervision_throughout():
    options = (*SUPERVISED, "criterion.supervised_imgs_per_class=4", "criterion.supervised_epochs=250")
    assert load(GOOD, *options).resolve(1, CIFAR10).supervised_steps == 100 * 195


def test_supervision_switched_off_from_the_start_is_simclr_whatever_the_labeled_batch_would_be():
    options = (*SUPERVISED, "criterion.supervised_imgs_per_class=3", "criterion.supervised_epochs=0")
    sizes = load(GOOD, *options).resolve(2, CIFAR10, 1)
    assert (sizes.supervised_steps, sizes.global_labeled, sizes.samples(0)) == (0, 0, 512)


def test_steps_decide_over_epochs_and_warmup_is_counted_in_epochs():
    sizes = load(GOOD, "optimization.steps=600", "optimization.warmup=2.5").resolve(1, CIFAR10)
    assert (sizes.steps, sizes.warmup_steps) == (600, 488)  # 2.5 x 195 = 487.5: halves to even
    assert sizes.epochs == pytest.approx(600 / 195)
    assert load(GOOD.replace("epochs: 100", "steps: 7")).resolve(1, CIFAR10).steps == 7


def located(config: Config, *where) -> str:
    with pytest.raises(ConfigErrors) as caught:
        config.resolve(*where)
    return str(caught.value).split("\n\n", 1)[1]


def test_sizes_that_do_not_fit_the_processes_name_those_that_would():
    config = load(
        GOOD,
        *SUPERVISED,
        "criterion.supervised_imgs_per_class=2",
        "criterion.supervised_epochs=1",
        "criterion.unsupervised_batch_size=2816",
    )
    assert (
        located(config, 3, IMAGENET, 10)
        == """\
  command line: criterion.unsupervised_batch_size=2816
      counts images over all processes, and 2,816 cannot be shared by 3. Either make it 2,814 or 2,817, or
      use 2 or 4 processes
  command line: criterion.supervised_imgs_per_class=2
      counts images over all processes, and 2 cannot be shared by 3. Either make it 3, or use 2 processes
  command line: criterion.classes_per_batch=20
      must be at most 10: that many classes have a labeled image"""
    )


def test_a_batch_larger_than_the_data_set_is_refused():
    assert located(load(), 1, 255) == (
        "  run.yaml:6: criterion.unsupervised_batch_size: 256\n"
        "      a batch of 256 images over all processes is larger than the data set of 255"
    )
    assert load().resolve(1, 256).steps_per_epoch == 1


def test_a_warmup_longer_than_a_run_given_in_steps_is_refused():
    config = load(GOOD + "  steps: 195\n  warmup: 1\n")
    assert located(config, 1, CIFAR10) == (
        "  run.yaml:11: optimization.warmup: 1\n"
        "      must be shorter than the run: 1 epochs are 195 steps of 195"
    )


def test_one_image_per_rank_needs_a_second_rank():
    config = load(
        GOOD,
        *SUPERVISED,
        "criterion.unsupervised_batch_size={per_rank: 1}",
        "criterion.supervised_imgs_per_class={per_rank: 1}",
        "criterion.supervised_epochs=1",
    )
    assert config.resolve(2, 100).global_images_per_class == 2
    assert "is 1 image over all processes, which has no negative" in located(config, 1, 100)
    assert "is 1 image of a class over all processes, which has no positive" in located(config, 1, 100)


def test_a_world_without_processes_is_a_programmers_mistake():
    with pytest.raises(ValueError, match="at least one process"):
        load().resolve(0, 100)


@given(
    world_size=st.integers(1, 64),
    local=st.integers(2, 64),
    images=st.integers(1, 10**7),
    classes=st.integers(2, 100),
    per_class=st.integers(2, 8),
    epochs=st.integers(1, 1000),
    switch_off=st.one_of(st.just("all"), st.integers(0, 1000)),
    warmup=st.floats(0, 20),
)
def test_whatever_the_sizes_they_add_up(
    world_size, local, images, classes, per_class, epochs, switch_off, warmup
):
    assume(images >= world_size * local)
    assume(warmup < epochs)
    values = {
        "data": {"kind": "image_folder", "root": "/", "split": {"kind": "all"}},
        "criterion": {
            "temperature": 1.0,
            "unsupervised_batch_size": world_size * local,
            "classes_per_batch": classes,
            "supervised_imgs_per_class": world_size * per_class,
            "supervised_epochs": switch_off,
        },
        "optimization": {"lr": 1.0, "epochs": epochs, "warmup": warmup},
    }
    config = Config.from_values(values)
    steps = epochs * (images // (world_size * local))
    if round(warmup * (images // (world_size * local))) >= steps:  # rounded to steps, it is the whole run
        assert "must be shorter than the run" in located(config, world_size, images)
        return
    sizes = config.resolve(world_size, images)
    # An epoch shows every image at most once, and leaves out less than a batch.
    shown = sizes.steps_per_epoch * sizes.global_unlabeled
    assert images - sizes.global_unlabeled < shown <= images
    assert sizes.steps == steps == epochs * sizes.steps_per_epoch
    assert 0 <= sizes.warmup_steps < sizes.steps
    assert 0 <= sizes.supervised_steps <= sizes.steps
    assert sizes.local_unlabeled * world_size == sizes.global_unlabeled
    assert sizes.local_labeled * world_size == sizes.global_labeled
    # The total is the sum of the steps: summed in closed form around the switch-off.
    on, off = sizes.supervised_steps, sizes.steps - sizes.supervised_steps
    assert sizes.total_samples() == (on and on * sizes.samples(0)) + (
        off and off * sizes.samples(sizes.steps - 1)
    )
    middle = sizes.steps // 2
    assert sizes.total_samples(middle + 1) - sizes.total_samples(middle) == sizes.samples(middle)
    # The same sizes, given for each process.
    values["criterion"]["unsupervised_batch_size"] = {"per_rank": local}
    values["criterion"]["supervised_imgs_per_class"] = {"per_rank": per_class}
    assert Config.from_values(values).resolve(world_size, images) == sizes


@given(size=st.integers(2, 10**6), world_size=st.integers(2, 1000))
def test_every_number_that_is_offered_instead_fits(size, world_size):
    assume(size % world_size)
    values = load_values(size)
    with pytest.raises(ConfigErrors) as caught:
        Config.from_values(values).resolve(world_size, 10**7)
    (text,) = [p.text for p in caught.value.problems if "cannot be shared" in p.text]
    sizes, counts = text.split("Either make it ")[1].split(", or use ")
    for number in re.findall(r"[\d,]+", sizes):
        offered = int(number.replace(",", ""))
        assert offered % world_size == 0
        assert abs(offered - size) < world_size
    for number in re.findall(r"\d+", counts):
        assert size % int(number) == 0


def load_values(size: int) -> dict:
    values = yaml.safe_load(GOOD)
    values["criterion"]["unsupervised_batch_size"] = size
    return values


def test_the_defaults_are_the_papers_where_it_has_one():
    config = load()
    assert math.prod(config.data.augmentation.crop_ratio) == pytest.approx(1)  # 3/4 and 4/3
    a = config.data.augmentation
    assert (a.size, a.crop_scale, a.flip, a.jitter, a.strength) == (224, (0.08, 1.0), 0.5, 0.8, 1.0)
    assert (a.grey, a.blur, a.blur_sigma, a.mean, a.std) == (0.2, 0.5, (0.1, 2.0), (0.0,) * 3, (1.0,) * 3)
    m = config.model
    assert (m.name, m.stem, m.hidden, m.output, m.head_batchnorm) == (
        "resnet50",
        "imagenet",
        2048,
        128,
        False,
    )
    o = config.optimization
    assert (o.momentum, o.weight_decay, o.trust_coefficient, o.final_lr) == (0.9, 1e-6, 0.001, 0.0)
    assert not (o.nesterov or o.lr_in_momentum or o.exclude_bias_and_norm or o.legacy_schedule)
    assert field_of("criterion.temperature").is_required()
