"""lars.cu, built for the CPU with a real thread for each of CUDA's, and LARS by apex's kernels, on a stand-in.

Their launches, their proof, and what they refuse. test_lars.py has their steps.
"""

import pytest
import torch

from fastsuncet.kernels import switches
from fastsuncet.optim import LARS, LARSSettings, lars, lars_kernel, parameter_groups
from fastsuncet.optim.device_lr import fill, on_host
from pipelines.cuda_compiler import KernelError
from tests.support.amp_c import StandIn
from tests.support.host_kernels import on_the_host
from tests.support.networks import give_gradients, tiny_network

HERE = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def host():
    with on_the_host(lars_kernel) as launched:
        yield launched


def test_lars_kernel_is_two_launches_and_one_for_a_plain_group(host):
    network = tiny_network(memory_format=torch.channels_last)
    for exclude, launches in ((True, 1), (False, 2)):
        groups = parameter_groups(network, exclude_bias_and_norm=exclude)
        optimizer = LARS(groups, 0.1, implementation="kernel")
        give_gradients(network)
        host.clear()
        optimizer.step()
        # Without exclusion there are 8 tensors, and 6 fit a launch.
        expected = ["lars_norms", "lars_update"] * launches
        assert host == expected + (["lars_update"] if exclude else [])


def test_lars_kernel_refuses_tensors_it_would_misread():
    """A 1 x 1 convolution is dense in either layout, every second column in none."""
    p, settings = torch.randn(4, 6, 3, 3), LARSSettings()
    for changed, reason in (
        (p.double(), "float64"),
        (p[:, ::2], "another memory layout"),
        (p.to(memory_format=torch.channels_last), "another memory layout"),
    ):
        shaped = p[:, : changed.shape[1]].contiguous()
        with pytest.raises(KernelError, match=reason):
            lars_kernel.lars_kernel([shaped], [changed], [torch.zeros_like(shaped)], 0.1, settings)
    with pytest.raises(KernelError, match="a setting is torch"):
        lars_kernel.lars_kernel([p], [p], [p], torch.tensor(0.1).double(), settings)
    gaps = torch.zeros(3, 4)[:, ::2]
    assert "not dense" in lars_kernel.why_not([gaps], [gaps], [gaps])
    p = torch.randn(4, 6, 1, 1).to(memory_format=torch.channels_last)
    g = torch.randn(4, 6, 1, 1)
    assert p.stride() != g.stride() and lars_kernel.why_not([p], [g], [torch.zeros_like(g)]) is None


def test_lars_kernel_proof_fails_when_kernel_and_foreach_differ(monkeypatch):
    lars_kernel.prove(HERE)
    monkeypatch.setattr(lars_kernel, "lars_foreach", lambda *_: None)
    with pytest.raises(KernelError, match="differs from its twin"):
        lars_kernel.prove(HERE)


@pytest.fixture
def apex(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(lars_kernel, "apex", lambda: stand_in)
    return stand_in


def test_lars_apex_shows_a_gradient_that_is_not_finite(apex):
    """The norms' kernel sets its flag then, which must not skip the step: training would go on without a word."""
    p, b = torch.ones(3), torch.zeros(3)
    lars_kernel.lars_apex([p], [torch.tensor([1.0, torch.nan, 1.0])], [b], 0.1, LARSSettings())
    assert p.isnan().any() and b.isnan().any()


def test_lars_apex_refuses_what_it_would_compute_otherwise(apex, monkeypatch):
    tensors, rate = [[torch.ones(3)] for _ in range(3)], torch.tensor(0.1)
    for settings, lr, reason in (
        (LARSSettings(momentum=0.0), 0.1, "without momentum"),
        (LARSSettings(), rate, "only the device knows"),
        (LARSSettings(lr_in_momentum=True), torch.tensor(0.1).double(), "a setting is torch.float64"),
    ):
        with pytest.raises(KernelError, match=reason):
            lars_kernel.lars_apex(*tensors, lr, settings)
    fill(rate, 0.1)
    assert on_host(rate) == 0.1
    rate.mul_(2)  # by others
    assert on_host(rate) is None
    fill(rate, torch.tensor(0.3))
    assert on_host(rate) is None
    assert apex.calls == []
    monkeypatch.undo()
    if lars_kernel.apex() is None:
        with pytest.raises(KernelError, match="is not installed"):
            lars_kernel.lars_apex(*tensors, 0.1, LARSSettings())


def test_lars_apex_is_proved_against_foreach(apex, monkeypatch):
    lars_kernel.prove_apex(HERE, sizes=[100])
    real = apex.multi_tensor_sgd
    monkeypatch.setattr(apex, "multi_tensor_sgd", lambda *a: real(*a[:4], 0.8, *a[5:]))
    with pytest.raises(KernelError, match="LARS' weights differs from its twin"):
        lars_kernel.prove_apex(HERE)
    monkeypatch.setattr(apex, "multi_tensor_sgd", lambda *_: exec("raise TypeError('11 arguments')"))
    with pytest.raises(KernelError, match="apex: 11 arguments"):
        lars_kernel.prove_apex(HERE)


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(
    ("kind", "usable", "dtype", "calls"),
    [
        (OnGPU, {"lars.cu", "apex"}, torch.float32, ["lars_norms", "lars_update"]),
        (OnGPU, {"apex"}, torch.float32, ["l2norm", "l2norm", "sgd"]),
        (OnGPU, {"lars.cu", "apex"}, torch.float64, []),  # neither takes them
        (OnGPU, set(), torch.float32, []),
        (torch.Tensor, {"lars.cu", "apex"}, torch.float32, []),
    ],
)
def test_lars_auto_is_a_kernel_that_takes_them_else_foreach(
    apex, host, monkeypatch, kind, usable, dtype, calls
):
    monkeypatch.setattr(switches, "usable", lambda source, *_: source in usable)
    tensors = [[torch.ones(3, dtype=dtype).as_subclass(kind)] for _ in range(3)]
    host.clear()
    lars.lars_auto(*tensors, 0.1, LARSSettings())
    assert host + apex.calls == calls
    # w - lr (momentum b + 0.001 w): one step, by whichever.
    torch.testing.assert_close(tensors[0][0], torch.full_like(tensors[0][0], 1 - 0.1 * (0.9 + 0.001)))
