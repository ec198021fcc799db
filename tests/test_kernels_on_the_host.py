"""The kernels' sources, run on a CPU with a real thread for each of theirs, say what their twins say in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsuncet.kernels.launch import KernelError
from fastsuncet.optim import LARS, lars_kernel, parameter_groups
from fastsuncet.optim.lars_reference import lars_reference
from tests.host_kernels import SIZES, on_the_host
from tests.networks import give_gradients, tiny_network


@pytest.fixture(autouse=True, scope="module")
def host():
    with on_the_host(lars=lars_kernel) as module:
        yield module


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


@settings(max_examples=40, deadline=None)
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
        grads = [draw(size, 3 - start, "g" in zero) * (scale or 1) for size, start, zero in shapes]
        lars_kernel.lars_kernel(
            params, grads, buffers, lr=lr if on_device else lr.item(), **rule, **scaling, found_inf=None
        )
        lars_reference(
            truth[0], [g.double() for g in grads], truth[1], lr=lr.item(), **rule, **scaling, found_inf=None
        )
    for found, expected in ((params, truth[0]), (buffers, truth[1])):
        assert all(relative(x, y) < 2e-6 for x, y in zip(found, expected))


def test_lars_is_two_launches_and_one_more_for_the_plain_group(host):
    network = tiny_network(memory_format=torch.channels_last)
    optimizers = {}
    for exclude in (False, True):
        groups = parameter_groups(network, exclude_bias_and_norm=exclude)
        optimizers[exclude] = LARS(groups, 0.1, implementation="kernel")
    give_gradients(network, 0)
    host.launched.clear()
    optimizers[True].step()
    assert host.launched == ["lars_norms", "lars_update", "lars_update"]
    optimizers[False].step()
    assert host.launched[3:] == ["lars_norms", "lars_update"] * 2  # 8 tensors, 6 a launch


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
        (lambda p: p[:, ::2], "not dense"),
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


def test_a_1x1_convolution_is_dense_in_either_layout():
    p = torch.randn(4, 6, 1, 1).to(memory_format=torch.channels_last)
    g = torch.randn(4, 6, 1, 1)
    assert p.stride() != g.stride() and lars_kernel.why_not([p], [g], [torch.zeros_like(g)]) is None
