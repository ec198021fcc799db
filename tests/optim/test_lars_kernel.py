"""lars.cu, built for the CPU with a real thread for each of CUDA's: its launches, its proof, and what it refuses.

test_lars.py has its steps.
"""

import pytest
import torch

from fastsuncet.optim import LARS, LARSSettings, lars_kernel, parameter_groups
from pipelines.cuda_compiler import KernelError
from tests.support.host_kernels import on_the_host
from tests.support.networks import give_gradients, tiny_network


@pytest.fixture(autouse=True, scope="module")
def host():
    with on_the_host(lars_kernel) as launched:
        yield launched


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


def test_lars_kernel_repeats_its_bits():
    networks = [tiny_network(memory_format=torch.channels_last) for _ in range(2)]
    for network in networks:
        groups = parameter_groups(network, exclude_bias_and_norm=True)
        optimizer = LARS(groups, torch.tensor(0.2), weight_decay=1e-2, implementation="kernel")
        for seed in range(3):
            give_gradients(network, seed)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(*(network.parameters() for network in networks)))


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
