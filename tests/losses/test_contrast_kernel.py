"""contrast.cu, built for the CPU with a real thread for each of CUDA's, against the formula in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastsuncet import losses
from fastsuncet.losses import contrast, contrast_kernel
from pipelines.cuda_compiler import KernelError
from tests.support import dense_losses
from tests.support.dense_losses import gradient
from tests.support.host_kernels import on_the_host


@pytest.fixture(autouse=True, scope="module")
def host():
    with on_the_host(contrast_kernel) as launched:
        yield launched


def relative(found, expected):
    """Return the error over the largest expected value; 0 where both are all zero."""
    scale = expected.double().abs().max().clamp(min=1e-30)
    return ((found.double() - expected.double()).abs().max() / scale).item()


def rows_in_float64(logits, ids, first, weights, every_positive):
    """Return L_i, 0 for a row that is left out, and w_i dL_i/dl_ij by autograd."""
    logits = logits.double().requires_grad_()
    values = []
    for i, w in enumerate(weights.double()):
        positive = ids == ids[first + i]
        positive[first + i] = False
        others = torch.arange(len(ids)) != first + i
        if w == 0 or not positive.any():
            values.append(0 * w)
            continue
        level = logits[i][positive].mean() if every_positive else logits[i][positive].logsumexp(0)
        values.append(logits[i][others].logsumexp(0) - level)
    values = torch.stack(values)
    slope = torch.autograd.grad(weights.double() @ values + 0 * logits.sum(), logits)[0]
    return values.detach(), slope


def run_kernel(logits, ids, first, weights, every_positive, staged):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contrast_kernel, "STAGED", staged)
        return contrast_kernel.row_pass(ids, every_positive)(logits.clone(), first, weights)


@pytest.mark.slow
@given(
    keys=st.integers(1, 90),
    classes=st.integers(1, 30),
    every_positive=st.booleans(),
    height=st.sampled_from([1.0, 20.0, 1000.0]),  # 1 / temperature; at 1000 most exponentials are 0 or 1
    staged=st.sampled_from([0, 7, 1000]),
    seed=st.integers(0, 2**32 - 1),
)
def test_row_pass_is_the_formula(keys, classes, every_positive, height, staged, seed):
    generator = torch.Generator().manual_seed(seed)
    anchors = int(torch.randint(1, min(keys, 5) + 1, (), generator=generator))
    first = int(torch.randint(0, keys - anchors + 1, (), generator=generator))
    # Ids that differ only above their low 32 bits, and a row left out by its weight.
    ids = torch.randint(-classes, classes, (keys,), generator=generator)
    ids = torch.where(torch.rand(keys, generator=generator) < 0.2, ids + (1 << 32), ids)
    ids = torch.stack([ids, -ids], 1)[:, 0]  # not contiguous
    weights = torch.rand(anchors, generator=generator) * (torch.rand(anchors, generator=generator) < 0.8)
    logits = (torch.rand(anchors, keys, generator=generator) * 2 - 1) * height
    value, slope = rows_in_float64(logits, ids, first, weights, every_positive)
    found, d_logits = run_kernel(logits, ids, first, weights, every_positive, staged)
    torch.testing.assert_close(found.double(), value, rtol=2e-6, atol=2e-6 * height)
    torch.testing.assert_close(d_logits.double(), slope, rtol=2e-6 * height + 2e-6, atol=1e-7 + 1e-7 * height)


@pytest.mark.parametrize("every_positive", [False, True])
@pytest.mark.parametrize("staged", [600, 100])
def test_row_pass_of_a_long_row_is_the_formula(every_positive, staged):
    """A thread remembers 64 keys, 512 for 8 threads; beyond them it reads the ids again."""
    generator = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(2, 700, generator=generator) * 5, torch.arange(700) % 50
    case = (logits, ids, 100, torch.tensor([0.5, 2.0]), every_positive)
    (value, slope), (found, d_logits) = rows_in_float64(*case), run_kernel(*case, staged)
    assert relative(found, value) < 3e-6 and relative(d_logits, slope) < 3e-6


def test_row_pass_shows_a_nan_in_the_loss():
    logits = torch.zeros(2, 6)
    logits[0, 4] = torch.nan
    values, _ = contrast_kernel.row_pass(torch.arange(6) % 3, False)(logits, 0, torch.ones(2))
    assert values.isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("name", "keys"),
    [("nt_xent", "detached"), ("suncet", "detached"), ("sup_con", "attached"), ("sup_con", "detached")],
)
def test_whole_loss_by_the_kernel_is_the_dense_equation(name, keys, host, monkeypatch):
    """The attached losses of a single process use the symmetric sweep on a CPU."""
    monkeypatch.setattr(contrast_kernel, "runs_on", lambda example, twin: True)
    z = torch.randn(26, 5, generator=torch.Generator().manual_seed(1))
    arguments = () if name == "nt_xent" else (torch.arange(26) % 9,)
    options = {"keys": keys, "temperature": 0.1}
    host.clear()
    found = gradient(getattr(losses, name), z, *arguments, **options, chunk_size=7)
    expected = gradient(getattr(dense_losses, name), z.double(), *arguments, **options)
    assert relative(found[0], expected[0]) < 3e-6 and relative(found[1], expected[1]) < 1e-5
    assert set(host) == {"contrast_rows"}


def test_contrast_proof_fails_when_kernel_and_twin_differ(monkeypatch):
    monkeypatch.setattr(contrast_kernel, "STAGED", 40)
    here = torch.device("cpu")
    contrast_kernel.prove(here, contrast.row_pass)
    with pytest.raises(KernelError, match="contrastive"):
        contrast_kernel.prove(here, lambda ids, every: contrast.row_pass(ids, not every))
