"""SuNCEt's non-parametric inference against the paper's equation, one number at a time."""

import math

import numpy as np
import pytest
import torch

from fastsuncet.evaluation import npi as module
from fastsuncet.evaluation.npi import npi_probabilities
from tests.support.vectors import load_vectors


def slow_npi(queries, supports, labels, classes, temperature) -> list[list[float]]:
    """Compute p(c | z) of appendix G in Python's floats."""
    rows = []
    for z in queries.tolist():
        weights = []
        for s in supports.tolist():
            dot = math.fsum(a * b for a, b in zip(z, s))
            norms = math.sqrt(math.fsum(a * a for a in z)) * math.sqrt(math.fsum(b * b for b in s))
            weights.append(math.exp(dot / norms / temperature))
        total = math.fsum(weights)
        rows.append(
            [math.fsum(w for w, c in zip(weights, labels.tolist()) if c == k) / total for k in range(classes)]
        )
    return rows


@pytest.mark.parametrize("temperature", [0.1, 0.5, 0.02])
@pytest.mark.parametrize(("at_a_time", "summed"), [(1 << 26, 4096), (50, 4), (1, 1)])
def test_npi_probabilities_are_the_papers(temperature, at_a_time, summed, monkeypatch):
    monkeypatch.setattr(module, "SIMILARITIES_AT_A_TIME", at_a_time)
    monkeypatch.setattr(module, "SUPPORTS_SUMMED", summed)
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(7, 5, generator=generator) * 3
    supports = torch.randn(23, 5, generator=generator)
    labels = torch.randint(0, 6, (23,), generator=generator)
    labels[labels == 3] = 4  # a class without supports
    wanted = slow_npi(queries.double(), supports.double(), labels, 6, temperature)
    found = npi_probabilities(queries, supports, labels, 6, temperature)
    assert found.dtype == torch.float32 and (found[:, 3] == 0).all()
    # Float32 rounds a cosine near 1 by 1e-7, which the temperature 0.02 multiplies by 50.
    np.testing.assert_allclose(found.numpy(), wanted, rtol=2e-4, atol=1e-7)


def test_npi_probabilities_agree_with_the_authors_vectors():
    v = {name: torch.from_numpy(array) for name, array in load_vectors("vectors_npi").items()}
    found = npi_probabilities(v["query"], v["support"], v["support_labels"], 4, 0.1)
    torch.testing.assert_close(found, v["probs"], rtol=1e-4, atol=1e-6)
