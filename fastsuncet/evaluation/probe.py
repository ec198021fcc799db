"""A linear classifier on frozen representations: the quickest honest question about a checkpoint.

Scikit-learn's logistic regression, not ours: it converges the same way everywhere and nobody has to tune it.
"""

import warnings

import numpy as np

from pipelines.data_errors import DataError


def linear_probe(
    supports: np.ndarray,  # (N, E) float - representations of the labeled images
    labels: np.ndarray,  # (N,) int64
    queries: np.ndarray,  # (Q, E) float - representations of the images to classify
    truth: np.ndarray,  # (Q,) int64
    *,
    strength: float = 1.0,  # inverse of the L2 penalty, scikit-learn's C
) -> float:
    """Share of the queries that a classifier fitted to the supports gets right, 0 to 1.

    Features are standardised by the supports' own mean and spread. Deterministic. Raises DataError where scikit-learn
    is missing.
    """
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise DataError('the linear probe needs scikit-learn: pip install "fastsuncet[demo]"') from error
    mean, spread = supports.mean(0), supports.std(0) + 1e-6
    classifier = LogisticRegression(C=strength, max_iter=2000)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)  # a classifier that is not fitted measures nothing
        classifier.fit((supports - mean) / spread, labels)
    return float((classifier.predict((queries - mean) / spread) == truth).mean())
