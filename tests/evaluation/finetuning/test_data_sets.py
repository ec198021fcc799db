"""VOC 2007's average precision: an example by hand, a slow oracle, ties, difficult images."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastsuncet.evaluation.finetuning.data_sets import average_precision, mean_ap
from pipelines.data_errors import DataError


def slow_average_precision(scores, presence) -> float:
    """Compute the definition, one threshold at a time, in fractions."""
    asked = [(score, there) for score, there in zip(scores, presence) if there != 0]
    positives = sum(there > 0 for _, there in asked)
    points = []
    for threshold in {score for score, _ in asked}:
        taken = [there > 0 for score, there in asked if score >= threshold]
        points.append((Fraction(sum(taken), positives), Fraction(sum(taken), len(taken))))
    total = Fraction(0)
    for tenth in range(11):
        total += max((precision for recall, precision in points if recall >= Fraction(tenth, 10)), default=0)
    return float(total / 11)


def test_average_precision_by_hand():
    # Three of ten positives are a recall of exactly 0.3: recalls 0 .. 0.3 read 1, the others the last precision.
    presence = np.array([1] * 3 + [-1] * 20 + [1] * 7)
    wanted = (4 * 1 + 7 * 10 / 30) / 11
    assert average_precision(-np.arange(30.0), presence) == pytest.approx(wanted, abs=1e-15)


IMAGES = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1, -1, 0])), min_size=1, max_size=30).filter(
    lambda rows: any(there == 1 for _, there in rows)
)


@given(IMAGES, st.randoms(use_true_random=False), st.integers(0, 4))
def test_average_precision_is_the_definitions(rows, chance, score):
    """Ties included; neither the order of images, nor a monotone change of scores, nor a difficult image counts."""
    scores, presence = np.array(rows, float).T
    found = average_precision(scores, presence)
    assert found == pytest.approx(slow_average_precision(scores, presence), abs=1e-12)
    assert average_precision(np.append(scores, score), np.append(presence, 0)) == found
    chance.shuffle(rows)
    shuffled, shown = np.array(rows, float).T
    assert average_precision(np.exp(shuffled / 3), shown) == found


def test_mean_ap_leaves_out_classes_without_positives():
    presence = np.array([[1, -1, 1], [-1, 0, 1], [-1, -1, -1]], np.int8)
    scores = np.array([[3.0, 0, 1], [2, 0, 3], [1, 0, 2]], np.float32)
    index = SimpleNamespace(presence=presence[::-1], classes=("car", "cat", "cow"), root="here")
    mean, found = mean_ap(scores, index, np.array([2, 1, 0]))
    third = slow_average_precision(scores[:, 2], presence[:, 2])
    assert found == {"car": {"average_precision": 1}, "cow": {"average_precision": pytest.approx(third)}}
    assert mean == pytest.approx((1 + third) / 2)
    with pytest.raises(DataError, match="here: no class is in any of the 1 images"):
        mean_ap(scores[2:], index, np.array([0]))
