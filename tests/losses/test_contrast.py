"""NT-Xent, SuNCEt and L_sup_out are the paper's equations: dense float64 autograd, the authors' numbers, edge cases.

Their memory grows with the batch, not with its square.
"""

import gc
import math
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastsuncet
from fastsuncet import nt_xent, suncet, sup_con
from fastsuncet.losses import contrast, contrast_kernel
from fastsuncet.losses.contrast import LOWEST_TEMPERATURE
from pipelines.cuda_compiler import KernelError
from tests.support import dense_losses
from tests.support.dense_losses import gradient, labeled_batch
from tests.support.host_kernels import on_the_host
from tests.support.vectors import load_vectors
from tools.bench.dispatch_counter import Counter

F32, F64 = torch.float32, torch.float64
LABELED = ("suncet", "sup_con")
EXECUTORS = ("symmetric", "chunked", "kernel")
every_loss = pytest.mark.parametrize("name", ["nt_xent", *LABELED])


def run(name, z, labels, temperature, module=fastsuncet, **options):
    """Return value and gradient of a loss; `labels` are not used by NT-Xent."""
    arguments = (temperature,) if name == "nt_xent" else (labels, temperature)
    return gradient(getattr(module, name), z, *arguments, **options)


def truth(name, z, labels, temperature, **options):
    return run(name, z.double(), labels, temperature, dense_losses, **options)


@contextmanager
def executed_by(executor, staged=contrast_kernel.STAGED):
    """Compute contrasts of one process by `executor`; the kernel's own source runs on the CPU, in float32."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        launched = None
        if executor != "symmetric":
            patch.setattr("fastsuncet.losses.contrast.LOWEST_TEMPERATURE", math.inf)
        if executor == "kernel":
            launched = stack.enter_context(on_the_host(contrast_kernel))
            patch.setattr(contrast, "row_pass_for", lambda example: contrast_kernel.row_pass)
            patch.setattr(contrast_kernel, "STAGED", staged)
        yield
        assert launched is None or set(launched) == {"contrast_rows"}


def assert_near(found, expected, near):
    """Compare value and gradient, each relative to its size."""
    for a, b in zip(found, expected):
        assert (a.double() - b.double()).norm() <= near * b.double().norm()


temperatures = st.floats(math.log(0.01), math.log(10)).map(math.exp)
batches = st.builds(
    lambda rows, width, classes, seed: (
        torch.randn(rows, width, dtype=F64, generator=(g := torch.Generator().manual_seed(seed))),
        torch.randint(-classes, classes, (rows,), generator=g),
    ),
    rows=st.integers(1, 24),
    width=st.integers(1, 9),
    classes=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)


def test_suncet_is_equation_2_anchor_by_anchor():
    """Also the dense oracle is."""
    z, labels = labeled_batch(rows=9, classes=3)
    temperature = 0.3
    per_anchor = []
    for i in range(9):
        cosines = [torch.cosine_similarity(z[i], z[j], dim=0).item() for j in range(9)]
        similar = [math.exp(cosine / temperature) for cosine in cosines]
        positives = [similar[j] for j in range(9) if j != i and labels[j] == labels[i]]
        others = [similar[j] for j in range(9) if j != i]
        if positives:
            per_anchor.append(-math.log(sum(positives) / sum(others)))
    expected = pytest.approx(sum(per_anchor) / len(per_anchor), rel=1e-13)
    assert suncet(z, labels, temperature).item() == expected
    assert dense_losses.suncet(z, labels, temperature).item() == expected


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
@given(
    batch=batches,
    temperature=temperatures,
    chunk_size=st.integers(1, 30),
    keys=st.sampled_from(["attached", "detached"]),
    average=st.sampled_from(["sample", "class"]),
    name=st.sampled_from(["nt_xent", *LABELED]),
    high=st.booleans(),
    staged=st.sampled_from([0, 7, 1000]),
)
def test_loss_is_the_dense_equation(
    executor, batch, temperature, chunk_size, keys, average, name, high, staged
):
    """By every executor; high labels differ only above their low 32 bits, or only where float64 rounds."""
    z, labels = batch
    labels = torch.where(labels % 2 == 0, labels + (1 << 62), labels // 3) if high else labels
    options = {"keys": keys}
    if name == "nt_xent":
        z = torch.cat([z, z.flip(0).roll(1, dims=1) + 0.1])
    else:
        options["average"] = average
    dtype, near = (F32, 3e-6 * (1 + 1 / temperature)) if executor == "kernel" else (F64, 1e-11)
    z = (z / z.norm(dim=1, keepdim=True)).to(dtype) if executor == "kernel" else z
    with executed_by(executor, staged):
        loss, grad = run(name, z, labels, temperature, chunk_size=chunk_size, **options)
    if name != "nt_xent" and len(set(labels.tolist())) == len(labels):
        assert loss.item() == 0 and not grad.any()
        return
    true_loss, true_grad = truth(name, z, labels, temperature, **options)
    torch.testing.assert_close(loss.double(), true_loss, rtol=near, atol=near)
    torch.testing.assert_close(grad.double(), true_grad, rtol=100 * near, atol=10 * near / temperature)


@every_loss
@pytest.mark.parametrize("executor", EXECUTORS)
def test_loss_in_float32_is_near_float64(executor, name):
    """Of more keys than the kernel's threads remember and than it stages, and of several chunks."""
    z, labels = labeled_batch(rows=640, width=128, classes=40, dtype=F32)
    with executed_by(executor, staged=100):
        found = run(name, z, labels, 0.1, chunk_size=400)
    assert found[0].dtype == found[1].dtype == F32
    assert_near(found, truth(name, z, labels, 0.1), 3e-6)


@pytest.mark.parametrize("name", ["nt_xent", "suncet"])
@pytest.mark.parametrize(
    "temperature", [LOWEST_TEMPERATURE / 1.0001, LOWEST_TEMPERATURE, LOWEST_TEMPERATURE * 1.0001]
)
def test_symmetric_sweep_is_precise_down_to_its_coldest(name, temperature):
    """At the coldest temperature, rows opposite to their positives still have exponentials e^-80."""
    z = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    z[:20, 0], z[20:, 0] = z[:20, 0].abs() + 9, -z[20:, 0].abs() - 9
    labels = torch.arange(40) % 20  # every positive is on the other side
    found = run(name, z, labels, temperature)
    assert found[0] > 70
    assert_near(found, truth(name, z, labels, temperature), 1e-5)


def authors(arrays, case):
    """Return the authors' value and gradient."""
    return torch.tensor(float(arrays[f"{case}_loss"]), dtype=F64), torch.from_numpy(arrays[f"{case}_grad"])


@pytest.mark.parametrize("temperature", ["0.1", "0.5"])
@pytest.mark.parametrize("precision", ["f64", "f32"])
@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("name", ["nt_xent", "suncet"])
def test_loss_has_the_authors_numbers(name, version, precision, temperature):
    """Version 0 is their first code (5245e4a), whose SuNCEt accumulates in float32 for any input."""
    arrays = load_vectors(f"vectors_losses_v{version}_w1")
    batch, case = ("zu", "ntxent_tau{}") if name == "nt_xent" else ("zs", "suncet_tau{}_sm0.0")
    case = f"rank0_{case.format(temperature)}_{precision}"
    z = torch.from_numpy(arrays[batch][0]).to(F64 if precision == "f64" else F32)
    labels = torch.from_numpy(arrays["labels_local"])
    exact = precision == "f64" and (name == "nt_xent" or version == 1)
    cases = [{"keys": ("attached", "detached")[version]}]
    if name == "suncet":
        cases = [{"average": "sample"}, {"average": "class"}]
    for options in cases:
        found = run(name, z, labels, float(temperature), **options)
        assert_near(found, authors(arrays, case), 1e-13 if exact else 3e-6)


def test_sup_con_has_its_authors_numbers():
    arrays = load_vectors("vectors_supcon")
    z, labels = torch.from_numpy(arrays["z"]), torch.from_numpy(arrays["y"])
    for temperature in ("0.1", "0.5"):
        expected = authors(arrays, f"supcon_HEAD_tau{temperature}_base{temperature}")
        assert_near(gradient(sup_con, z.float(), labels, float(temperature)), expected, 3e-6)
    formula = float(arrays["Lsupout_formula_selfexcluded_tau0.1"])
    assert sup_con(z, labels, 0.1).item() == pytest.approx(formula, rel=1e-13)
    # Their two-view layout is view 0 of all images, then view 1 of all.
    views = torch.from_numpy(np.concatenate([arrays["zview"][:, 0], arrays["zview"][:, 1]]))
    two_views = sup_con(views, torch.from_numpy(arrays["yview"]).repeat(2), 0.1)
    assert two_views.item() == pytest.approx(float(arrays["supcon_2view_HEAD_tau0.1_loss"]), rel=3e-6)


@pytest.mark.filterwarnings("error")
def test_labels_of_every_integer_dtype_are_equal():
    z, labels = labeled_batch()
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        assert torch.equal(suncet(z, labels.to(dtype), 0.1), suncet(z, labels, 0.1))
    strided = torch.stack([labels, labels], dim=1)[:, 0]  # torch.searchsorted would warn
    assert torch.equal(suncet(z, strided, 0.1), suncet(z, labels, 0.1))


@pytest.mark.parametrize("temperature", [0.001, 0.01, 10.0, 1e4])
@pytest.mark.parametrize("name", ["nt_xent", "suncet"])
def test_opposite_rows_are_finite_at_any_temperature(name, temperature):
    """At 0.001 the positives' exponentials are e^-2000 of the largest."""
    z = torch.tensor([[1.0, 0.0], [1.0, 1e-3], [-1.0, 0.0], [-1.0, 1e-3]])
    loss, grad = run(name, z, torch.tensor([0, 1, 0, 1]), temperature)
    expected = 2 / temperature + math.log1p(2 * math.exp(-2 / temperature))
    assert loss.item() == pytest.approx(expected, rel=1e-3)
    assert grad.isfinite().all()


@every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
def test_largest_numbers_and_zeros_stay_finite(name, dtype):
    z, labels = labeled_batch(rows=16, width=8, classes=4)
    z = z.clamp(-1, 1).to(dtype)
    z[:4] *= torch.finfo(dtype).max
    z[4:6] = 0
    value, grad = run(name, z, labels, 0.1)
    assert value.isfinite() and grad.isfinite().all()
    assert value.dtype == (F64 if dtype == F64 else F32) and grad.dtype == dtype
    assert not grad[4:6].any() and grad[6:].any()  # a zero row has no direction and gets no gradient


def test_second_derivative_is_refused():
    z, _ = labeled_batch()
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(nt_xent(z.requires_grad_(), 0.1), z, create_graph=True)


def test_kernel_shows_a_nan_in_the_loss():
    logits = torch.zeros(2, 6)
    logits[0, 4] = torch.nan
    with on_the_host(contrast_kernel):
        values, _ = contrast_kernel.row_pass(torch.arange(6) % 3, False)(logits, 0, torch.ones(2))
    assert values.isnan().tolist() == [True, False]


def test_kernels_proof_fails_when_kernel_and_twin_differ(monkeypatch):
    monkeypatch.setattr(contrast_kernel, "STAGED", 40)
    here = torch.device("cpu")
    with on_the_host(contrast_kernel):
        contrast_kernel.prove(here, contrast.row_pass)
        with pytest.raises(KernelError, match="contrastive"):
            contrast_kernel.prove(here, lambda ids, every: contrast.row_pass(ids, not every))


def step_of(loss, rows: int) -> tuple[Counter, float, float]:
    """Return what a step used, and how many times the bytes of its rows live between its passes and after them."""
    z = torch.randn(rows, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    arguments = () if loss is nt_xent else (torch.arange(rows) % (rows // 8),)
    gc.collect()
    with Counter() as live:
        value = loss(z, *arguments, 0.1)
        between = live.now
        value.backward()
        del value
    return live, between / z.nbytes, live.now / z.nbytes


@pytest.mark.slow
def test_memory_grows_linearly_holds_no_matrix_of_all_pairs_and_is_freed():
    assert step_of(dense_losses.suncet, 512)[0].largest == 512**2  # the counter would see it
    for loss in (suncet, nt_xent, sup_con):
        (half, *_), (whole, between, after) = (step_of(loss, rows) for rows in (512, 1024))
        assert whole.peak < 10e6 and whole.largest <= 256 * 1024
        assert math.log2(whole.peak / half.peak) < 1.05  # 1 is linear, 2 is the dense matrix
        # Both gradients and what the normalization saved: no chunk outlives the sweep.
        assert between < 5 and after == 1
