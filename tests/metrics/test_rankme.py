"""RankMe against its definition, and what must hold for any embeddings."""

import math

import numpy as np
import pytest
import torch

from fastsuncet.metrics.rankme import COLLAPSED, collapse_warning, rankme

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def definition(rows: torch.Tensor) -> float:
    """The equation of the paper's section 3, by a singular value decomposition."""
    s = np.linalg.svd(rows.numpy(), compute_uv=False)
    p = s / s.sum() + 1e-7
    return math.exp(-(p * np.log(p)).sum())


DECAYING = random(300, 24) * torch.logspace(0, -6, 24, dtype=torch.float64)


@pytest.mark.parametrize(
    "rows",
    [random(60, 16), random(7, 16), random(5000, 3) + 4, DECAYING, 1e-6 * random(9, 4), 1e6 * random(9, 4)],
)
def test_rankme_is_the_papers_equation(rows):
    assert rankme(rows, len(rows)) == pytest.approx(definition(rows), rel=1e-6)
    assert rankme(rows.float(), len(rows)) == pytest.approx(definition(rows), rel=1e-4)


def test_rankme_of_zeros_is_one_and_of_nan_is_nan():
    assert rankme(torch.zeros(64, 32), 64) == pytest.approx(
        1, abs=1e-4
    )  # the paper's epsilon adds 1.6e-6 each
    assert math.isnan(rankme(torch.full((4, 2), torch.nan), 4))


def test_collapse_warning_names_what_collapsed():
    healthy = {"knn_accuracy": 0.5, "rankme": COLLAPSED, "rankme_features": 40.0}
    assert collapse_warning(healthy) is None
    warning = collapse_warning({**healthy, "rankme": 1.02})
    assert warning is not None and "rankme 1.02 (embeddings z), below 2" in warning
    assert "rankme_features" not in warning
