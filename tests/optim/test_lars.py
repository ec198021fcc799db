"""LARS against the authors' trajectories and a NumPy oracle over any run; no host sync."""

import io
import math
from dataclasses import asdict

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fastsuncet.models.resnet import build_model
from fastsuncet.optim import LARS, LARSSettings, lars_kernel, parameter_groups
from tests.support.amp_c import StandIn
from tests.support.host_kernels import SIZES, on_the_host
from tests.support.networks import give_gradients, tiny_network
from tests.support.vectors import load_vectors
from tools.bench.dispatch_counter import Counter

# The authors' two releases: their settings, and the parts of a name that LARS leaves alone.
PROFILES = {
    "v0_larc": ({}, ()),
    "v1_lars": ({"lr_in_momentum": True}, ("bias", "bn")),
    "v1_lars_nesterov": ({"lr_in_momentum": True, "nesterov": True}, ("bias", "bn")),
}


@pytest.mark.parametrize("weight_decay", [1e-06, 0.01])
@pytest.mark.parametrize("profile", PROFILES)
def test_lars_takes_the_steps_of_the_authors(profile, weight_decay):
    vectors = load_vectors("vectors_lars")
    options, excluded = PROFILES[profile]
    parameters = {str(n): nn.Parameter(torch.tensor(vectors[f"p0/{n}"])) for n in vectors["names"]}
    plain = [n for n in parameters if any(part in n for part in excluded)]
    groups = [
        {"params": [p for n, p in parameters.items() if n not in plain]},
        {"params": [parameters[n] for n in plain], "lars": False, "weight_decay": 0.0},
    ]
    optimizer = LARS(groups, 0.0, **asdict(LARSSettings(weight_decay=weight_decay, **options)))
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


def settings(least):
    return st.floats(least, 0.99).flatmap(
        lambda momentum: st.builds(
            LARSSettings,
            momentum=st.just(momentum),
            weight_decay=st.sampled_from([0.0, 1e-6, 1e-2]),
            trust_coefficient=st.sampled_from([0.001, 1]),
            eps=st.sampled_from([0.0, 1e-8]),
            nesterov=st.booleans() if momentum else st.just(False),
            lr_in_momentum=st.booleans(),
            lars=st.booleans(),
        )
    )


# A tensor: its shape, where it starts in its memory, which need not be a multiple of 16 bytes, and what is zero. The
# sizes are around the 32 of a chunk on the host and a vector of four.
tensors = st.lists(
    st.tuples(
        st.integers(1, 70).map(lambda n: (n,)) | st.sampled_from([(), (2, 3), (3, 2, 2, 2), (4, 6, 1, 1)]),
        st.integers(0, 3),
        st.sampled_from(["", "", "w", "g", "wg"]),
    ),
    min_size=1,
    max_size=2 * SIZES["TENSORS"] + 1,
)


class Run(RuleBasedStateMachine):
    """Groups of parameters that take steps, under a scaler or not, are saved, and are loaded by another optimizer."""

    implementation: str

    @initialize(on_device=st.booleans(), channels_last=st.booleans(), seed=st.integers(0, 2**32 - 1))
    def begin(self, on_device, channels_last, seed):
        self.on_device, self.channels_last = on_device, channels_last
        self.generator = torch.Generator().manual_seed(seed)
        self.single = self.implementation in ("kernel", "apex")
        self.groups, self.model, self.optimizer = [], {}, None

    def draw(self, shape, start, zero=False, dtype=torch.float32):
        """Return numbers in the layout of the run, `start` elements behind an aligned address."""
        x = torch.randn(shape, generator=self.generator, dtype=dtype) * (not zero)
        if self.channels_last and x.dim() == 4:
            return x.contiguous(memory_format=torch.channels_last)
        return torch.cat([torch.zeros(start, dtype=dtype), x.flatten()])[start:].view(shape)

    def fresh(self, lr):
        """Return an optimizer of the first group with other settings, whose groups the later ones join."""
        (first, _, given), *others = self.groups
        rate = torch.tensor(lr) if self.on_device else lr
        made = LARS(first, rate, **asdict(given), implementation=self.implementation)
        for params, _, given in others:
            made.add_param_group({"params": params, **asdict(given)})
        return made

    @precondition(lambda self: len(self.groups) < 3)
    @rule(data=st.data(), given=tensors)
    def add_group(self, data, given):
        own = data.draw(settings(0.05 if self.implementation == "apex" else 0.0))
        params = []
        for shape, start, zero in given:
            # A group can have tensors of several dtypes, where the implementation takes them.
            dtype = torch.float64 if not self.single and len(params) % 3 else torch.float32
            params.append(nn.Parameter(self.draw(shape, start, "w" in zero, dtype)))
            self.model[params[-1]] = params[-1].detach().double().numpy().copy(), np.zeros(shape)
        self.groups.append((params, given, own))
        if self.optimizer is None:
            self.optimizer = self.fresh(0.5)
        else:
            self.optimizer.add_param_group({"params": params, **asdict(own)})

    @precondition(lambda self: self.groups)
    @rule(
        lr=st.sampled_from([0.0, 0.5]) | st.floats(1e-3, 10),
        scale=st.sampled_from([None, None, 8.0, 65536.0]),
        poison=st.sampled_from([None, None, torch.inf, -torch.inf, torch.nan]),
        without=st.integers(0, 9),
    )
    def step(self, lr, scale, poison, without):
        """Update; an overflow under a scaler changes nothing, and a parameter without gradient stays."""
        lr = float(np.float32(lr))
        overflow = poison is not None and scale is not None
        scaling = (torch.tensor(scale), torch.tensor(float(overflow))) if scale else (None, None)
        self.optimizer.set_lr(lr)
        self.optimizer.grad_scale, self.optimizer.found_inf = scaling
        expected = {}
        for params, given, own in self.groups:
            for number, (p, (shape, start, zero)) in enumerate(zip(params, given)):
                w, b = self.model[p]
                p.grad = None
                if number == without:
                    expected[p] = w, b
                    continue
                gradient = self.draw(shape, 3 - start, "g" in zero, p.dtype)
                expected[p] = (w, b) if overflow else oracle(w, gradient.double().numpy(), b, lr, own)
                p.grad = gradient.mul_(scale or 1)
                if overflow:
                    p.grad.fill_(poison)
        self.optimizer.step()
        for p, wanted in expected.items():
            found = p.detach(), self.optimizer.state[p]["momentum_buffer"]
            for x, y, before in zip(found, wanted, self.model[p]):
                # Relative to the summands: the sum can cancel.
                near = (2e-6 if p.dtype == torch.float32 else 1e-12) * max(abs(y).max(), abs(before).max())
                assert abs(x.double().numpy() - y).max() <= near * (not overflow and p.grad is not None)
            self.model[p] = tuple(x.double().numpy().copy() for x in found)

    @precondition(lambda self: self.groups)
    @rule(missing=st.booleans())
    def save_and_load(self, missing):
        """Another optimizer fills its own buffers and rate in place, and takes the settings that were saved."""
        file = io.BytesIO()
        saved = self.optimizer.state_dict()
        if missing:
            del saved["state"][0]
        torch.save(saved, file)
        file.seek(0)
        groups = self.groups
        self.groups = [(params, given, LARSSettings(weight_decay=0.7)) for params, given, _ in groups]
        other, self.groups = self.fresh(0.125), groups
        rates = [group["lr"] for group in other.param_groups]
        buffers = {p: state["momentum_buffer"] for p, state in other.state.items()}
        other.load_state_dict(torch.load(file, weights_only=True))
        for group, (_, _, own), held, mine in zip(
            other.param_groups, groups, rates, self.optimizer.param_groups
        ):
            assert {key: group[key] for key in asdict(own)} == asdict(own)
            assert group["implementation"] == self.implementation and float(group["lr"]) == float(mine["lr"])
            assert (group["lr"] is held) == self.on_device
        # In place: a captured graph still points at the buffers and at the rate.
        assert all(other.state[p]["momentum_buffer"] is buffer for p, buffer in buffers.items())
        if missing:
            first = groups[0][0][0]
            self.model[first] = self.model[first][0], np.zeros(first.shape)
        self.optimizer = other

    @invariant()
    def momentum_is_that_of_the_model(self):
        for p, (_, b) in getattr(self, "model", {}).items():
            buffer = self.optimizer.state[p]["momentum_buffer"]
            assert (buffer.stride(), buffer.dtype, buffer.requires_grad) == (p.stride(), p.dtype, False)
            assert np.array_equal(buffer.double().numpy(), b)


@pytest.mark.parametrize("implementation", ["foreach", "kernel", "apex"])
def test_lars_follows_the_formula(implementation, monkeypatch):
    """The kernel's own source runs thread for thread on the CPU, apex's kernels by a stand-in."""
    monkeypatch.setattr(lars_kernel, "apex", StandIn)
    machine = type("Run", (Run,), {"implementation": implementation})
    # Without a shorter example, whose search takes minutes.
    phases = [phase for phase in hypothesis.Phase if phase.name not in ("shrink", "explain")]
    limits = hypothesis.settings(stateful_step_count=8, deadline=None, phases=phases)
    with on_the_host(lars_kernel):
        run_machine(machine, settings=limits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lars_norms_of_16_bits_do_not_overflow(dtype):
    p = nn.Parameter(torch.full((600, 600), 200.0, dtype=dtype))  # |w| = 120,000; float16 ends at 65,504
    p.grad = torch.full_like(p, 150.0)
    LARS([p], 10.0).step()
    assert torch.all(p == 198)  # a step of 10 x 0.001 x 200, whatever the gradient's length


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("scaler", [(None, None), (torch.tensor(8.0), torch.tensor(0.0))], ids=["", "scaler"])
def test_lars_takes_few_calls_for_any_depth_and_no_sync(exclude, lr, nesterov, scaler):
    operators = []
    for network in (tiny_network(), build_model("resnet_tiny", stem="cifar")):
        optimizer = LARS(parameter_groups(network, exclude_bias_and_norm=exclude), lr, nesterov=nesterov)
        give_gradients(network)
        optimizer.grad_scale, optimizer.found_inf = scaler
        with Counter() as counter:
            optimizer.step()
        assert counter.waits == 0
        operators.append(counter.operators)
    assert operators[0] == operators[1] <= (30 if scaler[0] is None else 55)


def test_lars_refuses_the_state_of_another_network():
    other = LARS([nn.Parameter(torch.zeros(3, 2))], 0.1).state_dict()
    expected = r"momentum buffer of shape \(3, 2\) for a parameter of shape \(2,\)"
    own = LARS([nn.Parameter(torch.zeros(2))], 0.2)
    with pytest.raises(ValueError, match=expected):
        own.load_state_dict(other)
    (group,) = own.param_groups
    assert group["lr"] == 0.2 and "momentum_buffer" in own.state[group["params"][0]]
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1).state_dict()
    with pytest.raises(ValueError, match=r"LARS: this is the state of another optimizer, without .*'eps'"):
        LARS([nn.Parameter(torch.zeros(2))], 0.1).load_state_dict(other)

    without_lr, fast = own.state_dict(), own.state_dict()
    del without_lr["param_groups"][0]["lr"]
    fast["param_groups"][0] |= {"weight_decay": 0.5, "momentum": 5.0}
    for other in (without_lr, fast):
        with pytest.raises(ValueError, match=r"LARS: .*('lr'|momentum must be)"):
            own.load_state_dict(other)
    assert group["weight_decay"] == 0.0 and group["lr"] == 0.2


@pytest.mark.parametrize("lars", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lars_under_a_scaler_takes_scalars_of_any_dtype(dtype, lars):
    scale, bias = nn.Parameter(torch.tensor(2.0, dtype=dtype)), nn.Parameter(torch.ones(2, dtype=dtype))
    scale.grad, bias.grad = torch.full_like(scale, 8.0), torch.full_like(bias, 16.0)
    optimizer = LARS([scale, bias], 0.5, lars=lars, trust_coefficient=1.0, eps=0.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    optimizer.step()
    assert scale.shape == () and scale.item() == (1.0 if lars else 1.5)
    assert bias.tolist() == ([0.5, 0.5] if lars else [0.0, 0.0])


def test_lars_refuses_a_sparse_gradient_before_any_weight_moves():
    dense, table = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, 2))
    dense.grad, table.grad = torch.ones(2), torch.eye(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match=r"LARS: the gradient of a parameter of shape \(3, 2\) is sparse"):
        LARS([{"params": [dense]}, {"params": [table]}], 0.1).step()
    assert torch.equal(dense, torch.ones(2))


def test_lars_runs_a_closure_with_gradients():
    p = nn.Parameter(torch.ones(3))

    def closure():
        loss = p.square().sum()
        loss.backward()
        return loss

    assert LARS([p], 1.0).step(closure) == 3 and torch.all(p < 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"momentum": 1.0}, "momentum must be a number from 0 to below 1, not 1.0"),
        ({"momentum": None}, "momentum must be .* not None"),
        ({"weight_decay": -1e-6}, "weight_decay must be a number from 0 to below inf, not -1e-06"),
        ({"trust_coefficient": 0.0}, "trust_coefficient must be above 0"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum above 0"),
        ({"lr": -1.0}, "lr must be a number from 0 to below inf, not -1.0"),
        ({"lr": math.nan}, "lr must be a number from 0 to below inf, not nan"),
        ({"lr": torch.zeros(2)}, r"number or a floating 0-dim tensor, got torch.float32 of shape \(2,\)"),
        ({"lr": torch.tensor(1)}, r"got torch.int64 of shape \(\)"),
        ({"implementation": "triton"}, "'triton' is not one of auto, foreach, kernel"),
    ],
)
def test_lars_arguments_out_of_range_are_refused(options, expected):
    p = nn.Parameter(torch.zeros(2))
    for params, keywords in (([p], options), ([{"params": [p], **options}], {})):
        with pytest.raises(ValueError, match=f"LARS: .*{expected}"):
            LARS(params, **{"lr": 0.1, **keywords})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP")
def test_lars_refuses_parameters_that_fsdp_has_sharded(group):
    first = FullyShardedDataParallel(nn.Linear(4, 3), use_orig_params=True, device_id=torch.device("cpu"))
    second = fully_shard(nn.Linear(4, 3), mesh=init_device_mesh("cpu", (1,)))
    for network in (first, second):
        own = LARS([nn.Parameter(torch.zeros(2))], 0.1)
        with pytest.raises(ValueError, match=r"LARS: .* is sharded over ranks.*DDP instead of FSDP"):
            own.add_param_group({"params": list(network.parameters())})
        assert len(own.param_groups) == 1
