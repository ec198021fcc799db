"""Which images are labeled: the authors' draw, lists checked to the byte, and CSVs that must agree."""

import hashlib
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from pipelines.data_errors import DataError
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.label_splits import IMAGENET_LISTS, bernoulli, labeled_split, stratified
from tests.support.vectors import FOLDER, load_vectors


def index_of(files: list[str], classes: tuple[str, ...] | None = None) -> ImageIndex:
    """An image folder's index without the folder."""
    found = tuple(sorted({name.split("/")[0] for name in files}))
    classes = found if classes is None else classes
    number = {name: label for label, name in enumerate(classes)}
    labels = np.array([number.get(name.split("/")[0], -1) for name in files])
    return ImageIndex(Path("images"), files, labels, classes, np.ones((len(files), 2), np.int32))


@pytest.fixture
def index() -> ImageIndex:
    files = [f"{wnid}/{wnid}_{i}.JPEG" for wnid in ("n01", "n02", "n03") for i in range(4)]
    return index_of(files, ("n01", "n02", "n03", "n04"))


@pytest.fixture
def names(tmp_path):
    def write(*lines: str, end: str = "\n") -> Path:
        (tmp_path / "names.txt").write_bytes(os.fsencode("".join(line + end for line in lines)))
        return tmp_path / "names.txt"

    return write


@given(
    count=st.integers(1, 300),
    fraction=st.sampled_from([0.0, 0.01, 0.1, 1 / 3, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_bernoulli_is_the_authors_draw_image_by_image(count, fraction, seed):
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    unlabeled = torch.distributions.Bernoulli(torch.tensor(1 - fraction))
    drawn = [i for i in range(count) if unlabeled.sample() == 0]
    torch.set_rng_state(state)
    assert bernoulli(count, fraction, seed).tolist() == drawn
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.1, 0.2, 0.5, 1.0])
def test_bernoulli_on_cifar10_has_the_recipes_images(fraction):
    images = load_vectors("vectors_cifar10_bernoulli_splits")[f"p{fraction}"]
    assert np.array_equal(bernoulli(50_000, fraction, seed=0), images)


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_stratified_takes_each_class_in_proportion(sizes, share, seed):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(-1, len(sizes) - 1), sizes))
    classes = np.bincount(labels[labels >= 0], minlength=1)
    assume(classes.any())
    count = max(1, round(share * classes.sum()))
    chosen = stratified(labels, count, seed)
    assert len(chosen) == count and (np.diff(chosen) > 0).all() and (labels[chosen] >= 0).all()
    taken, exact = np.bincount(labels[chosen], minlength=len(classes)), count * classes / classes.sum()
    # Webster's method: no image moved from one class to another brings both shares closer to the exact ones.
    filled = classes > 0
    most, least = (taken - 0.5)[filled] / classes[filled], (taken + 0.5)[filled] / classes[filled]
    assert most[taken[filled] > 0].max() <= least[taken[filled] < classes[filled]].min(initial=np.inf) + 1e-12
    assert abs(taken - exact).max() < len(classes)
    more = stratified(labels, count + 1, seed) if count < classes.sum() else chosen
    assert set(chosen) <= set(more)


def test_stratified_is_balanced_and_drawn_anew_with_each_seed(index):
    split = labeled_split(index, "stratified", images=6, seed=1)
    assert split.per_class.tolist() == [2, 2, 2, 0] and "6 drawn by class, seed 1" in str(split)
    assert split.indices.tolist() == [2, 3, 5, 7, 9, 10]  # the same on every machine
    assert len({tuple(stratified(index.labels, 6, seed)) for seed in range(20)}) > 10
    with pytest.raises(DataError, match=r"split\.images is from 1 to the 12 images with a label, not 13"):
        labeled_split(index, "stratified", images=13)


def test_listed_names_are_imagenets_or_paths(index, names):
    file = names("n02_1.JPEG", "n03/n03_0.JPEG", "n01_3.JPEG")
    assert labeled_split(index, "names", file=file).indices.tolist() == [3, 5, 8]
    # A class is all before the last underscore.
    cats = index_of(["big_cat/big_cat_7.png", "big/big_cat_7.png"])
    assert labeled_split(cats, "names", file=names("big_cat_7.png")).indices.tolist() == [0]
    with pytest.raises(DataError, match=r"cannot read the list of names gone\.txt: No such file"):
        labeled_split(index, "names", file="gone.txt")


def test_split_has_counts_and_a_fingerprint(index, names):
    file = names("n02_1.JPEG", "n01_3.JPEG", "n02_0.JPEG")
    split = labeled_split(index, "names", file=file)
    assert split.per_class.tolist() == [1, 2, 0, 0]
    lines = b"n01/n01_3.JPEG\nn02/n02_0.JPEG\nn02/n02_1.JPEG\n"
    assert split.fingerprint == hashlib.sha256(lines).hexdigest()
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert str(split) == (
        f"3 labeled images, 0 to 2 in each of 4 classes (names.txt, sha256 {digest[:12]}; names "
        f"{split.fingerprint[:12]})"
    )


def test_listed_compares_the_sha256(index, names):
    file = names("n02_1.JPEG")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert len(labeled_split(index, "names", file=file, sha256=digest.upper()).indices) == 1
    names("n02_2.JPEG")
    said = rf"not {digest}: another list. Known lists: ImageNet 1% \(12811 names\)"
    with pytest.raises(DataError, match=said):
        labeled_split(index, "names", file=file, sha256=digest)
    names("n02_1.JPEG", end="\r\n")
    with pytest.raises(DataError, match="CR LF"):
        labeled_split(index, "names", file=file, sha256=digest)
    # Without a pin, line ends mean nothing.
    assert labeled_split(index, "names", file=file).indices.tolist() == [5]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["n01_0.JPEG", "../n01/n01_0.JPEG"], r"line 2: '../n01/n01_0.JPEG'"),
        (["/n01/n01_0.JPEG"], "line 1"),
        (["n01_0.JPEG", "", "n01_1.JPEG"], "line 2: ''"),
        (["n01_0.JPEG "], "line 1: 'n01_0.JPEG '"),
        (["n01-0.JPEG"], "line 1"),
        (["n01_0.JPEG", "n02_0.JPEG", "n01_0.JPEG"], "more than once: n01/n01_0.JPEG"),
        (["n01_0.JPEG", "n01/n01_0.JPEG"], "more than once: n01/n01_0.JPEG"),
        ([], "is empty"),
        (
            ["n01_0.JPEG", *(f"n01_{i}.JPEG" for i in range(50, 58))],
            r"names 8 images \(of 9\) that are not under images: n01_50.JPEG, n01_51.*n01_54.JPEG and 3 more",
        ),
        ([os.fsdecode(b"caf\xe9_1.jpg")], "not UTF-8"),
    ],
)
def test_listed_refuses_wrong_and_repeated_lines(index, names, lines, said):
    with pytest.raises(DataError, match=said):
        labeled_split(index, "names", file=names(*lines))


@pytest.mark.parametrize(("digest", "share"), [(d, name) for d, (name, _) in IMAGENET_LISTS.items()])
def test_listed_knows_the_papers_lists(digest, share):
    lists = {"ImageNet 1%": "1percent.txt", "ImageNet 10%": "10percent.txt"}
    file = FOLDER.parent / "data" / "imagenet_subsets" / lists[share]
    if not file.exists():
        pytest.skip(f"no {file}: the ImageNet lists are not on this machine")
    lines = file.read_text().splitlines()
    assert len(lines) == IMAGENET_LISTS[digest][1]
    others = [f"{line.split('_')[0]}/other.JPEG" for line in lines[:50]]
    files = sorted({*(f"{line.split('_')[0]}/{line}" for line in lines), *others})
    split = labeled_split(index_of(files), "names", file=file, sha256=digest)
    assert split.source == share and len(split.indices) == len(lines)
    sizes = {"ImageNet 1%": {12: 189, 13: 811}, "ImageNet 10%": {128: 884, 129: 116}}
    assert Counter(split.per_class.tolist()) == sizes[share]


@pytest.mark.parametrize(
    ("kind", "options", "chosen"),
    [("all", {}, [1, 3]), ("csv", {}, [1, 3]), ("bernoulli", {"fraction": 1.0}, [1, 3]), ("none", {}, [])],
)
def test_labeled_split_leaves_out_images_without_a_label(names, kind, options, chosen):
    index = index_of(["1.jpg", "cat/2.jpg", "plain/3.jpg", "dog/4.jpg"], ("cat", "dog"))
    assert labeled_split(index, kind, **options).indices.tolist() == chosen
    with pytest.raises(DataError, match=r"1 images .*without a label: plain/3.jpg"):
        labeled_split(index, "names", file=names("cat/2.jpg", "plain/3.jpg"))


def test_labeled_split_csv_must_agree_with_the_folder(index, tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text("file,label\nn03/n03_1.JPEG,n03\nn01/n01_0.JPEG,n01\n")
    split = labeled_split(index, "csv", file=table)
    assert split.indices.tolist() == [0, 9] and split.source == "labels.csv"
    table.write_text("file,label\nn03/n03_1.JPEG,n02\n")
    with pytest.raises(DataError, match=r"1 labels differ .*n03_1.JPEG \(n02 instead of n03\)"):
        labeled_split(index, "csv", file=table)
