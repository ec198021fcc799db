"""The labeled share of an update (paper, appendix D), and runs that learn from labels alone (appendix H)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastsuncet.config import ConfigErrors, load_config
from tests.support.runs import CONFIGS

IMAGENET = 1_281_167


def imagenet(*overrides: str):
    return load_config(CONFIGS / "in1k_10pct.yaml", overrides)


def test_half_the_labeled_share_keeps_the_views_of_an_update_and_the_passes_through_the_labels():
    short = (
        "criterion.supervised_epochs=30"  # with 250 epochs of labels, half the share would outlast the run
    )
    whole = imagenet(short).resolve(64, IMAGENET)
    half = imagenet(short, "criterion.labeled_share=0.15625").resolve(64, IMAGENET)
    assert (whole.global_unlabeled, whole.global_labeled, whole.samples(0)) == (2816, 2560, 8192)
    assert (half.global_unlabeled, half.global_labeled, half.samples(0)) == (3456, 1280, 8192)
    assert (whole.steps_per_epoch, half.steps_per_epoch) == (
        454,
        370,
    )  # an epoch stays a pass of the unlabeled
    assert whole.supervised_steps == 30 * 454
    assert half.supervised_steps == 2 * 30 * 454
    assert half.steps == 500 * 370


def test_the_share_as_it_is_written_changes_nothing():
    assert imagenet("criterion.labeled_share=0.3125").resolve(64, IMAGENET) == imagenet().resolve(
        64, IMAGENET
    )


@given(share=st.floats(0.1, 0.9), world_size=st.sampled_from([1, 2, 8, 64]), epochs=st.integers(1, 60))
def test_any_share_costs_as_much_an_update_and_shows_every_label_as_often(share, world_size, epochs):
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
        (1, ["criterion.labeled_share=0.9999"], "0 unlabeled ones; of both 2"),
        (1, ["criterion.labeled_share=0.02"], "would need 1,816,000 updates for as many passes through the labeled"),
    ],
)  # fmt: skip
def test_a_share_that_cannot_be_is_refused_with_its_numbers(world_size, overrides, words):
    with pytest.raises(ConfigErrors, match=words.replace(" ", r"\s+")):
        imagenet(*overrides).resolve(world_size, IMAGENET)


def test_labels_alone_count_epochs_over_the_labeled_images():
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
    with pytest.raises(
        ConfigErrors, match="16,000 labeled images over all processes is larger than the 12,811"
    ):
        config.resolve(64, IMAGENET, 1000, 12_811)
