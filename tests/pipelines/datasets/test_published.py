"""CIFAR from the authors' files, their archive, a server and folders; digits; VOC 2007 from its lists."""

import hashlib
import io
import os
import pickle
import re
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision import datasets

from fastsuncet.config import load_config
from fastsuncet.data.dataset import open_images
from pipelines.data_errors import DataError
from pipelines.datasets.pack import open_pack
from pipelines.datasets.published import VOC_CLASSES, cifar, digits, part_size, voc07
from tests.support.archives import Trap, tar_of
from tests.support.colors import ALONE
from tests.support.pictures import write_image
from tests.support.runs import CONFIGS
from tests.support.streams import evaluation
from tests.support.voc import write_voc

ROWS = 12  # images in a batch; the format does not fix it
NAMES = {kind: [f"c{i:02}" for i in range(count)] for kind, count in (("cifar10", 10), ("cifar100", 100))}
KINDS = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}


class Published:
    """Small files in the authors' format, whose MD5 torchvision is made to expect."""

    def __init__(self, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.kind, self.torchvision = kind, KINDS[kind]
        self.folder, self.key = self.torchvision.base_folder, "labels" if kind == "cifar10" else "fine_labels"
        lists = ("train_list", "test_list")
        self.train, self.test = ([name for name, _ in getattr(self.torchvision, each)] for each in lists)
        self.batches = {name: self.batch(seed) for seed, name in enumerate(self.train + self.test)}
        self.files = {name: pickle.dumps(batch, 2) for name, batch in self.batches.items()}
        for each, names in zip(lists, (self.train, self.test)):
            monkeypatch.setattr(self.torchvision, each, [[n, md5(self.files[n])] for n in names])
        meta = self.torchvision.meta
        self.files[meta["filename"]] = content = pickle.dumps({meta["key"]: NAMES[kind]}, 2)
        monkeypatch.setitem(meta, "md5", md5(content))
        members = [(f"{self.folder}/{name}", data) for name, data in self.files.items()]
        self.archive = tar_of(folder / "archive", *members, mode="w:gz").read_bytes()
        monkeypatch.setattr(self.torchvision, "tgz_md5", md5(self.archive))

    def batch(self, seed: int) -> dict:
        draws = np.random.default_rng(seed)
        pixels = draws.integers(0, 256, (ROWS, 3072), dtype=np.uint8)
        labels = draws.integers(0, len(NAMES[self.kind]), ROWS).tolist()
        return {"data": pixels, "coarse_labels": [0] * ROWS, self.key: labels}

    def labels(self, names: list[str]) -> list[int]:
        return [label for name in names for label in self.batches[name][self.key]]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def published(request, tmp_path_factory, monkeypatch) -> Published:
    unused = mock.Mock(side_effect=AssertionError("the network was used"))
    monkeypatch.setattr("urllib.request.urlopen", unused)
    return Published(getattr(request, "param", "cifar10"), tmp_path_factory.mktemp("published"), monkeypatch)


each = pytest.mark.parametrize("published", KINDS, indirect=True)


@each
@pytest.mark.parametrize("flat", [False, True])
def test_cifar_authors_files(published, tmp_path, flat):
    """Pixels are planes of red, green and blue in the file; labels are the (fine) labels in the authors' order."""
    published.write(tmp_path if flat else tmp_path / published.folder)
    for train, names in ((True, published.train), (False, published.test)):
        index = cifar(published.kind, tmp_path, train=train)
        planes = np.concatenate([published.batches[name]["data"] for name in names])
        assert np.array_equal(index.pixels, planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        assert index.labels.tolist() == published.labels(names)
        assert index.sizes.tolist() == [[32, 32]] * len(index) and index.root is None
        assert index.name(7) == f"{'train' if train else 'test'}/00007"
        assert index.classes == tuple(NAMES[published.kind])


@pytest.mark.parametrize("harm", ["missing", "changed", "cut short", "hostile"])
def test_cifar_refuses_other_files_unopened(published, tmp_path, monkeypatch, harm):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / published.folder
    published.write(folder)
    path = folder / "data_batch_4"
    content = path.read_bytes()
    path.unlink()
    if harm != "missing":
        others = {"changed": content + b"!", "cut short": content[:-1], "hostile": pickle.dumps(Trap())}
        path.write_bytes(others[harm])
    with pytest.raises(DataError, match=r"is not CIFAR-10 as published: .*: data_batch_4\. Unpack cifar-10"):
        cifar("cifar10", tmp_path)
    assert not (tmp_path / "RAN").exists()


@each
def test_cifar_unpacks_an_archive_without_download(published, tmp_path):
    """Also where an unpacking was killed."""
    (tmp_path / published.torchvision.filename).write_bytes(published.archive)
    assert cifar(published.kind, tmp_path).labels.tolist() == published.labels(published.train)
    (tmp_path / published.folder / published.train[-1]).write_bytes(b"half")
    assert cifar(published.kind, tmp_path).labels.tolist() == published.labels(published.train)
    (tmp_path / published.torchvision.filename).unlink()
    assert len(cifar(published.kind, tmp_path, train=False)) == ROWS


@each
def test_cifar_refuses_another_archive_unopened(published, tmp_path):
    path = tmp_path / published.torchvision.filename
    tar_of(path, ("../escaped", b"!"), mode="w:gz")
    said = rf"{path.name} is not CIFAR-100?'s archive: its MD5 is not .*Delete it"
    with pytest.raises(DataError, match=said):
        cifar(published.kind, tmp_path)
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("sent", [b"half", OSError("no route to host")])
def test_cifar_names_a_failed_download_and_tries_again(published, tmp_path, monkeypatch, sent):
    """It downloads once, and only when asked."""
    asked = []

    def urlopen(request):
        asked.append(request.full_url)
        if isinstance(sent, OSError):
            raise sent
        response = io.BytesIO(sent)
        response.url, response.length = request.full_url, len(sent)
        return response

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    with pytest.raises(DataError, match=r"no CIFAR-10 under .*data\.root.*data\.download"):
        cifar("cifar10", tmp_path)
    assert not asked
    with pytest.raises(DataError, match=r"download or unpack https://.*tar.gz in .*same command again"):
        cifar("cifar10", tmp_path, download=True)
    sent = published.archive
    asked.clear()
    for train in (True, True, False):
        assert len(cifar("cifar10", tmp_path, train=train, download=True)) == (5 if train else 1) * ROWS
    assert len(asked) == 2  # one for redirections and one for the file


@pytest.mark.parametrize("kind", KINDS)
def test_cifar_reads_folders_into_memory(kind, tmp_path):
    names, first = NAMES[kind], tmp_path / "train" / NAMES[kind][0]
    for name in names:
        write_image(tmp_path / "train" / name / "1.png", 32, 32)
        write_image(tmp_path / "test" / name / "7.png", 32, 32)
    train = cifar(kind, tmp_path)
    assert train.pixels.shape == (len(names), 32, 32, 3) and train.labels.tolist() == list(range(len(names)))
    assert cifar(kind, tmp_path, train=False).name(0) == f"{names[0]}/7.png"
    with Image.open(first / "1.png") as image:
        assert np.array_equal(train.pixels[0], np.asarray(image))
    jpeg, narrow = (write_image(tmp_path / "a.jpg", width, 32).read_bytes() for width in (32, 31))
    for content, said in (
        (narrow, r"2\.jpg has not 32 x 32 pixels"),
        (jpeg[: len(jpeg) // 2], r"an image of CIFAR-100? cannot be decoded: .*2\.jpg"),
        (b"", r"2\.jpg: an empty file"),
    ):
        (first / "2.jpg").write_bytes(content)
        with pytest.raises(DataError, match=said):
            cifar(kind, tmp_path)
    write_image(tmp_path / "train" / "zebra" / "1.jpg", 32, 32)
    with pytest.raises(DataError, match=r"has (11|101) class folders; CIFAR-100? has 100?$"):
        cifar(kind, tmp_path)


@pytest.mark.parametrize("published", ["cifar100"], indirect=True)
def test_cifar100_in_a_run(published, tmp_path):
    published.write(tmp_path / published.folder)
    keys = ("data.kind=cifar100", f"data.root={tmp_path}", "data.download=false", "data.split.fraction=0.5")
    config = load_config(CONFIGS / "cifar10_suncet.yaml", keys)
    images = open_images(config, ALONE, validation=True)
    assert images.train.labels.tolist() == published.labels(["train"])
    assert images.validation.labels.tolist() == published.labels(["test"])


@pytest.mark.slow
def test_digits_are_split_by_class_and_keep_their_picture():
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    train, test = digits(), digits(train=False)
    assert (len(train), len(test)) == (1442, 355)
    assert not set(train.files) & set(test.files)
    assert train.classes == test.classes == tuple("0123456789") and train.root is None
    data = load_digits()
    for index in (train, test):
        numbers = [int(name.split("/")[1]) for name in index.files]
        assert numbers == sorted(numbers) and index.labels.tolist() == data.target[numbers].tolist()
        levels = torch.from_numpy(data.images[numbers] * (255 / 16))[None]
        expected = F.interpolate(levels, scale_factor=2, mode="bilinear")[0].numpy()
        assert np.abs(index.pixels - expected[..., None]).max() <= 1.5  # rounded before and between the axes
    assert (np.abs(np.bincount(test.labels) / np.bincount(data.target) - 0.2) < 0.01).all()


def test_digits_say_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        digits()


def lists(root):
    return root / "VOCdevkit" / "VOC2007" / "ImageSets" / "Main"


def rewrite(root, name: str, line: str, new: str) -> None:
    path = lists(root) / name
    path.write_text(re.sub(line, new, path.read_text()))


def test_voc07_parts_have_their_images_and_presence(tmp_path):
    presence = write_voc(tmp_path)
    assert len(VOC_CLASSES) == 20 and list(VOC_CLASSES) == sorted(VOC_CLASSES)
    for parts in (["train"], ["val"], ["test"], ["train", "val"]):
        index = voc07(tmp_path, *parts)
        assert sum(part_size(tmp_path, part) for part in parts) == len(index)
        assert np.array_equal(index.presence, np.concatenate([presence[part] for part in parts]))
        assert (index.labels == -1).all() and index.classes == VOC_CLASSES
        assert (index.sizes >= 40).all() and not index.bad
    for outer in ("VOCdevkit", "VOCdevkit/VOC2007"):
        assert voc07(tmp_path / outer, "train", "val").fingerprint() == index.fingerprint()
    assert index.name(10) == "JPEGImages/000011.jpg" and index.path(0).is_file()
    loader = evaluation(index, np.arange(len(index)), "torchvision", 4, 24, 28)
    assert [tuple(images.shape) for (images,) in loader] == [(4, 3, 24, 24), (4, 3, 24, 24), (3, 3, 24, 24)]


@pytest.mark.parametrize(
    ("line", "new", "said"),
    [
        ("000008.*", "000008", r"cat_val.txt line 2 is not the name of an image and 1, -1 or 0"),
        ("000008.*", "000008 1 1", "line 2 is not"),
        ("000009.*", "000009 2", "line 3 is not"),
        ("000009.*", "../../x 1", "line 3 is not"),
        ("(?s)^.*$", "", "line 1 is not"),
        ("000009.*", "000007 1", "cat_val.txt names other images than .*aeroplane_val.txt"),
        ("000010.*\n", "", "cat_val.txt names other images"),
    ],
)
def test_voc07_names_a_wrong_list_with_its_line(tmp_path, line, new, said):
    write_voc(tmp_path)
    rewrite(tmp_path, "cat_val.txt", line, new)
    with pytest.raises(DataError, match=said):
        voc07(tmp_path, "val")


def test_voc07_names_an_image_of_two_parts(tmp_path):
    write_voc(tmp_path)
    for name in VOC_CLASSES:
        rewrite(tmp_path, f"{name}_val.txt", "^", "000003 1\n")
    with pytest.raises(DataError, match="VOC2007: 000003 twice in the lists of train and val"):
        voc07(tmp_path, "train", "val")


def test_data_below_the_home_of_no_account_are_not_there():
    """Where pathlib would raise RuntimeError."""
    cifar10 = partial(cifar, "cifar10")
    for opened, said in ((cifar10, "no CIFAR-10"), (voc07, "no PASCAL VOC"), (open_pack, "no pack")):
        with pytest.raises(DataError, match=f"{said}.* ~nobody-here/data"):
            opened("~nobody-here/data")


def test_voc07_names_what_is_missing_and_where_it_is(tmp_path):
    with pytest.raises(DataError, match=r"no PASCAL VOC 2007 .* under .*VOCtrainval_06-Nov-2007.tar"):
        voc07(tmp_path, "train")
    write_voc(tmp_path)
    (lists(tmp_path) / "sofa_test.txt").unlink()
    with pytest.raises(DataError, match=r"there is no .*sofa_test.txt: VOCtest_06-Nov-2007.tar has it"):
        voc07(tmp_path, "test")
    (tmp_path / "VOCdevkit" / "VOC2007" / "JPEGImages" / "000008.jpg").unlink()
    assert voc07(tmp_path, "val").bad == {1: "no such file"}
