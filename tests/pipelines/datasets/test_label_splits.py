"""Which images are labeled: the authors' coin, lists checked to the byte, and CSVs that may not contradict."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.data_errors import DataError
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.label_splits import IMAGENET_LISTS, labeled_indices, labeled_split, tossed
from tests.support.vectors import FOLDER, load_vectors


def index_of(files: list[str], classes: tuple[str, ...] | None = None) -> ImageIndex:
    """An image folder's index without the folder."""
    found = tuple(sorted({name.split("/")[0] for name in files}))
    classes = found if classes is None else classes
    return ImageIndex(
        root=Path("images"),
        files=files,
        labels=np.array([classes.index(name.split("/")[0]) if "/" in name else -1 for name in files]),
        classes=classes,
        sizes=np.ones((len(files), 2), np.int32),
    )


@pytest.fixture
def index() -> ImageIndex:
    files = [f"{wnid}/{wnid}_{i}.JPEG" for wnid in ("n01", "n02", "n03") for i in range(4)]
    return index_of(files, ("n01", "n02", "n03", "n04"))


@pytest.fixture
def names(tmp_path):
    def write(*lines: str, end: str = "\n") -> Path:
        (tmp_path / "names.txt").write_bytes("".join(line + end for line in lines).encode())
        return tmp_path / "names.txt"

    return write


# -- coins


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 300),
    fraction=st.sampled_from([0.0, 0.01, 0.1, 1 / 3, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_one_draw_of_a_tensor_is_the_authors_draw_image_by_image(count, fraction, seed):
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    unlabeled = [
        torch.distributions.Bernoulli(torch.tensor(1 - fraction)).sample().item() for _ in range(count)
    ]
    torch.set_rng_state(state)
    assert tossed(count, fraction, seed).tolist() == [i for i, u in enumerate(unlabeled) if u == 0]


@pytest.mark.parametrize(
    ("fraction", "count"), [(0.01, 520), (0.05, 2491), (0.1, 5006), (0.2, 9945), (0.5, 25009), (1.0, 50000)]
)
def test_cifar10_splits_have_the_recipes_counts_and_images(fraction, count):
    chosen = tossed(50_000, fraction, seed=0)
    assert len(chosen) == count
    assert np.array_equal(chosen, load_vectors("vectors_cifar10_bernoulli_splits")[f"p{fraction}"])


def test_tossing_coins_leaves_torchs_own_generator_alone():
    before = torch.get_rng_state()
    tossed(100, 0.5, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_seed_tosses_other_coins():
    assert tossed(200, 0.5, 0).tolist() != tossed(200, 0.5, 1).tolist()
    assert tossed(200, 0.5, 0).dtype == np.int64


def test_a_bernoulli_split_says_its_share_and_seed(index):
    split = labeled_split(index, "bernoulli", fraction=0.5, seed=3)
    assert split.indices.tolist() == tossed(12, 0.5, 3).tolist()
    assert "Bernoulli(0.5), seed 3" in str(split)


def test_a_share_that_is_none_or_missing_is_refused(index):
    for fraction in (-0.1, 1.1, float("nan")):
        with pytest.raises(DataError, match="from 0 to 1"):
            labeled_split(index, "bernoulli", fraction=fraction)
    with pytest.raises(DataError, match=r"needs data\.split\.fraction"):
        labeled_split(index, "bernoulli")


# -- lists of names


def test_a_list_names_images_as_imagenets_do_or_by_their_path(index, names):
    file = names("n02_1.JPEG", "n03/n03_0.JPEG", "n01_3.JPEG")
    assert labeled_indices(index, "names", file=file).tolist() == [3, 5, 8]


def test_the_class_of_a_listed_name_is_all_before_its_last_underscore(names):
    index = index_of(["big_cat/big_cat_7.png", "big/big_cat_7.png"])
    assert labeled_indices(index, "names", file=names("big_cat_7.png")).tolist() == [0]


def test_a_split_tells_its_counts_and_its_fingerprint(index, names):
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


def test_a_pinned_list_must_be_that_list_to_the_byte(index, names):
    file = names("n02_1.JPEG")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert len(labeled_indices(index, "names", file=file, sha256=digest.upper())) == 1
    names("n02_2.JPEG")
    with pytest.raises(
        DataError, match=rf"not {digest}: another list. Known lists: ImageNet 1% \(12811 names\)"
    ):
        labeled_indices(index, "names", file=file, sha256=digest)
    names("n02_1.JPEG", end="\r\n")
    with pytest.raises(DataError, match="CR LF"):
        labeled_indices(index, "names", file=file, sha256=digest)
    assert labeled_indices(index, "names", file=file).tolist() == [5]  # unpinned, line ends mean nothing


def test_names_that_are_not_in_the_data_are_counted_and_the_first_told(index, names):
    file = names("n01_0.JPEG", *(f"n01_{i}.JPEG" for i in range(50, 58)))
    with pytest.raises(DataError) as error:
        labeled_indices(index, "names", file=file)
    assert f"names 8 images (of 9) that are not under {index.root}: n01_50.JPEG, n01_51" in str(error.value)
    assert "n01_54.JPEG and 3 more" in str(error.value)


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
    ],
)
def test_a_line_that_is_no_name_or_names_an_image_twice_is_refused(index, names, lines, said):
    with pytest.raises(DataError, match=said):
        labeled_indices(index, "names", file=names(*lines))


def test_a_list_that_cannot_be_read_is_refused(index, tmp_path):
    with pytest.raises(DataError, match=r"cannot read the list of names .*gone.txt: No such file"):
        labeled_indices(index, "names", file=tmp_path / "gone.txt")
    (tmp_path / "names.txt").write_bytes(b"caf\xe9_1.jpg\n")
    with pytest.raises(DataError, match="not UTF-8"):
        labeled_indices(index, "names", file=tmp_path / "names.txt")
    with pytest.raises(DataError, match=r"needs data\.split\.file"):
        labeled_indices(index, "names")


@pytest.mark.parametrize(("digest", "share"), [(d, name) for d, (name, _) in IMAGENET_LISTS.items()])
def test_the_papers_lists_are_known_by_their_content(digest, share):
    folder = FOLDER.parent / "data" / "imagenet_subsets"
    lists = {"ImageNet 1%": "1percent.txt", "ImageNet 10%": "10percent.txt"}
    file = folder / lists[share]
    if not file.exists():
        pytest.skip(f"no {file}: the ImageNet lists are not beside the vectors")
    lines = file.read_text().splitlines()
    assert len(lines) == IMAGENET_LISTS[digest][1]
    others = [f"{line.split('_')[0]}/other.JPEG" for line in lines[:50]]
    files = sorted({*(f"{line.split('_')[0]}/{line}" for line in lines), *others})
    split = labeled_split(index_of_many(files), "names", file=file, sha256=digest)
    assert split.source == share and len(split.indices) == len(lines)
    sizes = {"ImageNet 1%": {12: 189, 13: 811}, "ImageNet 10%": {128: 884, 129: 116}}
    assert (
        dict(zip(*(part.tolist() for part in np.unique(split.per_class, return_counts=True)))) == sizes[share]
    )


def index_of_many(files: list[str]) -> ImageIndex:
    folders, labels = np.unique([name.split("/")[0] for name in files], return_inverse=True)
    sizes = np.ones((len(files), 2), np.int32)
    return ImageIndex(Path("images"), files, labels.astype(np.int64), tuple(folders.tolist()), sizes)


# -- all, none, CSV


def test_all_and_none_are_what_they_say(index):
    assert labeled_indices(index, "all").tolist() == list(range(12))
    none = labeled_split(index, "none")
    assert none.indices.shape == (0,) and none.indices.dtype == np.int64
    assert none.per_class.tolist() == [0, 0, 0, 0] and str(none) == "no labeled images (none asked for)"


@pytest.mark.parametrize(("kind", "options"), [("all", {}), ("csv", {}), ("bernoulli", {"fraction": 1.0})])
def test_an_image_without_a_label_is_in_no_split(kind, options):
    index = index_of(["1.jpg", "cat/2.jpg", "3.jpg", "dog/4.jpg"], ("cat", "dog"))
    assert labeled_indices(index, kind, **options).tolist() == [1, 3]


def test_a_listed_image_without_a_label_is_refused(names):
    index = index_of(["cat/2.jpg", "plain/3.jpg"])
    labels = index.labels.copy()
    labels[1] = -1
    index = ImageIndex(index.root, index.files, labels, index.classes, index.sizes)
    with pytest.raises(DataError, match=r"1 images .*without a label: plain/3.jpg"):
        labeled_indices(index, "names", file=names("cat/2.jpg", "plain/3.jpg"))


def test_a_csv_chooses_images_of_a_folder_and_must_agree_with_it(index, tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text("file,label\nn03/n03_1.JPEG,n03\nn01/n01_0.JPEG,n01\n")
    split = labeled_split(index, "csv", file=table)
    assert split.indices.tolist() == [0, 9] and split.source == "labels.csv"
    table.write_text("file,label\nn03/n03_1.JPEG,n02\n")
    with pytest.raises(DataError, match=r"labels 1 images otherwise .*n03_1.JPEG \(n02 instead of n03\)"):
        labeled_split(index, "csv", file=table)
    table.write_text("file,label\nn03/n03_1.JPEG,zebra\n")
    with pytest.raises(DataError, match="'zebra' is not one of the 4 classes"):
        labeled_split(index, "csv", file=table)


def test_an_unknown_kind_of_split_is_refused_with_the_known_ones(index):
    with pytest.raises(DataError, match="one of names, bernoulli, all, none, csv, not 'some'"):
        labeled_split(index, "some")
