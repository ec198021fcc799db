"""LARS: the authors' trajectories, a plain twin, an oracle of its own, and no question to the host."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.optim.lars import Lars as TimmLars
from torch import nn

from fastsuncet.optim import LARS, parameter_groups
from tests.support.networks import give_gradients, tiny_network
from tests.support.vectors import load_vectors

IMPLEMENTATIONS = ("foreach", "reference")
PROFILES = {  # the authors' two releases: what they pass, and which tensors LARS leaves alone
    "v0_larc": ({}, lambda name: False),
    "v1_lars": ({"lr_in_momentum": True}, lambda name: "bias" in name or "bn" in name),
    "v1_lars_nesterov": (
        {"lr_in_momentum": True, "nesterov": True},
        lambda name: "bias" in name or "bn" in name,
    ),
}


# ----------------------------------------------------------------------------------------------------
# against others
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("weight_decay", [1e-06, 0.01])
@pytest.mark.parametrize("profile", PROFILES)
def test_five_steps_follow_the_authors_code(profile, weight_decay, implementation):
    vectors = load_vectors("vectors_lars")
    options, excluded = PROFILES[profile]
    parameters = {str(n): nn.Parameter(torch.tensor(vectors[f"p0/{n}"])) for n in vectors["names"]}
    groups = [
        {"params": [p for n, p in parameters.items() if not excluded(n)]},
        {"params": [p for n, p in parameters.items() if excluded(n)], "lars": False, "weight_decay": 0.0},
    ]
    optimizer = LARS(groups, 0.0, weight_decay=weight_decay, implementation=implementation, **options)
    for step, lr in enumerate(vectors["lrs"]):
        optimizer.set_lr(float(lr))
        for name, p in parameters.items():
            p.grad = torch.from_numpy(vectors[f"grad{step}/{name}"])
        optimizer.step()
        for name, p in parameters.items():
            expected = torch.from_numpy(vectors[f"{profile}_wd{weight_decay}/step{step + 1}/{name}"])
            torch.testing.assert_close(p.data, expected, rtol=1e-14, atol=1e-15)


def test_simclrs_own_formula_is_near_but_another():
    """TF's LARS divides by |g + wd w| and has no eps: the same to first order in the decay, not the same."""
    vectors = load_vectors("vectors_lars")
    name = "fc.weight"
    for weight_decay, near in ((1e-06, 1e-5), (0.01, 5e-2)):
        p = nn.Parameter(torch.tensor(vectors[f"p0/{name}"]))
        optimizer = LARS([p], 0.0, weight_decay=weight_decay, lr_in_momentum=True)
        for step, lr in enumerate(vectors["lrs"]):
            optimizer.set_lr(float(lr))
            p.grad = torch.from_numpy(vectors[f"grad{step}/{name}"])
            optimizer.step()
        start = vectors[f"p0/{name}"]
        theirs = vectors[f"simclr_tf_formula_wd{weight_decay}/step5/{name}"]
        distance = np.linalg.norm(p.detach().numpy() - theirs) / np.linalg.norm(theirs - start)
        assert 1e-9 < distance < near


def test_steps_equal_timms_lars_where_the_two_conventions_meet():
    torch.manual_seed(0)
    shapes = [(8, 3, 3, 3), (8,), (5, 8), (5,)]
    ours, theirs = ([nn.Parameter(torch.zeros(s, dtype=torch.float64)) for s in shapes] for _ in range(2))
    for a, b in zip(ours, theirs):
        a.data.normal_()
        b.data.copy_(a)
    a_optimizer = LARS(ours, 0.3, momentum=0.9, weight_decay=1e-4)
    b_optimizer = TimmLars(theirs, lr=0.3, momentum=0.9, weight_decay=1e-4, trust_coeff=0.001, eps=1e-8)
    for _ in range(4):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        a_optimizer.step()
        b_optimizer.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


# ------------------------------------------------------------------------------------------------------------
# oracle
def oracle(w, g, b, *, lr, momentum, weight_decay, tc, eps, nesterov, lr_in_momentum, lars):
    """One step in NumPy's float64: recipe 4.1 read line by line. Returns the new weight and momentum."""
    w_norm, g_norm = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
    if not lars:
        d = g + weight_decay * w
    elif w_norm == 0 or g_norm == 0:
        d = g
    else:
        d = (g + weight_decay * w) * tc * w_norm / (g_norm + weight_decay * w_norm + eps)
    b = momentum * b + (lr * d if lr_in_momentum else d)
    direction = ((lr * d if lr_in_momentum else d) + momentum * b) if nesterov else b
    return w - (direction if lr_in_momentum else lr * direction), b


settings = st.fixed_dictionaries(
    {
        "lr": st.just(0.0) | st.floats(1e-3, 10),  # a smaller one makes weights whose squares are no float
        "momentum": st.floats(0.05, 0.99),
        "weight_decay": st.sampled_from([0.0, 1e-6, 1e-2]),
        "nesterov": st.booleans(),
        "lr_in_momentum": st.booleans(),
        "lars": st.booleans(),
    }
)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(setting=settings, seed=st.integers(0, 2**32 - 1), zeros=st.lists(st.sampled_from("wg-"), max_size=4))
def test_three_steps_follow_the_formula_with_any_setting_and_with_zero_norms(
    implementation, setting, seed, zeros
):
    rng = np.random.default_rng(seed)
    shapes = [(3, 2, 2, 2), (4,), (), (2, 3)]
    kinds = ["-"] * (4 - len(zeros)) + zeros
    weights = [rng.normal(size=s) * (kind != "w") for s, kind in zip(shapes, kinds)]
    buffers = [np.zeros(s) for s in shapes]
    parameters = [nn.Parameter(torch.tensor(w, dtype=torch.float64)) for w in weights]
    options = {**setting, "tc": 0.001, "eps": 1e-8}
    group = {"params": parameters, "lars": setting["lars"]}
    optimizer = LARS(
        [group], **{k: v for k, v in setting.items() if k != "lars"}, implementation=implementation
    )
    for step in range(3):
        for i, (p, kind) in enumerate(zip(parameters, kinds)):
            grad = rng.normal(size=shapes[i]) * (kind != "g" or step == 1)
            weights[i], buffers[i] = oracle(weights[i], grad, buffers[i], **options)
            p.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
    for p, w, b in zip(parameters, weights, buffers):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(optimizer.state[p]["momentum_buffer"].numpy(), b, rtol=1e-12, atol=1e-13)


@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(1e-3, 1e3))
def test_without_decay_the_step_does_not_feel_the_scale_of_the_gradient(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    w, g = torch.randn(2, 7, 5, dtype=torch.float64, generator=generator)
    stepped = []
    for factor in (1.0, scale):
        p = nn.Parameter(w.clone())
        p.grad = factor * g
        LARS([p], 0.5, momentum=0.0, eps=0.0).step()
        stepped.append(p.detach() - w)
    torch.testing.assert_close(stepped[0], stepped[1], rtol=1e-11, atol=0)
    # Its length is lr x trust x |w|, straight down the gradient.
    torch.testing.assert_close(stepped[0], -0.5 * 0.001 * w.norm() * g / g.norm(), rtol=1e-12, atol=1e-15)


# ------------------------------------------------------------------------------- the two implementations
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)],
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_foreach_equals_the_reference_in_every_dtype_and_layout(dtype, tolerance, memory_format):
    networks = [tiny_network(dtype, memory_format) for _ in IMPLEMENTATIONS]
    for network, implementation in zip(networks, IMPLEMENTATIONS):
        groups = parameter_groups(network, exclude_bias_and_norm=True)
        optimizer = LARS(groups, 0.2, weight_decay=1e-2, nesterov=True, implementation=implementation)
        for seed in range(3):
            give_gradients(network, seed)
            optimizer.step()
    for a, b in zip(*(network.parameters() for network in networks)):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance / 2)


def test_norms_of_float16_weights_do_not_overflow():
    for implementation in IMPLEMENTATIONS:
        p = nn.Parameter(torch.full((600, 600), 200.0, dtype=torch.float16))  # |w| = 120,000 > 65,504
        p.grad = torch.full_like(p, 150.0)
        LARS([p], 10.0, implementation=implementation).step()
        assert torch.all(p == 198), (
            implementation
        )  # a step of 10 x 0.001 x 200, whatever the gradient's length


def test_a_model_of_mixed_dtypes_takes_one_step_each():
    for implementation in IMPLEMENTATIONS:
        parameters = [
            nn.Parameter(torch.ones(4, dtype=t)) for t in (torch.float32, torch.float64, torch.float32)
        ]
        for p in parameters:
            p.grad = torch.ones_like(p)
        LARS(parameters, 100.0, implementation=implementation).step()
        assert all(torch.allclose(p, torch.full_like(p, 0.9)) for p in parameters)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_learning_rate_on_the_device_does_what_a_number_does(implementation):
    networks, rate = [tiny_network(), tiny_network()], torch.tensor(0.0)
    optimizers = [
        LARS(network.parameters(), lr, implementation=implementation)
        for network, lr in zip(networks, (0.0, rate))
    ]
    for seed, lr in enumerate((0.5, 1.5, 1.0)):
        for network, optimizer in zip(networks, optimizers):
            give_gradients(network, seed)
            optimizer.set_lr(lr)
            optimizer.step()
    assert rate == 1.0 and optimizers[1].param_groups[0]["lr"] is rate
    for a, b in zip(*(network.parameters() for network in networks)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
