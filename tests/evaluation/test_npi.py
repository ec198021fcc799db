"""SuNCEt's non-parametric inference against the paper's equation."""

import pytest
import torch

from fastsuncet.evaluation import npi as module
from fastsuncet.evaluation.npi import npi_probabilities
from tests.support.vectors import load_vectors


def dense_npi(queries, supports, labels, classes, temperature) -> torch.Tensor:
    """Compute p(c | z) of appendix G in float64, of all pairs at once."""
    z, s = (rows.double() / rows.double().norm(dim=1, keepdim=True) for rows in (queries, supports))
    weights = (z @ s.T / temperature).exp()
    of_class = labels[:, None] == torch.arange(classes)
    return weights @ of_class.double() / weights.sum(1, keepdim=True)


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
    wanted = dense_npi(queries, supports, labels, 6, temperature)
    found = npi_probabilities(queries, supports, labels, 6, temperature)
    assert found.dtype == torch.float32 and (found[:, 3] == 0).all()
    # Float32 rounds a cosine near 1 by 1e-7, which the temperature 0.02 multiplies by 50.
    torch.testing.assert_close(found.double(), wanted, rtol=2e-4, atol=1e-7)


def test_npi_probabilities_agree_with_the_authors_vectors():
    v = {name: torch.from_numpy(array) for name, array in load_vectors("vectors_npi").items()}
    found = npi_probabilities(v["query"], v["support"], v["support_labels"], 4, 0.1)
    torch.testing.assert_close(found, v["probs"], rtol=1e-4, atol=1e-6)
