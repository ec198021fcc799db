"""lars.cu, built for the CPU with a real thread for each of CUDA's, against the formula and against foreach."""

from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastsuncet.optim import LARS, LARSSettings, lars, lars_kernel, parameter_groups
from fastsuncet.optim.lars_reference import lars_reference
from pipelines.cuda_compiler import KernelError
from tests.support.host_kernels import SIZES, on_the_host
from tests.support.networks import give_gradients, tiny_network


@pytest.fixture(autouse=True, scope="module")
def host():
    with on_the_host(lars_kernel) as launched:
        yield launched


# Sizes around a chunk of 32 and a vector of four; the start in memory, which need not be a multiple of 16 bytes;
# and which of weight and gradient is zero.
tensors = st.lists(
    st.tuples(st.integers(1, 70), st.integers(0, 3), st.sampled_from(["", "", "w", "g", "wg"])),
    min_size=1,
    max_size=2 * SIZES["TENSORS"] + 1,
)
settings = st.sampled_from([0.0, 0.9]).flatmap(
    lambda momentum: st.builds(
        LARSSettings,
        momentum=st.just(momentum),
        weight_decay=st.sampled_from([0.0, 1e-6, 1e-2]),
        nesterov=st.booleans() if momentum else st.just(False),
        lr_in_momentum=st.booleans(),
        lars=st.booleans(),
        trust_coefficient=st.sampled_from([0.001, 1]),
        eps=st.sampled_from([0.0, 1e-8]),
    )
)


@given(
    shapes=tensors,
    lr=st.sampled_from([0.0, 0.5]) | st.floats(1e-3, 10),
    settings=settings,
    on_device=st.booleans(),
    scale=st.sampled_from([None, 8.0, 65536.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_lars_kernel_follows_the_formula(shapes, lr, settings, on_device, scale, seed):
    """Over ragged, misaligned and zero tensors."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size, start, zero):
        x = torch.zeros(size + start) if zero else torch.randn(size + start, generator=generator)
        return x[start:]

    params = [draw(size, start, "w" in zero) for size, start, zero in shapes]
    buffers = [torch.zeros_like(p) for p in params]
    truth = [p.double() for p in params], [b.double() for b in buffers]
    rate = torch.tensor(lr)
    grad_scale = None if scale is None else torch.tensor(scale)
    for _ in range(2):
        before = [[x.clone() for x in tensors] for tensors in truth]
        grads = [draw(size, 3 - start, "g" in zero) * (scale or 1) for size, start, zero in shapes]
        given_rate = rate if on_device else rate.item()
        lars_kernel.lars_kernel(params, grads, buffers, given_rate, settings, grad_scale)
        lars_reference(truth[0], [g.double() for g in grads], truth[1], rate.item(), settings, grad_scale)
    for found, expected, parts in ((params, truth[0], before[0]), (buffers, truth[1], before[1])):
        for x, y, part in zip(found, expected, parts):
            # Relative to the summands: the sum can cancel.
            assert (x.double() - y).abs().max() <= 2e-6 * max(y.abs().max(), part.abs().max())


def test_lars_kernel_is_two_launches_and_one_for_a_plain_group(host):
    network = tiny_network(memory_format=torch.channels_last)
    for exclude, launches in ((True, 1), (False, 2)):
        groups = parameter_groups(network, exclude_bias_and_norm=exclude)
        optimizer = LARS(groups, 0.1, implementation="kernel")
        give_gradients(network, 0)
        host.clear()
        optimizer.step()
        # Without exclusion there are 8 tensors, and 6 fit a launch.
        expected = ["lars_norms", "lars_update"] * launches
        assert host == expected + (["lars_update"] if exclude else [])


def test_lars_kernel_equals_foreach_and_repeats_its_bits():
    networks = {}
    for run in ("foreach", "kernel", "kernel again"):
        network = networks[run] = tiny_network(memory_format=torch.channels_last)
        groups = parameter_groups(network, exclude_bias_and_norm=True)
        settings = LARSSettings(weight_decay=1e-2)
        optimizer = LARS(groups, torch.tensor(0.2), **asdict(settings), implementation=run.split()[0])
        for seed in range(3):
            give_gradients(network, seed)
            optimizer.step()
    for a, b, c in zip(*(network.parameters() for network in networks.values())):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        assert torch.equal(b, c)


def test_lars_kernel_skips_a_step_with_an_overflow():
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
    assert not network[0].weight.isfinite().any()  # without the flag the infinity is visible


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda p: p.double(), "float64"),
        (lambda p: p[:, ::2], "another memory layout"),
        (lambda p: p.to(memory_format=torch.channels_last), "another memory layout"),
    ],
)
def test_lars_kernel_refuses_tensors_it_would_misread(change, reason):
    p = torch.randn(4, 6, 3, 3)
    changed = change(p)
    shaped = p[:, : changed.shape[1]].contiguous()
    settings = LARSSettings()
    with pytest.raises(KernelError, match=reason):
        lars_kernel.lars_kernel([shaped], [changed], [torch.zeros_like(shaped)], 0.1, settings)
    with pytest.raises(KernelError, match="a setting is torch"):
        lars_kernel.lars_kernel([shaped], [shaped], [shaped], torch.tensor(0.1).double(), settings)


def test_lars_auto_falls_back_to_foreach(host, monkeypatch):
    monkeypatch.setattr(lars, "usable", lambda source, example, prove: example.is_cpu)
    for dtype, launches in ((torch.float32, 2), (torch.float64, 0)):
        network = tiny_network(dtype)
        optimizer = LARS([network[0].weight], 0.1)
        give_gradients(network, 0)
        before = network[0].weight.clone()
        host.clear()
        optimizer.step()
        assert len(host) == launches and not torch.equal(before, network[0].weight)


def test_lars_kernel_dense_tensors():
    """A 1 x 1 convolution is dense in either layout, every second column in none."""
    gaps = torch.zeros(3, 4)[:, ::2]
    assert "not dense" in lars_kernel.why_not([gaps], [gaps], [gaps])
    p = torch.randn(4, 6, 1, 1).to(memory_format=torch.channels_last)
    g = torch.randn(4, 6, 1, 1)
    assert p.stride() != g.stride() and lars_kernel.why_not([p], [g], [torch.zeros_like(g)]) is None


def test_lars_kernel_proof_fails_when_kernel_and_foreach_differ(monkeypatch):
    here = torch.device("cpu")
    lars_kernel.prove(here)
    monkeypatch.setattr(lars_kernel, "lars_foreach", lambda *_: None)
    with pytest.raises(KernelError, match="differs from its twin"):
        lars_kernel.prove(here)
