"""CIFAR-100: fine labels of two batches, its own archive, and a run's images. What it shares is test_cifar10's."""

import dataclasses
import os
import pickle

import numpy as np
import pytest

from fastsuncet.commands.data_check import check_config
from fastsuncet.config import load_config
from fastsuncet.data.dataset import open_images
from fastsuncet.distributed.launch import join
from pipelines.data_errors import DataError
from pipelines.datasets import cifar100 as module
from pipelines.datasets.cifar100 import CIFAR100, cifar100
from pipelines.datasets.download import sha256_of
from tests.pipelines.datasets.test_cifar10 import authors_pickle, write_archive
from tests.pipelines.datasets.test_index import write_image
from tests.support.runs import CONFIGS

ROWS = 12


def batch_of(seed: int) -> dict:
    draws = np.random.default_rng(seed)
    return {
        b"data": draws.integers(0, 256, (ROWS, 3072), dtype=np.uint8),
        b"fine_labels": draws.integers(0, 100, ROWS).tolist(),
        b"coarse_labels": draws.integers(0, 20, ROWS).tolist(),
        b"filenames": [b"a.png"] * ROWS,
    }


def write_batches(folder) -> dict[str, dict]:
    folder.mkdir(parents=True, exist_ok=True)
    batches = {name: batch_of(seed) for seed, name in enumerate(("train", "test"))}
    for name, batch in batches.items():
        (folder / name).write_bytes(authors_pickle(batch[b"data"], batch[b"fine_labels"], key=b"fine_labels"))
    return batches


def test_labels_are_the_fine_ones_in_the_authors_order(tmp_path):
    batches = write_batches(tmp_path / CIFAR100.folder)
    for train, name in ((True, "train"), (False, "test")):
        index = cifar100(tmp_path, train=train)
        assert index.labels.tolist() == batches[name][b"fine_labels"]
        assert np.array_equal(index.pixels.transpose(0, 3, 1, 2).reshape(ROWS, -1), batches[name][b"data"])
        assert index.name(3) == f"{name}/00003" and len(index.classes) == 100


def test_a_batch_with_a_label_of_101_classes_is_refused(tmp_path):
    batches = write_batches(tmp_path)
    batches["train"][b"fine_labels"][5] = 100
    (tmp_path / "train").write_bytes(pickle.dumps(batches["train"], 3))
    with pytest.raises(DataError, match=r"train is not a CIFAR batch: ValueError: labels from \d+ to 100"):
        cifar100(tmp_path)


def test_a_batch_of_cifar10_is_not_cifar100(tmp_path):
    (tmp_path / "train").write_bytes(
        pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [0]}, 3)
    )
    with pytest.raises(DataError, match="KeyError: b'fine_labels'"):
        cifar100(tmp_path)


def test_only_the_authors_archive_is_unpacked(tmp_path, monkeypatch):
    write_batches(tmp_path / "source")
    root = tmp_path / "root"
    root.mkdir()
    members = {
        f"{CIFAR100.folder}/{name}": (tmp_path / "source" / name).read_bytes() for name in ("train", "test")
    }
    write_archive(root / CIFAR100.archive, {**members, f"{CIFAR100.folder}/meta": b"never read"})
    with pytest.raises(DataError, match="is not CIFAR-100's archive: sha256"):
        cifar100(root)
    trusted = dataclasses.replace(CIFAR100, sha256=sha256_of(root / CIFAR100.archive))
    monkeypatch.setattr(module, "CIFAR100", trusted)
    assert len(cifar100(root)) == ROWS
    assert sorted(os.listdir(root / CIFAR100.folder)) == ["test", "train"]


def test_folders_named_as_the_classes_have_the_same_numbers(tmp_path):
    for name in CIFAR100.classes:
        write_image(tmp_path / "train" / name / "1.png", 32, 32)
    assert cifar100(tmp_path).labels.tolist() == list(range(100))


def test_a_run_and_data_check_read_cifar100(tmp_path):
    batches = write_batches(tmp_path / CIFAR100.folder)
    keys = ("data.kind=cifar100", f"data.root={tmp_path}", "data.download=false", "data.split.fraction=0.5")
    config = load_config(CONFIGS / "cifar10_suncet.yaml", keys)
    with join("cpu") as place:
        images = open_images(config, place, validation=True)
    assert images.train.labels.tolist() == batches["train"][b"fine_labels"]
    assert images.validation.labels.tolist() == batches["test"][b"fine_labels"]
    told = []
    check_config(config, told.append)
    assert told == [f"{tmp_path}: {ROWS} training and {ROWS} test images, decoded and held in memory"]
