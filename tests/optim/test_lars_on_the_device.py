"""LARS never asks the host for a value, nor under a gradient scaler, and takes few calls for many layers."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastsuncet.models.resnet import build_model
from fastsuncet.optim import LARS, parameter_groups
from tests.support.networks import give_gradients, tiny_network

IMPLEMENTATIONS = ("foreach", "reference")


class Calls(TorchDispatchMode):
    """Counts what the dispatcher sees; the profiler's own marks around `step` are not the optimizer's."""

    SYNCS = ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "masked_select")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.namespace != "profiler":
            self.names.append(function.overloadpacket.__name__)
        return function(*arguments, **(keywords or {}))

    @property
    def syncs(self):
        return [name for name in self.names if name in self.SYNCS]


def calls_of_a_step(network, **options):
    exclude = options.pop("exclude_bias_and_norm", False)
    scaler = options.pop("scaler", {})
    optimizer = LARS(parameter_groups(network, exclude_bias_and_norm=exclude), **options)
    give_gradients(network, 0)
    for name, value in scaler.items():
        setattr(optimizer, name, value)
    with Calls() as calls:
        optimizer.step()
    return calls


@pytest.mark.parametrize("exclude_bias_and_norm", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_resnet50_takes_at_most_30_calls_and_asks_the_host_nothing(
    exclude_bias_and_norm, on_device, nesterov
):
    calls = calls_of_a_step(
        build_model("resnet50"),
        lr=torch.tensor(0.1) if on_device else 0.1,
        nesterov=nesterov,
        exclude_bias_and_norm=exclude_bias_and_norm,
    )
    assert calls.syncs == []
    assert len(calls.names) <= 30, calls.names


def test_the_number_of_calls_does_not_grow_with_the_number_of_layers():
    small, large = (
        calls_of_a_step(build_model(n, stem="cifar"), lr=0.1) for n in ("resnet_tiny", "resnet34")
    )
    assert small.names == large.names


def test_under_a_gradient_scaler_the_host_is_asked_nothing_either():
    scaler = {"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(0.0)}
    calls = calls_of_a_step(tiny_network(), lr=torch.tensor(0.1), scaler=scaler)
    assert calls.syncs == []
    # The counter does see a question: the reference asks one.
    asked = calls_of_a_step(tiny_network(), lr=0.1, implementation="reference")
    assert len(asked.syncs) > len(list(tiny_network().parameters()))


# --------------------------------------------------------------------------------------------------- mixed
# precision
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("lr_in_momentum", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_scaled_gradients_step_as_unscaled_ones(implementation, lr_in_momentum, nesterov):
    networks = [tiny_network(torch.float64), tiny_network(torch.float64)]
    options = {"weight_decay": 1e-3, "lr_in_momentum": lr_in_momentum, "nesterov": nesterov}
    for network, scale in zip(networks, (1.0, 1024.0)):
        optimizer = LARS(network.parameters(), 0.7, implementation=implementation, **options)
        for seed in range(2):
            give_gradients(network, seed, scale)
            if scale != 1:
                optimizer.grad_scale = torch.tensor(scale)
                optimizer.found_inf = torch.tensor(0.0)
            optimizer.step()
    for a, b in zip(*(network.parameters() for network in networks)):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"lr_in_momentum": True, "nesterov": True}])
@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan")])
def test_an_overflow_changes_neither_weights_nor_momentum(implementation, dtype, options, poison):
    network = tiny_network(dtype)
    groups = parameter_groups(network, exclude_bias_and_norm=True)
    optimizer = LARS(groups, torch.tensor(0.7), weight_decay=1e-3, implementation=implementation, **options)
    give_gradients(network, 0)
    optimizer.step()
    before = copy.deepcopy((network.state_dict(), optimizer.state_dict()))
    give_gradients(network, 1)
    for p in network.parameters():
        p.grad.flatten()[-1] = poison  # every kind of group is hit
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    optimizer.step()
    weights, state = before
    assert all(torch.equal(a, b) for a, b in zip(weights.values(), network.state_dict().values()))
    after = optimizer.state_dict()["state"]
    assert all(
        torch.equal(s["momentum_buffer"], after[i]["momentum_buffer"]) for i, s in state["state"].items()
    )


def test_torchs_gradient_scaler_skips_an_overflow_and_lowers_its_scale():
    network = tiny_network()
    optimizer = LARS(network.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    plain = copy.deepcopy(network)
    expected = LARS(plain.parameters(), 1.0)
    images = torch.randn(4, 3, 6, 6)
    for factor in (1.0, float("inf"), 2.0):
        before = copy.deepcopy(network.state_dict())
        optimizer.zero_grad()
        scaler.scale(factor * network(images).square().mean()).backward()
        with Calls() as calls:
            scaler.step(optimizer)
        assert calls.syncs == []
        scaler.update()
        if factor == float("inf"):
            assert scaler.get_scale() == 128
            running = ("running_mean", "running_var", "num_batches_tracked")  # the forward pass moved these
            assert all(
                torch.equal(v, before[k]) for k, v in network.state_dict().items() if not k.endswith(running)
            )
        else:
            expected.zero_grad()
            (factor * plain(images).square().mean()).backward()
            expected.step()
    for a, b in zip(network.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert not hasattr(optimizer, "found_inf")
