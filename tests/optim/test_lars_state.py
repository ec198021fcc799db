"""What LARS keeps between steps, which parameters it is given, and what it refuses."""

import copy
import io

import pytest
import torch
from torch import nn

from fastsuncet.models.resnet import build_model
from fastsuncet.optim import LARS, parameter_groups
from tests.support.networks import give_gradients, tiny_network

IMPLEMENTATIONS = ("foreach", "reference")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("on_device", [False, True])
def test_a_saved_and_loaded_optimizer_continues_bit_for_bit(implementation, on_device):
    def lr():
        return torch.tensor(0.9) if on_device else 0.9

    network = tiny_network(memory_format=torch.channels_last)
    optimizer = LARS(network.parameters(), lr(), weight_decay=1e-3, implementation=implementation)
    give_gradients(network, 0)
    optimizer.step()
    file = io.BytesIO()
    torch.save((network.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)

    again = tiny_network(memory_format=torch.channels_last)
    again.load_state_dict(weights)
    second = LARS(again.parameters(), lr() * 0, weight_decay=0.5, implementation=implementation)
    buffers = [second.state[p]["momentum_buffer"] for p in again.parameters()]
    rate = second.param_groups[0]["lr"]
    second.load_state_dict(state)
    # In place, so that a captured graph still points at them; and copies, so that the file's stay what
    # they are.
    assert all(second.state[p]["momentum_buffer"] is b for p, b in zip(again.parameters(), buffers))
    assert second.param_groups[0]["lr"] == pytest.approx(0.9)
    assert (second.param_groups[0]["lr"] is rate) == on_device
    assert second.param_groups[0]["weight_decay"] == 1e-3
    for seed in (1, 2):
        for n, o in ((network, optimizer), (again, second)):
            give_gradients(n, seed)
            o.step()
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), again.parameters()))
    for a, b in zip(network.parameters(), again.parameters()):
        assert torch.equal(optimizer.state[a]["momentum_buffer"], second.state[b]["momentum_buffer"])


def test_momentum_exists_before_the_first_step_in_the_parameters_layout():
    network = tiny_network(torch.bfloat16, torch.channels_last)
    optimizer = LARS(network.parameters(), 0.1)
    for p in network.parameters():
        buffer = optimizer.state[p]["momentum_buffer"]
        assert (buffer.stride(), buffer.dtype) == (p.stride(), p.dtype)
        assert not buffer.any() and not buffer.requires_grad
    assert len(optimizer.state_dict()["state"]) == 8


def test_a_state_of_another_layout_is_loaded_into_this_ones():
    saved, loaded = tiny_network(), tiny_network(memory_format=torch.channels_last)
    optimizer = LARS(saved.parameters(), 0.1)
    give_gradients(saved, 0)
    optimizer.step()
    second = LARS(loaded.parameters(), 0.1)
    second.load_state_dict(optimizer.state_dict())
    for a, b in zip(saved.parameters(), loaded.parameters()):
        buffer = second.state[b]["momentum_buffer"]
        assert buffer.stride() == b.stride() and torch.equal(buffer, optimizer.state[a]["momentum_buffer"])


def test_loading_keeps_this_machines_implementation_and_zeroes_what_the_file_does_not_know():
    network = tiny_network()
    file = LARS(network.parameters(), 0.1, implementation="reference").state_dict()
    del file["state"][0]
    optimizer = LARS(network.parameters(), 0.2, implementation="foreach")
    give_gradients(network, 0)
    optimizer.step()
    optimizer.load_state_dict(file)
    assert optimizer.param_groups[0]["implementation"] == "foreach"
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not any(optimizer.state[p]["momentum_buffer"].any() for p in network.parameters())


def test_a_state_of_another_network_is_refused_with_both_shapes():
    other = LARS([nn.Parameter(torch.zeros(3, 2))], 0.1).state_dict()
    with pytest.raises(
        ValueError, match=r"momentum buffer of shape \(3, 2\) for a parameter of shape \(2,\)"
    ):
        LARS([nn.Parameter(torch.zeros(2))], 0.1).load_state_dict(other)


def test_a_copied_optimizer_steps_its_own_parameters():
    pair = (network := tiny_network(), LARS(network.parameters(), 0.5))
    twin, optimizer = copy.deepcopy(pair)
    for n, o in (pair, (twin, optimizer)):
        give_gradients(n, 0)
        o.step()
    assert all(torch.equal(a, b) and a is not b for a, b in zip(network.parameters(), twin.parameters()))


def test_a_parameter_without_gradient_is_left_as_it_is():
    for implementation in IMPLEMENTATIONS:
        still, moving = (nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = LARS([still, moving], 1.0, weight_decay=0.1, implementation=implementation)
        moving.grad = torch.ones(3)
        optimizer.step()
        assert torch.all(still == 1) and torch.all(moving < 1)
        optimizer.zero_grad()
        optimizer.step()  # and with no gradient at all there is nothing to do


def test_a_closure_is_run_with_gradients_and_its_loss_returned():
    p = nn.Parameter(torch.ones(3))
    optimizer = LARS([p], 1.0)

    def closure():
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3 and torch.all(p < 1)
    assert optimizer.step() is None


def test_a_group_added_later_has_momentum_and_its_own_settings():
    first, second = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = LARS([first], 1.0, weight_decay=0.5)
    optimizer.add_param_group({"params": [second], "lars": False, "weight_decay": 0.0, "lr": 0.25})
    for p in (first, second):
        p.grad = torch.ones(4)
    optimizer.step()
    torch.testing.assert_close(second.data, torch.full((4,), 0.75))
    torch.testing.assert_close(first.data, torch.full((4,), 0.999))


# ------------------------------------------------------------------------------------------------------------
# groups
def test_the_papers_groups_scale_and_decay_everything():
    network = build_model("resnet18", stem="cifar")
    (group,) = parameter_groups(network)
    assert [id(p) for p in group["params"]] == [id(p) for p in network.parameters()]
    assert "lars" not in group and "weight_decay" not in group


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_exclusion_goes_by_module_type_and_so_finds_the_shortcuts_batchnorm(library):
    network = build_model("resnet50", library, head_batchnorm=True)
    names = {id(p): name for name, p in network.named_parameters()}
    scaled, plain = (
        {names[id(p)] for p in g["params"]} for g in parameter_groups(network, exclude_bias_and_norm=True)
    )
    assert scaled == {name for name, p in network.named_parameters() if p.dim() > 1}
    assert scaled | plain == set(names.values()) and not scaled & plain
    missed_by_name = {name for name in plain if "bn" not in name and "bias" not in name}
    assert missed_by_name == {f"encoder.layer{n}.0.downsample.1.weight" for n in (1, 2, 3, 4)} | {
        "head.1.weight"
    }
    settings = parameter_groups(network, exclude_bias_and_norm=True)[1]
    assert settings["lars"] is False and settings["weight_decay"] == 0


def test_every_kind_of_normalisation_is_excluded_and_frozen_parameters_are_nowhere():
    norms = [
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, affine=True),
        nn.SyncBatchNorm(4),
        nn.RMSNorm(4),
    ]
    network = nn.Sequential(*norms, nn.Linear(4, 4), nn.Linear(4, 4))
    network[-1].requires_grad_(False)
    scaled, plain = parameter_groups(network, exclude_bias_and_norm=True)
    assert [id(p) for p in scaled["params"]] == [id(network[-2].weight)]
    assert len(plain["params"]) == 9 + 1
    assert len(parameter_groups(network)[0]["params"]) == 11
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), exclude_bias_and_norm=True)) == 1


# ----------------------------------------------------------------------------------------------------------
# refusals
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lr": -1.0}, "lr must not be negative, got -1.0"),
        ({"lr": torch.zeros(2)}, r"lr must be a number or a 0-dim tensor, got shape \(2,\)"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"weight_decay": -1e-6}, "weight_decay and eps must not be negative"),
        ({"eps": -1.0}, "weight_decay and eps must not be negative"),
        ({"trust_coefficient": 0.0}, "trust_coefficient must be positive, got 0.0"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum above 0"),
        ({"implementation": "triton"}, "'triton' is not one of auto, foreach, reference"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(options, told):
    with pytest.raises(ValueError, match=told):
        LARS([nn.Parameter(torch.zeros(2))], **{"lr": 0.1, **options})


def test_a_sparse_gradient_is_refused_with_the_parameters_shape():
    embedding = nn.Embedding(7, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"shape \(7, 3\) has a sparse gradient"):
        LARS(embedding.parameters(), 0.1).step()
