"""The arithmetic of criterion.labeled_share (paper, appendix D) and of runs on labels alone (appendix H)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastsuncet.config import ConfigErrors, load_config
from tests.support.runs import CONFIGS

IMAGENET = 1_281_167


def imagenet(*overrides: str):
    return load_config(CONFIGS / "in1k_10pct.yaml", overrides)


def test_half_the_labeled_share_keeps_views_and_passes_through_the_labels():
    # With 250 epochs of labels, half the share would outlast the run.
    short = "criterion.supervised_epochs=30"
    whole = imagenet(short).resolve(64, IMAGENET)
    half = imagenet(short, "criterion.labeled_share=0.15625").resolve(64, IMAGENET)
    assert (whole.global_unlabeled, whole.global_labeled, whole.samples(0)) == (2816, 2560, 8192)
    assert (half.global_unlabeled, half.global_labeled, half.samples(0)) == (3456, 1280, 8192)
    # An epoch stays a pass of the unlabeled images.
    assert (whole.steps_per_epoch, half.steps_per_epoch) == (454, 370)
    assert whole.supervised_steps == 30 * 454
    assert half.supervised_steps == 2 * 30 * 454
    assert half.steps == 500 * 370


def test_labeled_share_of_the_config_itself_changes_nothing():
    same = imagenet("criterion.labeled_share=0.3125")
    assert same.resolve(64, IMAGENET) == imagenet().resolve(64, IMAGENET)


@pytest.mark.slow
@given(share=st.floats(0.1, 0.9), world_size=st.sampled_from([1, 2, 8, 64]), epochs=st.integers(1, 60))
def test_any_labeled_share_keeps_an_updates_cost_and_each_labels_passes(share, world_size, epochs):
    config = imagenet(f"criterion.labeled_share={share}", f"criterion.supervised_epochs={epochs}")
    sizes = config.resolve(world_size, IMAGENET)
    views, granule = 8192, 20 * world_size
    assert abs(sizes.global_labeled - share * views) <= granule / 2
    assert views - 2 * world_size <= sizes.samples(0) <= views
    assert sizes.local_unlabeled * world_size == sizes.global_unlabeled
    passes = sizes.supervised_steps * sizes.global_labeled
    assert abs(passes - epochs * 454 * 2560) <= sizes.global_labeled / 2


@pytest.mark.parametrize(
    ("world_size", "overrides", "words"),
    [
        (64, ["criterion.labeled_share=0.001"], "leaves 0 labeled images of each of 20 classes"),
        (1, ["criterion.labeled_share=0.9999"], "0 unlabeled ones; at least 2 of both"),
        (1, ["criterion.labeled_share=0.02"], "would need 1,816,000 updates for as many passes through the labeled"),
    ],
)  # fmt: skip
def test_labeled_share_that_cannot_be_is_refused_with_its_numbers(world_size, overrides, words):
    with pytest.raises(ConfigErrors, match=words.replace(" ", r"\s+")):
        imagenet(*overrides).resolve(world_size, IMAGENET)


def test_labels_alone_count_epochs_over_labeled_images():
    config = imagenet(
        "criterion.instance=none",
        "criterion.unsupervised_batch_size=0",
        "criterion.supervised_epochs=all",
        "criterion.classes_per_batch=125",
        "data.split.kind=all",
        "data.split.file=null",
        "optimization.epochs=100",
    )
    sizes = config.resolve(64, IMAGENET, 1000, IMAGENET)
    assert (sizes.views, sizes.global_unlabeled, sizes.samples(0)) == (0, 0, 16_000)
    assert (sizes.steps_per_epoch, sizes.steps) == (80, 8000) == (IMAGENET // 16_000, sizes.supervised_steps)
    too_many = "16,000 labeled images over all processes is larger than the 12,811"
    with pytest.raises(ConfigErrors, match=too_many):
        config.resolve(64, IMAGENET, 1000, 12_811)
