"""Mean average precision as PASCAL VOC 2007 defines it: the mean precision at eleven recalls.

Shapes: N images, C classes.
"""

import numpy as np

RECALLS = 11  # 0, 0.1, ..., 1


def mean_average_precision(scores: np.ndarray, presence: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the mean over classes, and each class's average precision, float64 (C,), from 0 to 1.

    `scores` (N, C) float: only their order counts. `presence` (N, C): 1 the class is there, -1 it is not, 0 difficult.
    A class without a positive image has no recall: its value is NaN, and the mean is over the others. Raises ValueError
    where no class has one.
    """
    each = np.array([average_precision(*pair) for pair in zip(scores.T, presence.T, strict=True)])
    if np.isnan(each).all():
        raise ValueError("no class has a positive image")
    return float(np.nanmean(each)), each


def average_precision(scores: np.ndarray, presence: np.ndarray) -> float:
    """Return the mean over recalls t = 0, 0.1, ..., 1 of the highest precision at recall >= t; NaN without positives.

    `scores` and `presence` (N,) as above. Difficult images are left out. Images of equal score are counted together:
    precision and recall belong to a threshold, so the order of the images cannot change the number. (VOC's own program
    takes them in the order of its sort.)
    """
    asked = presence != 0
    scores, there = scores[asked], presence[asked] > 0
    positives = int(there.sum())
    if positives == 0:
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    last = np.append(ranked[1:] != ranked[:-1], True)  # the last image of each group of equal scores
    found = np.cumsum(there[order])[last]
    precision = found / (np.flatnonzero(last) + 1)
    # From the right: each threshold gets the best precision of itself and of all thresholds of higher recall.
    best = np.maximum.accumulate(precision[::-1])[::-1]
    # Integers, because in floats 3 * 0.1 is more than 0.3, the recall of three of ten positives.
    wanted = np.searchsorted((RECALLS - 1) * found, np.arange(RECALLS) * positives)
    return float(best[wanted].mean())
