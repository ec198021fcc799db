"""The sizes of a run: the paper's numbers of updates, what fits and what does not, and pieces of any batch."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fastsuncet.config import ConfigErrors, load_config
from fastsuncet.config.arithmetic import piece_sizes
from tests.support.configs import GOOD, load

IMAGENET, CIFAR10 = 1_281_167, 50_000
SUPERVISED = ("data.split.kind=all", "criterion.classes_per_batch=20")
BATCH, EACH = "criterion.unsupervised_batch_size=", "criterion.supervised_imgs_per_class="
ON = "criterion.supervised_epochs="


def test_arithmetic_same_experiment_on_any_number_of_processes():
    config = load(GOOD, *SUPERVISED, f"{BATCH}2816", f"{EACH}128", f"{ON}50")
    for world_size in (1, 8, 64):
        sizes = config.resolve(world_size, IMAGENET, 1000)
        assert (sizes.global_unlabeled, sizes.global_labeled) == (2816, 2560)
        assert (sizes.local_unlabeled, sizes.local_labeled) == (2816 // world_size, 2560 // world_size)
        assert (sizes.steps_per_epoch, sizes.steps, sizes.supervised_steps) == (454, 45_400, 22_700)
        assert (sizes.update_views(True), sizes.update_views(False)) == (8192, 5632)
    per_rank = load(GOOD, *SUPERVISED, f"{BATCH}{{per_rank: 44}}", f"{EACH}{{per_rank: 2}}", f"{ON}50")
    every = per_rank.resolve(64, IMAGENET, 1000)
    assert every == sizes and (every.local_unlabeled, every.local_labeled) == (44, 40)


def test_arithmetic_classes_can_be_shared_in_place_of_images():
    """PAWS's 960 classes x 7 supports on 64 processes: 105 on each. Two views of each are two supports."""
    labels = (*SUPERVISED, "criterion.classes_per_batch=960", "criterion.supervised_imgs_per_class=7")
    config = load(GOOD, *labels, "criterion.supervised_epochs=all", "criterion.supervised_views=2")
    sizes = config.resolve(64, IMAGENET, 1000)
    assert (sizes.global_labeled, sizes.local_labeled) == (2 * 6720, 2 * 105)
    assert sizes.update_views(True) == 2 * 256 + 2 * 6720


def test_arithmetic_steps_and_warmup():
    """Steps take precedence over epochs; the warm-up is counted in epochs."""
    sizes = load(GOOD, "optimization.steps=600", "optimization.warmup=2.5").resolve(1, CIFAR10)
    assert (sizes.steps, sizes.warmup_steps) == (600, 488)  # 2.5 x 195 = 487.5: halves to even
    assert load(GOOD.replace("epochs: 100", "steps: 7")).resolve(1, CIFAR10).steps == 7


ALONE = ("criterion.instance=none", f"{BATCH}0", f"{ON}all")
STEPS = ("optimization.steps=195", "optimization.warmup=1")
LEGACY = ("optimization.legacy_schedule=true", "optimization.warmup=50")
SHARE = (f"{BATCH}1400", f"{EACH}40", "criterion.classes_per_batch=10", f"{ON}50")
PART = "criterion.labeled_share="


@pytest.mark.parametrize(
    ("overrides", "sizes", "text"),
    [
        ((f"{BATCH}2816", f"{EACH}2", f"{ON}1"), (3, IMAGENET, 10),
         f"command line: {BATCH}2816 counts images over all processes, and 2,816 cannot be shared by 3. Either make it "
         f"2,814 or 2,817, or use 2 or 4 processes command line: {EACH}2 counts images over all processes, and 2 of "
         "each of 20 classes cannot be shared by 3. Either make it 3, or use 2 or 4 processes command line: "
         "criterion.classes_per_batch=20 must be at most 10: that many classes have a labeled image"),
        ((f"{EACH}7", f"{ON}all", "criterion.classes_per_batch=960"), (256, IMAGENET, 1000),
         "7 of each of 960 classes cannot be shared by 256. Either make it 4 or 8, or use 240 or 280 processes"),
        ((f"{BATCH}2",), (4, IMAGENET), "2 cannot be shared by 4. Either make it 4, or use 2 processes"),
        (("data.split.kind=bernoulli", "data.split.fraction=1e-4", f"{EACH}2", f"{ON}1"), (1, IMAGENET, 0),
         "command line: data.split.fraction=1e-4 selects no labeled image"),
        ((f"{EACH}2", f"{ON}1"), (1, IMAGENET, 1), "only 1 class has a labeled image: label images of another one, or"),
        ((), (1, 255), "run.yaml:6: criterion.unsupervised_batch_size: 256 a batch of 256 images over all processes"),
        ((*ALONE, f"{EACH}40"), (1, IMAGENET, 20, 799), "a batch of 800 labeled images over all processes is larger"),
        ((f"{BATCH}{{per_rank: 1}}",), (1, 100), "is 1 image over all processes, which has no negative"),
        ((f"{EACH}{{per_rank: 1}}", f"{ON}1"), (1, 1000), "is 1 image of a class over all processes, which has no pos"),
        (STEPS, (1, CIFAR10), "must be shorter than the run: 1 epochs are 195 steps of 195"),
        (LEGACY, (1, IMAGENET), "must be shorter than half of the run with legacy_schedule: 50 epochs"),
        # 128 unlabeled images and 200 labeled ones on each of two processes: a piece has 2 views and 2 labeled images.
        ((f"{EACH}20", f"{ON}all", "criterion.micro_batch=7"), (2, 1000), "must be 8 or more with 2 processes"),
        ((*ALONE, f"{EACH}20", "criterion.micro_batch=1"), (1, 1000), "must be 2 or more with 1 process:"),
        ((*SHARE, f"{PART}0.01"), (1, 1442), "1,585 unlabeled ones of 1,442; at least 2 of bo"),
        ((*SHARE, f"{PART}0.001"), (1, 2000), "leaves 0 labeled images of each of 10 classes"),
        ((*SHARE, f"{PART}0.9999"), (1, 1442), " and 0 unlabeled ones of 1,442"),
        ((*SHARE, f"{PART}0.02"), (1, CIFAR10), "as many passes over the labels take 11,667 whole"),
        ((*SHARE, f"{PART}0.9", "criterion.supervised_epochs=1"), (1, 1442), " take 0 whole updates of 900; lower it"),
    ],
)  # fmt: skip
def test_arithmetic_refuses_what_does_not_fit(overrides, sizes, text):
    config = load(GOOD, *SUPERVISED, *overrides)
    with pytest.raises(ConfigErrors) as caught:
        config.resolve(*sizes)
    assert text in " ".join(str(caught.value).split("\n\n", 1)[1].split())


def test_arithmetic_takes_the_least_that_fits():
    assert load().resolve(1, 256).steps_per_epoch == 1
    # Alone, an image has no negative or positive; the second process has them.
    two = load(GOOD, *SUPERVISED, f"{BATCH}{{per_rank: 1}}", f"{EACH}{{per_rank: 1}}", f"{ON}1")
    assert two.resolve(2, 100).global_images_per_class == 2
    cut = load(GOOD, *SUPERVISED, f"{EACH}20", f"{ON}all", "criterion.micro_batch=8")
    assert len(cut.resolve(2, 1000).pieces(True)) == 128
    # With 0 epochs the labeled batch is never asked for.
    never = load(GOOD, *SUPERVISED, f"{EACH}3", f"{ON}0").resolve(2, CIFAR10, 1)
    assert (never.supervised_steps, never.global_labeled, never.update_views(True)) == (0, 0, 512)
    for more_than_the_run_has in ("all", 101):
        always = load(GOOD, *SUPERVISED, f"{EACH}20", f"{ON}{more_than_the_run_has}").resolve(2, 1000)
        assert always.supervised_steps == always.steps == 300


@given(
    unlabeled=st.integers(0, 300),
    labeled=st.integers(0, 300),
    views=st.sampled_from([0, 2, 3, 8]),
    most=st.integers(1, 900),
)
def test_arithmetic_pieces_are_equal_and_as_few_as_fit(unlabeled, labeled, views, most):
    least = 2 if views in (0, 3) else 1  # BatchNorm needs two rows, and the third view is alone of its size
    assume((views == 0) == (unlabeled == 0) and (unlabeled or labeled) >= least)
    sizes = piece_sizes(unlabeled, labeled, views, most)
    assert [sum(kind) for kind in zip(*sizes)] == [unlabeled, labeled]
    assert all(max(kind) - min(kind) <= 1 for kind in zip(*sizes))
    rows = [views * images + labels for images, labels in sizes]
    assert min(images or labels for images, labels in sizes) >= least and max(rows) == rows[0]
    if rows[0] <= most:
        fewer = len(sizes) - 1
        assert fewer == 0 or views * -(-unlabeled // fewer) + -(-labeled // fewer) > most
    else:  # a piece cannot be smaller
        assert len(sizes) == (unlabeled or labeled) // least
    assert piece_sizes(unlabeled, labeled, views, None) == [(unlabeled, labeled)]


# ------------------------------------------------------------------------ criterion.labeled_share (appendix D)
def test_labeled_share_of_the_config_itself_changes_nothing():
    same = load_config("in1k_10pct", ["criterion.labeled_share=0.3125"]).resolve(64, IMAGENET)
    assert same == load_config("in1k_10pct").resolve(64, IMAGENET) and same.steps_per_epoch == 454


@pytest.mark.slow
@given(share=st.floats(0.1, 0.9), world_size=st.sampled_from([1, 2, 8, 64]), epochs=st.integers(1, 60))
def test_any_labeled_share_keeps_an_updates_cost_and_each_labels_passes(share, world_size, epochs):
    keys = (f"criterion.labeled_share={share}", f"criterion.supervised_epochs={epochs}")
    sizes = load_config("in1k_10pct", keys).resolve(world_size, IMAGENET)
    views, granule = 8192, 20 * world_size
    assert abs(sizes.global_labeled - share * views) <= granule / 2
    assert views - 2 * world_size <= sizes.update_views(True) <= views
    assert sizes.steps == 500 * (IMAGENET // sizes.global_unlabeled)
    assert sizes.local_unlabeled * world_size == sizes.global_unlabeled
    passes = sizes.supervised_steps * sizes.global_labeled
    assert abs(passes - epochs * 454 * 2560) <= sizes.global_labeled / 2
