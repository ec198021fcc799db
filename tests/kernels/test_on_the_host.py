"""The kernels' sources, run on a CPU with a real thread for each of theirs, say what their twins say in float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsuncet import losses
from fastsuncet.kernels.launcher import KernelError
from fastsuncet.losses import contrast, contrast_kernel
from fastsuncet.models import fused_batchnorm as norm_kernels
from fastsuncet.optim import LARS, lars_kernel, parameter_groups
from fastsuncet.optim.lars_reference import lars_reference
from pipelines import cuda_compiler as nvrtc
from tests.support import dense_losses
from tests.support.dense_losses import gradient
from tests.support.host_kernels import SIZES, library, on_the_host
from tests.support.networks import give_gradients, tiny_network

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def host():
    with on_the_host(lars_kernel, contrast_kernel, norm_kernels) as launched:
        yield launched


def relative(found, expected):
    """Error over the largest of what was expected; 0 where both are all zero."""
    scale = expected.double().abs().max().clamp(min=1e-30)
    return ((found.double() - expected.double()).abs().max() / scale).item()


# LARS

rules = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 0.5]) | st.floats(1e-3, 10),
        "momentum": st.sampled_from([0.0, 0.9]),
        "weight_decay": st.sampled_from([0.0, 1e-6, 1e-2]),
        "nesterov": st.booleans(),
        "lr_in_momentum": st.booleans(),
        "lars": st.booleans(),
        "trust_coefficient": st.just(0.001),
        "eps": st.sampled_from([0.0, 1e-8]),
    }
)
# Sizes around a chunk of 32 and a vector of four; the start in memory, which may not be a multiple of 16 bytes; and
# which of weight and gradient is zero.
tensors = st.lists(
    st.tuples(st.integers(1, 70), st.integers(0, 3), st.sampled_from(["", "", "w", "g", "wg"])),
    min_size=1,
    max_size=2 * SIZES["TENSORS"] + 1,
)


@settings(max_examples=25, deadline=None)
@given(tensors, rules, st.booleans(), st.sampled_from([None, 8.0, 65536.0]), st.integers(0, 2**32 - 1))
def test_lars_follows_the_formula_over_ragged_misaligned_and_zero_tensors(
    shapes, rule, on_device, scale, seed
):
    generator = torch.Generator().manual_seed(seed)

    def draw(size, start, zero):
        x = torch.zeros(size + start) if zero else torch.randn(size + start, generator=generator)
        return x[start:]

    params = [draw(size, start, "w" in zero) for size, start, zero in shapes]
    buffers = [torch.zeros_like(p) for p in params]
    truth = [p.double() for p in params], [b.double() for b in buffers]
    lr = torch.tensor(rule.pop("lr"))
    scaling = {"grad_scale": None if scale is None else torch.tensor(scale)}
    for _ in range(2):
        before = [[x.clone() for x in tensors] for tensors in truth]  # what a sum that cancels was made of
        grads = [draw(size, 3 - start, "g" in zero) * (scale or 1) for size, start, zero in shapes]
        lars_kernel.lars_kernel(
            params, grads, buffers, lr=lr if on_device else lr.item(), **rule, **scaling, found_inf=None
        )
        lars_reference(
            truth[0], [g.double() for g in grads], truth[1], lr=lr.item(), **rule, **scaling, found_inf=None
        )
    for found, expected, parts in ((params, truth[0], before[0]), (buffers, truth[1], before[1])):
        for x, y, part in zip(found, expected, parts):
            assert (x.double() - y).abs().max() <= 2e-6 * max(y.abs().max(), part.abs().max())


def test_lars_is_two_launches_and_one_more_for_the_plain_group(host):
    network = tiny_network(memory_format=torch.channels_last)
    optimizers = {}
    for exclude in (False, True):
        groups = parameter_groups(network, exclude_bias_and_norm=exclude)
        optimizers[exclude] = LARS(groups, 0.1, implementation="kernel")
    give_gradients(network, 0)
    host.clear()
    optimizers[True].step()
    assert host == ["lars_norms", "lars_update", "lars_update"]
    optimizers[False].step()
    assert host[3:] == ["lars_norms", "lars_update"] * 2  # 8 tensors, 6 a launch


def test_lars_steps_a_channels_last_network_as_foreach_does_and_in_the_same_bits_again():
    networks = {}
    for run in ("foreach", "kernel", "kernel again"):
        network = networks[run] = tiny_network(memory_format=torch.channels_last)
        groups = parameter_groups(network, exclude_bias_and_norm=True)
        optimizer = LARS(groups, torch.tensor(0.2), weight_decay=1e-2, implementation=run.split()[0])
        for seed in range(3):
            give_gradients(network, seed)
            optimizer.step()
    for a, b, c in zip(*(network.parameters() for network in networks.values())):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        assert torch.equal(b, c)


def test_lars_leaves_everything_as_it_is_after_an_overflow():
    network = tiny_network()
    optimizer = LARS(network.parameters(), 0.1, implementation="kernel")
    give_gradients(network, 0)
    network[0].weight.grad.fill_(torch.inf)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
    before = [p.clone() for p in network.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters()))
    assert not any(optimizer.state[p]["momentum_buffer"].any() for p in network.parameters())
    optimizer.found_inf.zero_()
    optimizer.step()
    assert not network[0].weight.isfinite().any()  # and without the flag the infinity is seen


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: p.double(), "float64"),
        (lambda p: p[:, ::2], "another order"),
        (lambda p: p.to(memory_format=torch.channels_last), "another order"),
    ],
)
def test_lars_refuses_tensors_it_would_misread(change, told):
    p = torch.randn(4, 6, 3, 3)
    changed = change(p)
    shaped = p[:, : changed.shape[1]].contiguous()
    rule = {"momentum": 0.9, "weight_decay": 0.0, "trust_coefficient": 1e-3, "eps": 0.0, "nesterov": False}
    rule |= {"lr_in_momentum": False, "lars": True, "grad_scale": None, "found_inf": None}
    with pytest.raises(KernelError, match=told):
        lars_kernel.lars_kernel([shaped], [changed], [torch.zeros_like(shaped)], lr=0.1, **rule)
    with pytest.raises(KernelError, match="a setting is torch"):
        lars_kernel.lars_kernel([shaped], [shaped], [shaped], lr=torch.tensor(0.1).double(), **rule)


def test_auto_takes_the_kernel_where_it_may_and_its_twin_for_what_it_cannot(host, monkeypatch):
    monkeypatch.setattr(lars_kernel, "usable", lambda source, example, prove: example.is_cpu)
    for dtype, launched in ((torch.float32, 2), (torch.float64, 0)):
        network = tiny_network(dtype)
        optimizer = LARS([network[0].weight], 0.1)
        give_gradients(network, 0)
        before = network[0].weight.clone()
        host.clear()
        optimizer.step()
        assert len(host) == launched and not torch.equal(before, network[0].weight)


def test_a_1x1_convolution_is_dense_in_either_layout_and_every_second_column_in_none():
    gaps = torch.zeros(3, 4)[:, ::2]
    assert "not dense" in lars_kernel.why_not([gaps], [gaps], [gaps])
    p = torch.randn(4, 6, 1, 1).to(memory_format=torch.channels_last)
    g = torch.randn(4, 6, 1, 1)
    assert p.stride() != g.stride() and lars_kernel.why_not([p], [g], [torch.zeros_like(g)]) is None


# The middle of a contrastive loss


def rows_in_float64(logits, ids, first, weights, every):
    """L_i, or 0 for a row that is left out, and w_i dL_i/dl_ij by autograd."""
    logits = logits.double().requires_grad_()
    losses = []
    for i, w in enumerate(weights.double()):
        positive = ids == ids[first + i]
        positive[first + i] = False
        others = torch.arange(len(ids)) != first + i
        if w == 0 or not positive.any():
            losses.append(0 * w)
            continue
        level = logits[i][positive].mean() if every else logits[i][positive].logsumexp(0)
        losses.append(logits[i][others].logsumexp(0) - level)
    losses = torch.stack(losses)
    gradient = torch.autograd.grad(weights.double() @ losses + 0 * logits.sum(), logits)[0]
    return losses.detach(), gradient


@settings(max_examples=60, deadline=None)
@given(
    keys=st.integers(1, 90),
    classes=st.integers(1, 30),
    every=st.booleans(),
    height=st.sampled_from(
        [1.0, 20.0, 1000.0]
    ),  # 1 / temperature; at 1000 an exponential is 0 or 1 or a sum of ones
    staged=st.sampled_from([0, 7, 1000]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_row_pass_is_the_formula_for_any_row(keys, classes, every, height, staged, seed):
    generator = torch.Generator().manual_seed(seed)
    anchors = int(torch.randint(1, min(keys, 5) + 1, (), generator=generator))
    first = int(torch.randint(0, keys - anchors + 1, (), generator=generator))
    # Ids that differ only above their low 32 bits, and a row left out by its weight.
    ids = torch.randint(-classes, classes, (keys,), generator=generator)
    ids = torch.where(torch.rand(keys, generator=generator) < 0.2, ids + (1 << 32), ids)
    weights = torch.rand(anchors, generator=generator) * (torch.rand(anchors, generator=generator) < 0.8)
    logits = (torch.rand(anchors, keys, generator=generator) * 2 - 1) * height
    value, slope = rows_in_float64(logits, ids, first, weights, every)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contrast_kernel, "STAGED", staged)
        found, d_logits = contrast_kernel.row_pass(ids, every)(logits.clone(), first, weights)
    torch.testing.assert_close(found.double(), value, rtol=2e-6, atol=2e-6 * height)
    torch.testing.assert_close(d_logits.double(), slope, rtol=2e-6 * height + 2e-6, atol=1e-7 + 1e-7 * height)


def test_a_long_row_is_the_formula_where_a_thread_forgets_which_keys_are_positive():
    """64 keys of 8 threads are 512: from there on ids are read again."""
    generator = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(2, 700, generator=generator) * 5, torch.arange(700) % 50
    weights = torch.tensor([0.5, 2.0])
    for every in (False, True):
        value, slope = rows_in_float64(logits, ids, 100, weights, every)
        for staged in (600, 100):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(contrast_kernel, "STAGED", staged)
                found, d_logits = contrast_kernel.row_pass(ids, every)(logits.clone(), 100, weights)
            assert relative(found, value) < 1e-6 and relative(d_logits, slope) < 1e-6


def test_a_logit_that_is_no_number_shows_in_the_loss():
    logits = torch.zeros(2, 6)
    logits[0, 4] = torch.nan
    losses, _ = contrast_kernel.row_pass(torch.arange(6) % 3, False)(logits, 0, torch.ones(2))
    assert losses.isnan().tolist() == [True, False]


@pytest.mark.parametrize("loss", ["nt_xent", "suncet", "sup_con"])
def test_a_whole_loss_swept_by_the_kernel_is_the_dense_equation(loss, host, monkeypatch):
    monkeypatch.setattr(contrast_kernel, "runs_on", lambda example, twin: True)
    z = torch.randn(26, 5, generator=torch.Generator().manual_seed(1))
    arguments = () if loss == "nt_xent" else (torch.arange(26) % 9,)
    host.clear()
    for keys in (
        ("attached", "detached") if loss == "sup_con" else ("detached",)
    ):  # one alone sweeps pairs on a CPU
        setting = {"keys": keys, "temperature": 0.1}
        found = gradient(getattr(losses, loss), z, *arguments, **setting, chunk_size=7)
        expected = gradient(getattr(dense_losses, loss), z.double(), *arguments, **setting)
        assert relative(found[0], expected[0]) < 1e-6 and relative(found[1], expected[1]) < 1e-5
    assert set(host) == {"contrast_rows"}


def test_the_kernels_would_notice_if_a_twin_and_they_disagreed():
    """What a run on a card asks first. Here it passes, and fails as soon as either side is wrong."""
    here = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contrast_kernel, "STAGED", 40)
        contrast_kernel.prove(here, contrast.row_pass)
        with pytest.raises(KernelError, match="contrastive"):
            contrast_kernel.prove(here, lambda ids, every: contrast.row_pass(ids, not every))
    lars_kernel.prove(here)
    norm_kernels.prove(here)
    for caller, holder, twin in (
        (lars_kernel, lars_kernel, "lars_foreach"),
        (norm_kernels, norm_kernels.F, "relu"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holder, twin, lambda x, *_, **__: x)
            with pytest.raises(KernelError, match="differs from its twin"):
                caller.prove(here)


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no NVRTC: {nvrtc.unavailable()}")
def test_every_kernel_agrees_with_its_twin_through_nvidias_own_bindings_and_a_driver_without_a_card(tmp_path):
    (tmp_path / "libcuda.so.1").symlink_to(library())
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.host_driver"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # On another stream than torch's the driver refuses, and that is said.
    assert done.stdout.startswith("lars_norms of lars.cu, grid (7, 1), block 8: CUDA_ERROR_INVALID_VALUE"), (
        done.stdout
    )
