"""SwAV's codes and swapped prediction against dense float64 equations and its authors' numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastsuncet import swav
from fastsuncet.losses.swav import prototype_scores, sinkhorn
from tests.support import dense_losses
from tests.support.dense_losses import gradient
from tests.support.vectors import load_vectors


def draw_scores(rows: int, prototypes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(rows, prototypes, dtype=torch.float64, generator=generator) - 1


@given(
    crops=st.integers(2, 6),
    images=st.integers(1, 9),
    prototypes=st.integers(1, 9),
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.05, 2),
    epsilon=st.floats(0.02, 1),
    iterations=st.integers(1, 5),
)
def test_swav_is_the_dense_equation(crops, images, prototypes, seed, temperature, epsilon, iterations):
    scores = draw_scores(crops * images, prototypes, seed)
    options = {"crops": crops, "epsilon": epsilon, "iterations": iterations}
    loss, grad = gradient(swav, scores, temperature, **options)
    true_loss, true_grad = gradient(dense_losses.swav, scores, temperature, **options)
    torch.testing.assert_close(loss, true_loss, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grad, true_grad, rtol=1e-9, atol=1e-9)


def test_swav_has_its_authors_numbers():
    arrays = load_vectors("vectors_swav")
    scores, size = torch.from_numpy(arrays["scores"]), int(arrays["bs"])
    epsilon, iterations = float(arrays["epsilon"]), int(arrays["iters"])
    for crop in (0, 1):
        codes = sinkhorn(scores[crop * size :][:size], epsilon, iterations)
        torch.testing.assert_close(codes, torch.from_numpy(arrays[f"q{crop}"]), rtol=1e-12, atol=1e-15)
    loss, grad = gradient(swav, scores, float(arrays["tau"]), crops=int(arrays["V"]))
    assert loss.item() == pytest.approx(float(arrays["loss"]), rel=1e-13)
    torch.testing.assert_close(grad, torch.from_numpy(arrays["grad_scores"]), rtol=1e-11, atol=1e-15)
    ours = prototype_scores(torch.from_numpy(arrays["emb"]), torch.from_numpy(arrays["prototypes"]))
    torch.testing.assert_close(ours, scores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 50, 60_000])
def test_sinkhorn_takes_scores_of_any_size(dtype, size):
    """exp(50 / 0.05) is e^1000, beyond float64."""
    scores = (draw_scores(20, 5, 0) * size).to(dtype)
    codes = sinkhorn(scores)
    assert codes.dtype == torch.float32 and codes.isfinite().all()
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(20))
    if size == 1:
        expected = dense_losses.sinkhorn(scores.double(), 0.05, 3)
        torch.testing.assert_close(codes.double(), expected, rtol=1e-4, atol=1e-6)
