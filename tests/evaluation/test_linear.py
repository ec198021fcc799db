"""The linear classifier against scikit-learn's, and its convergence."""

import numpy as np
import pytest
import torch

from fastsuncet.evaluation import linear as module
from fastsuncet.evaluation.calibration import folds
from fastsuncet.evaluation.linear import STRENGTHS, choose_strength, fit_linear


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("strength", "classes", "n", "width"),
    [(0.01, 3, 80, 6), (1.0, 5, 80, 6), (30.0, 3, 80, 6), (1.0, 4, 40, 128)],
)
def test_fit_linear_agrees_with_scikit_learn(strength, classes, n, width, monkeypatch):
    """In pieces, as data of any size. 40 x 128 is separable: only the penalty bounds its weights."""
    sklearn = pytest.importorskip("sklearn.linear_model")
    monkeypatch.setattr(module, "ROWS", 16)
    scale = torch.tensor([1, 10, 0.1, *[1] * (width - 4), 0])
    features, labels = drawn(n, width) * scale + 3, torch.arange(n) % classes
    features[:, 0] += labels
    fit = fit_linear(features, labels, classes, strength=strength)
    assert fit.converged and fit.iterations > 3 and fit.weight.dtype == torch.float64
    x = features.double().numpy()
    standard = (x - x.mean(0)) / (x.std(0) + 1e-6)
    oracle = sklearn.LogisticRegression(C=strength, tol=1e-8, max_iter=10_000).fit(standard, labels.numpy())
    np.testing.assert_allclose(fit.weight.numpy() * (x.std(0) + 1e-6), oracle.coef_, atol=2e-3)
    queries = drawn(40, width, seed=9) * 2 + 3
    theirs = oracle.predict_proba((queries.double().numpy() - x.mean(0)) / (x.std(0) + 1e-6))
    np.testing.assert_allclose(fit.scores(queries).softmax(1), theirs, atol=1e-3)


@pytest.mark.parametrize(("few", "expected"), [(module.FEW_NUMBERS, {1}), (0, {2})])
def test_fit_linear_of_few_labels_takes_one_thread(monkeypatch, few, expected):
    used, matmul, before = set(), module.F.linear, torch.get_num_threads()
    monkeypatch.setattr(module, "FEW_NUMBERS", few)
    monkeypatch.setattr(module.F, "linear", lambda *x: used.add(torch.get_num_threads()) or matmul(*x))
    torch.set_num_threads(2)
    fit_linear(drawn(60, 8), torch.arange(60) % 3, 3)
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert (used, after) == (expected, 2)


def test_choose_strength_agrees_with_scikit_learn():
    """The oracle's temperature is fitted by scipy to the left-out labels and one image that is of each class alike."""
    pytest.importorskip("sklearn")
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import PredefinedSplit, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    n = 203
    labels = torch.arange(n) % 5
    features = drawn(n, 30) * 6 + 5 * torch.eye(30)[labels]
    given = (features.numpy(), labels.numpy())
    targets = (n * np.eye(5)[labels] + 1 / 5) / (n + 1)

    def loss(strength):
        pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=10_000, tol=1e-6))
        options = {"cv": PredefinedSplit(folds(labels).numpy()), "method": "decision_function"}
        logits = cross_val_predict(pipeline, *given, **options)
        tempered = lambda power: -(targets * log_softmax(np.exp(power) * logits, axis=1)).sum(1).mean()  # noqa: E731
        return minimize_scalar(tempered, bounds=(-12, 12), method="bounded").fun

    best = min(STRENGTHS, key=loss)
    assert STRENGTHS[0] < best < STRENGTHS[-1]
    assert choose_strength(features, labels, 5)[0] == best


def test_choose_strength_of_many_or_few_labels(monkeypatch):
    labels = torch.arange(30) % 5
    features = drawn(30, 5) + 5 * torch.eye(5)[labels]
    monkeypatch.setattr(module, "MANY", 29)
    monkeypatch.setattr(module, "STRENGTHS", (1e-5, 0.1))
    assert choose_strength(features, labels, 5) == (0.1, "by cross-validation from 1e-05 to 0.1")
    for few in (1, 3, 5):  # no fold can tell
        why = "because no class has two labels to cross-validate by"
        assert choose_strength(features[:few], labels[:few], 5) == (1, why)
    strength, why = choose_strength(0 * features, labels, 5)
    assert strength == 1 and why.endswith("better in cross-validation than a guess of the largest class")


def test_choose_strength_is_shared_by_ranks(monkeypatch):
    """A rank that fitted all would keep the others waiting beyond the time limit of a collective."""
    features, labels = drawn(60, 6), torch.arange(60) % 3
    features[:, 0] += labels
    (alone, _), fit = choose_strength(features, labels, 3), fit_linear
    fitted, parts, shown = [], [], []
    noted = lambda *x, strength, **o: fitted.append(strength) or fit(*x, strength=strength, **o)  # noqa: E731
    monkeypatch.setattr(module, "fit_linear", noted)
    monkeypatch.setattr(module, "sum_over_ranks", lambda right: parts.append(right) or right)
    monkeypatch.setattr(module, "world_size", lambda: 3)
    monkeypatch.setattr(module, "show_progress", lambda what, done, total: shown.append((done, total)))
    for number in range(3):
        monkeypatch.setattr(module, "rank", lambda number=number: number)
        choose_strength(features, labels, 3)
        assert set(fitted) == set(STRENGTHS[number::3])
        fitted.clear()
    assert shown == [(3, 8), (6, 8), (8, 8)]
    losses, _ = sum(parts)
    assert STRENGTHS[int(losses.argmin())] == alone
