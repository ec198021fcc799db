"""LARS against the authors' trajectories and a NumPy oracle; its state; no host sync, also under a scaler."""

import copy
import io
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastsuncet.models.resnet import build_model
from fastsuncet.optim import LARS, LARSSettings, parameter_groups
from tests.support.networks import give_gradients, tiny_network
from tests.support.vectors import load_vectors

IMPLEMENTATIONS = ("foreach", "reference")
# The authors' two releases: their settings, and the parts of a name that LARS leaves alone.
PROFILES = {
    "v0_larc": ({}, ()),
    "v1_lars": ({"lr_in_momentum": True}, ("bias", "bn")),
    "v1_lars_nesterov": ({"lr_in_momentum": True, "nesterov": True}, ("bias", "bn")),
}
both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def with_gradient(values, gradient, dtype=torch.float32):
    p = nn.Parameter(torch.as_tensor(values, dtype=dtype).clone())
    p.grad = torch.as_tensor(gradient, dtype=dtype) + torch.zeros_like(p)
    return p


def weights_and_momentum(network, optimizer):
    return [x for p in network.parameters() for x in (p.detach(), optimizer.state[p]["momentum_buffer"])]


def all_equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ------------------------------------------------------------------------------------------------------ oracles
@both
@pytest.mark.parametrize("weight_decay", [1e-06, 0.01])
@pytest.mark.parametrize("profile", PROFILES)
def test_lars_takes_the_steps_of_the_authors(profile, weight_decay, implementation):
    vectors = load_vectors("vectors_lars")
    options, excluded = PROFILES[profile]
    parameters = {str(n): nn.Parameter(torch.tensor(vectors[f"p0/{n}"])) for n in vectors["names"]}
    plain = [n for n in parameters if any(part in n for part in excluded)]
    groups = [
        {"params": [p for n, p in parameters.items() if n not in plain]},
        {"params": [parameters[n] for n in plain], "lars": False, "weight_decay": 0.0},
    ]
    settings = LARSSettings(weight_decay=weight_decay, **options)
    optimizer = LARS(groups, 0.0, **asdict(settings), implementation=implementation)
    for step, lr in enumerate(vectors["lrs"]):
        optimizer.set_lr(float(lr))
        for name, p in parameters.items():
            p.grad = torch.from_numpy(vectors[f"grad{step}/{name}"])
        optimizer.step()
        for name, p in parameters.items():
            expected = torch.from_numpy(vectors[f"{profile}_wd{weight_decay}/step{step + 1}/{name}"])
            torch.testing.assert_close(p.data, expected, rtol=1e-14, atol=1e-15)


def oracle(w, g, b, lr, s):
    """One step in NumPy's float64, as recipe 4.1 writes it. Returns the new weight and momentum."""
    w_norm, g_norm = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
    if not s.lars:
        d = g + s.weight_decay * w
    elif w_norm == 0 or g_norm == 0:
        d = g
    else:
        d = (g + s.weight_decay * w) * s.trust_coefficient * w_norm
        d = d / (g_norm + s.weight_decay * w_norm + s.eps)
    d = lr * d if s.lr_in_momentum else d
    b = s.momentum * b + d
    update = d + s.momentum * b if s.nesterov else b
    return w - (update if s.lr_in_momentum else lr * update), b


settings = st.builds(
    LARSSettings,
    momentum=st.floats(0.05, 0.99),
    weight_decay=st.sampled_from([0.0, 1e-6, 1e-2]),
    nesterov=st.booleans(),
    lr_in_momentum=st.booleans(),
    lars=st.booleans(),
)
# A smaller rate would make weights whose squares underflow.
rates = st.just(0.0) | st.floats(1e-3, 10)


@both
@given(
    lr=rates,
    on_device=st.booleans(),
    settings=settings,
    scale=st.sampled_from([None, 1024.0]),
    seed=st.integers(0, 2**32 - 1),
    zeros=st.lists(st.sampled_from("wg-"), max_size=4),
)
def test_lars_follows_the_formula(implementation, lr, on_device, settings, scale, seed, zeros):
    """With weights or gradients of zero, a rate on the device, and gradients scaled by a GradScaler."""
    rng = np.random.default_rng(seed)
    shapes = [(3, 2, 2, 2), (4,), (), (2, 3)]
    kinds = ["-"] * (4 - len(zeros)) + zeros
    weights = [rng.normal(size=s) * (kind != "w") for s, kind in zip(shapes, kinds)]
    buffers = [np.zeros(s) for s in shapes]
    parameters = [nn.Parameter(torch.tensor(w, dtype=torch.float64)) for w in weights]
    rate = torch.tensor(0.0, dtype=torch.float64) if on_device else 0.0
    optimizer = LARS(parameters, rate, **asdict(settings), implementation=implementation)
    optimizer.set_lr(lr)
    if scale is not None:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
    for step in range(3):
        for i, (p, kind) in enumerate(zip(parameters, kinds)):
            gradient = rng.normal(size=shapes[i]) * (kind != "g" or step == 1)
            weights[i], buffers[i] = oracle(weights[i], gradient, buffers[i], lr, settings)
            p.grad = torch.tensor(gradient * (scale or 1), dtype=torch.float64)
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == lr
    assert not on_device or optimizer.param_groups[0]["lr"] is rate
    for p, w, b in zip(parameters, weights, buffers):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(optimizer.state[p]["momentum_buffer"].numpy(), b, rtol=1e-12, atol=1e-13)


@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(1e-3, 1e3))
def test_lars_without_decay_ignores_the_gradients_scale(seed, scale):
    w, g = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    p = with_gradient(w, scale * g, torch.float64)
    LARS([p], 0.5, momentum=0.0, eps=0.0).step()
    # The step's length is lr x trust_coefficient x |w|, straight down the gradient.
    expected = -0.5 * 0.001 * w.norm() * g / g.norm()
    torch.testing.assert_close(p.detach() - w, expected, rtol=1e-11, atol=1e-15)


# ---------------------------------------------------------------------------------------------- dtypes and rates
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)],
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_lars_foreach_equals_the_reference_in_every_dtype_and_layout(dtype, tolerance, memory_format):
    networks = [tiny_network(dtype, memory_format) for _ in IMPLEMENTATIONS]
    for network, implementation in zip(networks, IMPLEMENTATIONS):
        groups = parameter_groups(network, exclude_bias_and_norm=True)
        settings = LARSSettings(weight_decay=1e-2, nesterov=True)
        optimizer = LARS(groups, 0.2, **asdict(settings), implementation=implementation)
        for seed in range(3):
            give_gradients(network, seed)
            optimizer.step()
    for a, b in zip(*(network.parameters() for network in networks)):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance / 2)


@both
def test_lars_float16_norms_do_not_overflow(implementation):
    p = with_gradient(torch.full((600, 600), 200.0), 150.0, torch.float16)  # |w| = 120,000 > 65,504
    LARS([p], 10.0, implementation=implementation).step()
    assert torch.all(p == 198)  # a step of 10 x 0.001 x 200, whatever the gradient's length


@both
def test_lars_steps_a_model_of_mixed_dtypes(implementation):
    parameters = [with_gradient(torch.ones(4), 1, t) for t in (torch.float32, torch.float64, torch.float32)]
    LARS(parameters, 100.0, implementation=implementation).step()
    assert all(torch.allclose(p, torch.full_like(p, 0.9)) for p in parameters)


# ---------------------------------------------------------------------------------------------------- host syncs
class Calls(TorchDispatchMode):
    """Records the operators that the dispatcher sees, without the profiler's marks around `step`."""

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


def calls_of_a_step(network, lr=0.1, exclude=False, scaler=(None, None), **options):
    groups = parameter_groups(network, exclude_bias_and_norm=exclude)
    implementation = options.pop("implementation", "auto")
    optimizer = LARS(groups, lr, **options, implementation=implementation)
    give_gradients(network, 0)
    optimizer.grad_scale, optimizer.found_inf = scaler
    with Calls() as calls:
        optimizer.step()
    return calls


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_takes_few_calls_for_any_depth_and_no_sync(exclude, lr, nesterov):
    small, large = (
        calls_of_a_step(network, lr, exclude, nesterov=nesterov)
        for network in (tiny_network(), build_model("resnet_tiny", stem="cifar"))
    )
    assert small.syncs == [] and small.names == large.names
    assert len(small.names) <= 30, small.names


def test_lars_does_not_sync_under_a_scaler():
    scaler = (torch.tensor(8.0), torch.tensor(0.0))
    assert calls_of_a_step(tiny_network(), torch.tensor(0.1), scaler=scaler).syncs == []
    # The counter sees a sync where there is one: in the reference.
    reference = calls_of_a_step(tiny_network(), implementation="reference")
    assert len(reference.syncs) > len(list(tiny_network().parameters()))


# ----------------------------------------------------------------------------------------------- mixed precision
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"lr_in_momentum": True, "nesterov": True}])
def test_lars_skips_a_step_with_an_overflow(implementation, dtype, options):
    network = tiny_network(dtype)
    groups = parameter_groups(network, exclude_bias_and_norm=True)
    settings = LARSSettings(weight_decay=1e-3, **options)
    optimizer = LARS(groups, torch.tensor(0.7), **asdict(settings), implementation=implementation)
    give_gradients(network, 0)
    optimizer.step()
    before = copy.deepcopy(weights_and_momentum(network, optimizer))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    for poison in (torch.inf, -torch.inf, torch.nan):
        give_gradients(network, 1)
        for p in network.parameters():
            p.grad.flatten()[-1] = poison
        optimizer.step()
        assert all_equal(weights_and_momentum(network, optimizer), before), poison


def test_lars_works_with_torchs_gradient_scaler():
    network, plain = tiny_network(), tiny_network()
    optimizer, expected = LARS(network.parameters(), 1.0), LARS(plain.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    for factor in (1.0, torch.inf, 2.0):
        before = [p.clone() for p in network.parameters()]
        optimizer.zero_grad()
        scaler.scale(factor * network(images).square().mean()).backward()
        with Calls() as calls:
            scaler.step(optimizer)
        assert calls.syncs == []
        scaler.update()
        if factor == torch.inf:
            assert scaler.get_scale() == 128
            assert all_equal(network.parameters(), before)
        else:
            expected.zero_grad()
            (factor * plain(images).square().mean()).backward()
            expected.step()
    for a, b in zip(network.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert not hasattr(optimizer, "found_inf")


# --------------------------------------------------------------------------------------------------------- state
@both
@pytest.mark.parametrize("on_device", [False, True])
def test_lars_saved_and_loaded_continues_bit_for_bit(implementation, on_device):
    def rate(lr):
        return torch.tensor(lr) if on_device else lr

    network = tiny_network(memory_format=torch.channels_last)
    settings = LARSSettings(weight_decay=1e-3)
    optimizer = LARS(network.parameters(), rate(0.9), **asdict(settings), implementation=implementation)
    give_gradients(network, 0)
    optimizer.step()
    file = io.BytesIO()
    torch.save((network.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)

    again = tiny_network(memory_format=torch.channels_last)
    again.load_state_dict(weights)
    other = LARSSettings(weight_decay=0.5)
    second = LARS(again.parameters(), rate(0.0), **asdict(other), implementation=implementation)
    (group,) = second.param_groups
    buffers, held = [second.state[p]["momentum_buffer"] for p in again.parameters()], group["lr"]
    second.load_state_dict(state)
    (group,) = second.param_groups
    # In place: a captured graph still points at the buffers and at the rate.
    assert all(second.state[p]["momentum_buffer"] is b for p, b in zip(again.parameters(), buffers))
    assert group["lr"] == pytest.approx(0.9) and (group["lr"] is held) == on_device
    assert group["weight_decay"] == 1e-3
    for seed in (1, 2):
        for n, o in ((network, optimizer), (again, second)):
            give_gradients(n, seed)
            o.step()
    assert all_equal(weights_and_momentum(again, second), weights_and_momentum(network, optimizer))


def test_lars_state_has_the_keys_of_older_checkpoints():
    (group,) = LARS(tiny_network().parameters(), 0.1).state_dict()["param_groups"]
    keys = "lr momentum weight_decay trust_coefficient eps nesterov lr_in_momentum lars implementation params"
    assert set(group) == set(keys.split())


def test_lars_momentum_exists_before_the_first_step():
    network = tiny_network(torch.bfloat16, torch.channels_last)
    optimizer = LARS(network.parameters(), 0.1)
    for p in network.parameters():
        buffer = optimizer.state[p]["momentum_buffer"]
        assert (buffer.stride(), buffer.dtype) == (p.stride(), p.dtype)
        assert not buffer.any() and not buffer.requires_grad
    assert len(optimizer.state_dict()["state"]) == 8


def test_lars_loads_a_state_of_another_layout():
    saved, loaded = tiny_network(), tiny_network(memory_format=torch.channels_last)
    optimizer, second = LARS(saved.parameters(), 0.1), LARS(loaded.parameters(), 0.1)
    give_gradients(saved, 0)
    optimizer.step()
    second.load_state_dict(optimizer.state_dict())
    for a, b in zip(saved.parameters(), loaded.parameters()):
        buffer = second.state[b]["momentum_buffer"]
        assert buffer.stride() == b.stride() and torch.equal(buffer, optimizer.state[a]["momentum_buffer"])


def test_lars_loading_keeps_the_implementation_and_zeroes_missing_momentum():
    network = tiny_network()
    file = LARS(network.parameters(), 0.1, implementation="reference").state_dict()
    del file["state"][0]
    optimizer = LARS(network.parameters(), 0.2, implementation="foreach")
    give_gradients(network, 0)
    optimizer.step()
    optimizer.load_state_dict(file)
    (group,) = optimizer.param_groups
    assert (group["implementation"], group["lr"]) == ("foreach", 0.1)
    assert not any(optimizer.state[p]["momentum_buffer"].any() for p in network.parameters())


def test_lars_refuses_the_state_of_another_network():
    other = LARS([nn.Parameter(torch.zeros(3, 2))], 0.1).state_dict()
    expected = r"momentum buffer of shape \(3, 2\) for a parameter of shape \(2,\)"
    with pytest.raises(ValueError, match=expected):
        LARS([nn.Parameter(torch.zeros(2))], 0.1).load_state_dict(other)


def test_lars_copied_steps_its_own_parameters():
    pair = (network := tiny_network(), LARS(network.parameters(), 0.5))
    twin, optimizer = copy.deepcopy(pair)
    for n, o in (pair, (twin, optimizer)):
        give_gradients(n, 0)
        o.step()
    assert all_equal(network.parameters(), twin.parameters())
    assert not {id(p) for p in network.parameters()} & {id(p) for p in twin.parameters()}


@both
def test_lars_leaves_a_parameter_without_gradient(implementation):
    still, moving = nn.Parameter(torch.ones(3)), with_gradient(torch.ones(3), 1)
    optimizer = LARS([still, moving], 1.0, weight_decay=0.1, implementation=implementation)
    optimizer.step()
    assert torch.all(still == 1) and torch.all(moving < 1)
    optimizer.zero_grad()
    optimizer.step()  # no parameter has a gradient


def test_lars_runs_a_closure_with_gradients():
    p = nn.Parameter(torch.ones(3))
    optimizer = LARS([p], 1.0)

    def closure():
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3 and torch.all(p < 1)
    assert optimizer.step() is None


def test_lars_group_added_later_has_momentum_and_its_own_settings():
    first, second = with_gradient(torch.ones(4), 1), with_gradient(torch.ones(4), 1)
    optimizer = LARS([first], 1.0, weight_decay=0.5)
    optimizer.add_param_group({"params": [second], "lars": False, "weight_decay": 0.0, "lr": 0.25})
    optimizer.step()
    torch.testing.assert_close(second.data, torch.full((4,), 0.75))
    torch.testing.assert_close(first.data, torch.full((4,), 0.999))


# ------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"weight_decay": -1e-6}, "weight_decay and eps must not be negative"),
        ({"eps": -1.0}, "weight_decay and eps must not be negative"),
        ({"trust_coefficient": 0.0}, "trust_coefficient must be positive, got 0.0"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum above 0"),
    ],
)
def test_lars_settings_out_of_range_are_refused(options, expected):
    with pytest.raises(ValueError, match=f"LARS: {expected}"):
        LARSSettings(**options)
    with pytest.raises(ValueError, match=expected):
        LARS([{"params": [nn.Parameter(torch.zeros(2))], **asdict(LARSSettings()), **options}], 0.1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lr": -1.0}, "lr must not be negative, got -1.0"),
        ({"lr": torch.zeros(2)}, r"lr must be a number or a 0-dim tensor, got shape \(2,\)"),
        ({"implementation": "triton"}, "'triton' is not one of auto, foreach, reference"),
    ],
)
def test_lars_arguments_out_of_range_are_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        LARS([nn.Parameter(torch.zeros(2))], **{"lr": 0.1, **options})


def test_lars_refuses_a_sparse_gradient():
    embedding = nn.Embedding(7, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"shape \(7, 3\) has a sparse gradient"):
        LARS(embedding.parameters(), 0.1).step()
