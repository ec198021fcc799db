"""Nearest neighbors on cases whose answer is known, after and during training."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastsuncet.data.dataset import open_images
from fastsuncet.evaluation import knn as module
from fastsuncet.evaluation import protocols
from fastsuncet.evaluation.features import outputs
from fastsuncet.evaluation.knn import knn_predict, online_knn, spread_over_classes
from fastsuncet.evaluation.protocols import cross_validated, knn
from fastsuncet.models.resnet import build_model
from pipelines.data_errors import DataError
from tests.support.colors import ALONE, MeanColor, color_config, write_colors
from tests.support.runs import small_config
from tests.support.vectors import load_vectors


def circle(*degrees: float) -> torch.Tensor:
    angles = torch.tensor(degrees) * torch.pi / 180
    return torch.stack([angles.cos(), angles.sin()], 1)


LENGTHS = torch.tensor([[9.0], [1], [5], [0.1], [3]])
CASES = {  # angles of the queries, supports, their labels, options, the classes that are found
    "majority": ([5, 95, 40], circle(0, 10, 20, 90, 100) * LENGTHS, [0, 0, 0, 1, 1], {"k": 3}, [0, 1, 0]),
    "majority, in chunks": ([5, 95, 40], circle(0, 10, 90), [0, 0, 1], {"k": 2, "chunk_size": 2}, [0, 1, 0]),
    "tie": ([0], circle(-30, -20, 5, 8), [0, 0, 1, 1], {"k": 4}, [1]),
    "whole votes": ([1], circle(0, 80, 81), [0, 1, 1], {"k": 3}, [1]),
    "weighted": ([1], circle(0, 80, 81), [0, 1, 1], {"k": 3, "weighted": True}, [0]),
    "k above N": ([0], circle(1, 2), [1, 1], {"k": 10}, [1]),
    "tie of all": ([0], circle(9, 9), [1 << 40, 1 << 39], {"k": 2}, [1 << 39]),
    "all opposite": ([0], circle(174, 137), [2, 3], {"k": 2}, [3]),
    "all opposite, weighted": ([0], circle(174, 137), [2, 3], {"k": 2, "weighted": True}, [3]),
}


@pytest.mark.parametrize("case", CASES)
def test_knn_predict_cases_by_hand(case):
    """Lengths of vectors do not count, ties go to the more similar class, and no memory depends on their number."""
    queries, supports, labels, options, wanted = CASES[case]
    found = knn_predict(circle(*queries), supports, torch.tensor(labels), **options)
    assert found.tolist() == wanted


def test_knn_predict_agrees_with_the_authors_vectors():
    v = load_vectors("vectors_npi")
    query, support, labels = (torch.from_numpy(v[name]) for name in ("query", "support", "support_labels"))
    predicted = knn_predict(query, support, labels, k=10)
    votes = v["knn10_votes"]
    clear = np.sort(votes, 1)[:, -1] > np.sort(votes, 1)[:, -2]
    assert clear.any()
    assert (predicted.numpy() == votes.argmax(1))[clear].all()


def test_knn_takes_the_same_views_as_npi_of_a_limited_number_of_images(colors, monkeypatch):
    """Appendix G crops and flips the labeled images at random before it compares its two classifiers."""
    config, images = colors
    network, spy = build_model("resnet_tiny", seed=1).encoder, mock.Mock(wraps=knn_predict)
    monkeypatch.setattr(protocols, "knn_predict", spy)
    monkeypatch.setattr(protocols, "MOST_SUPPORTS", 10)
    measured = knn(network, images, config, ALONE)
    chosen = spread_over_classes(images.train.labels, 10)
    views = outputs(network, images.train, chosen, config, ALONE, crops=1)
    assert [torch.equal(call.args[1], views[:, 0]) for call in spy.mock_calls] == [True, True]
    a = config.data.augmentation
    crops = {"seed": 0, "flip": a.flip, "support_scale": [*a.crop_scale], "support_ratio": [*a.crop_ratio]}
    assert measured.setting == {"k": 10, "supports": 10, **crops}


def test_knn_notes_that_no_class_has_k_labels(colors):
    config, images = colors
    known, alone = np.zeros(len(images.train), bool), replace(images, held_out=None)
    most = int(np.bincount(images.train.labels).max())
    of_a_fold = most - most // 5
    assert of_a_fold < most
    for k in (of_a_fold, most, most + 1):
        config = config.with_values({"evaluation.knn_k": k})
        each = knn(MeanColor(), images, config, ALONE)
        folds = cross_validated("knn", MeanColor(), alone, config, ALONE, known)
        for measured, votes in ((each, most), (folds, of_a_fold)):
            said = [f"k is {k} and no class has more than {votes}" in note for note in measured.notes]
            assert sum(said) == (k > votes)


@given(
    labels=st.lists(st.integers(-1, 4), max_size=80).map(lambda values: np.array(values, dtype=np.int64)),
    most=st.integers(1, 100),
)
def test_spread_over_classes_is_even_over_and_within_classes(labels, most):
    chosen = spread_over_classes(labels, most)
    known = (labels >= 0).sum()
    assert len(chosen) == min(most, known) and (np.diff(chosen) > 0).all()
    assert (labels[chosen] >= 0).all()
    for c in range(5):
        members = np.flatnonzero(labels == c)
        taken = np.flatnonzero(np.isin(members, chosen))
        assert abs(len(taken) - len(members) * min(1, most / max(1, known))) < 1
        # Gaps of floor or ceil of the spacing: they are not all from one end of the class.
        assert len(set(np.diff(taken))) <= 2


def test_online_knn_says_how_to_leave_out_a_training_image_that_is_bad(tmp_path):
    config = color_config(write_colors(tmp_path))
    whole = (tmp_path / "train/b/0.png").read_bytes()
    (tmp_path / "train/b/0.png").write_bytes(whole[: len(whole) // 2])
    images = open_images(config, ALONE, validation=True)
    with pytest.raises(DataError, match=r"(?s)b/0.png: .*Or run `fastsuncet data check CONFIG`: k-NN leaves"):
        online_knn(build_model("resnet_tiny"), images, config, ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "all"])
def test_online_knn_without_labels_or_with_all_limits_its_supports(tmp_path, monkeypatch, kind):
    split = (f"data.split.kind={kind}", "data.split.fraction=null", "criterion.supervised_epochs=0")
    config = small_config(tmp_path, *split)
    images = open_images(config, ALONE, validation=True)
    asked = {}

    def remembered(network, index, indices, *_, **__):
        asked[id(index)] = indices
        return torch.zeros(len(indices), 64)

    monkeypatch.setattr(module, "MOST_SUPPORTS", 100)
    monkeypatch.setattr(module, "outputs", remembered)
    found = online_knn(build_model("resnet_tiny"), images, config, ALONE)
    supports = asked[id(images.train)]
    assert np.array_equal(supports, spread_over_classes(images.train.labels, 100))
    assert set(np.bincount(images.train.labels[supports])) <= {9, 10, 11}
    assert found["knn_supports"] == 100
