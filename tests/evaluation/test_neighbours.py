"""Nearest neighbours and the linear probe on cases whose answer is known; every image once on any number of ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastsuncet.data.dataset import open_images
from fastsuncet.distributed.launch import Place
from fastsuncet.evaluation import online_knn as online
from fastsuncet.evaluation.features import embed, view_size
from fastsuncet.evaluation.neighbours import knn_predict
from fastsuncet.evaluation.online_knn import online_knn, spread_over_classes
from fastsuncet.evaluation.probe import linear_probe
from fastsuncet.training.step import build
from tests.support.ranks import run_ranks
from tests.support.runs import small_config
from tests.support.vectors import load_vectors

CPU = torch.device("cpu")


def circle(*degrees: float) -> torch.Tensor:
    angles = torch.tensor(degrees) * torch.pi / 180
    return torch.stack([angles.cos(), angles.sin()], 1)


def test_the_majority_of_the_k_most_similar_wins_whatever_the_lengths():
    supports, labels = (
        circle(0, 10, 20, 90, 100) * torch.tensor([[9.0], [1], [5], [0.1], [3]]),
        torch.tensor([0, 0, 0, 1, 1]),
    )
    assert knn_predict(circle(5, 95, 40), supports, labels, 2, k=3).tolist() == [0, 1, 0]


def test_a_tie_of_votes_goes_to_the_more_similar_class():
    supports, labels = circle(-30, -20, 5, 8), torch.tensor([0, 0, 1, 1])
    assert knn_predict(circle(0), supports, labels, 2, k=4).tolist() == [1]


def test_weighted_votes_can_overrule_a_majority():
    supports, labels = circle(0, 80, 81), torch.tensor([0, 1, 1])
    assert knn_predict(circle(1), supports, labels, 2, k=3).tolist() == [1]
    assert knn_predict(circle(1), supports, labels, 2, k=3, weighted=True).tolist() == [0]


def test_k_beyond_the_supports_takes_them_all():
    assert knn_predict(circle(0), circle(1, 2), torch.tensor([1, 1]), 2, k=10).tolist() == [1]


def test_chunks_do_not_change_a_prediction():
    generator = torch.Generator().manual_seed(0)
    queries, supports = (torch.randn(n, 7, generator=generator) for n in (50, 30))
    labels = torch.randint(0, 4, (30,), generator=generator)
    whole = knn_predict(queries, supports, labels, 4)
    assert torch.equal(knn_predict(queries, supports, labels, 4, chunk_size=7), whole)


def test_neighbours_agree_with_the_authors_vectors():
    v = load_vectors("vectors_npi")
    query, support, labels = (torch.from_numpy(v[name]) for name in ("query", "support", "support_labels"))
    predicted = knn_predict(query, support, labels, 4, k=10)
    votes = v["knn10_votes"]
    clear = np.sort(votes, 1)[:, -1] > np.sort(votes, 1)[:, -2]
    assert clear.any()
    assert (predicted.numpy() == votes.argmax(1))[clear].all()


def test_a_linearly_separable_set_is_separated():
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    points = rng.normal(0, 0.3, (60, 2)) + np.array([[0, 4], [4, -4], [-4, -4]])[labels]
    assert linear_probe(points[:30], labels[:30], points[30:], labels[30:]) == 1.0


def test_small_images_are_seen_whole_and_large_ones_in_the_papers_proportion():
    assert view_size(224) == (224, 256)
    assert view_size(32) == (32, 32)


@given(
    labels=st.lists(st.integers(-1, 4), max_size=80).map(lambda values: np.array(values, dtype=np.int64)),
    most=st.integers(1, 100),
)
def test_supports_are_spread_evenly_over_the_classes_and_within_each(labels, most):
    chosen = spread_over_classes(labels, most)
    known = (labels >= 0).sum()
    assert len(chosen) == min(most, known) and (np.diff(chosen) > 0).all()
    assert (labels[chosen] >= 0).all()
    for c in range(5):
        members, taken = (
            np.flatnonzero(labels == c),
            np.flatnonzero(np.isin(np.flatnonzero(labels == c), chosen)),
        )
        fair = len(members) * min(1, most / max(1, known))
        assert abs(len(taken) - fair) < 1
        # Gaps of floor or ceil of the spacing: none from one end of the class alone.
        assert len(set(np.diff(taken))) <= 2


def test_a_run_without_labels_takes_no_more_supports_than_fit(tmp_path, monkeypatch):
    place = Place(0, 1, 0, CPU)
    config = small_config(
        tmp_path, "data.split.kind=none", "data.split.fraction=null", "criterion.supervised_epochs=0"
    )
    images = open_images(config, place, validation=True)
    asked = []

    def remembered(model, index, indices, *rest):
        asked.append((index, indices))
        return torch.zeros(len(indices), 2)

    monkeypatch.setattr(online, "MOST_SUPPORTS", 100)
    monkeypatch.setattr(online, "embed", remembered)
    online_knn(None, images, config, place)
    supports = {id(index): indices for index, indices in asked}[id(images.train)]
    assert np.array_equal(supports, spread_over_classes(images.train.labels, 100))
    assert set(np.bincount(images.train.labels[supports])) <= {9, 10, 11}


def _features_and_accuracy(rank: int, world_size: int, folder: str) -> list:
    from pathlib import Path

    place = Place(rank, world_size, rank, CPU)
    config = small_config(Path(folder))
    images = open_images(config, place, validation=True)
    model = build(config, Place(0, 1, 0, CPU), 10)[0]
    chosen = np.arange(7)  # ragged on any number of ranks
    return [
        embed(model, images.validation, chosen, config, place, batch=2),
        online_knn(model, images, config, place),
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_embed_every_image_once_in_order_and_count_the_same_accuracy(world_size, tmp_path):
    one, accuracy = _features_and_accuracy(0, 1, str(tmp_path))
    assert one.shape == (7, 64)
    for features, counted in run_ranks(_features_and_accuracy, world_size, str(tmp_path)):
        torch.testing.assert_close(features, one, rtol=1e-5, atol=1e-6)
        assert counted == accuracy


def test_a_class_without_a_neighbour_is_never_the_answer():
    """Neighbours that all point away weigh less than nothing, and nothing is what an absent class has."""
    queries, supports = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.1], [-1.0, 0.9]])
    labels = torch.tensor([2, 3])
    for weighted, answer in ((False, 3), (True, 3)):
        assert knn_predict(queries, supports, labels, 5, k=2, weighted=weighted).tolist() == [answer]
