"""The optimizers' settings, parameter groups, learning rate on the device, and state."""

import pytest
import timm
import torch
from torch import nn

from fastsuncet.config.schema import OptimizationSection
from fastsuncet.models.resnet import build_model
from fastsuncet.optim import LARS, parameter_groups
from fastsuncet.training.step import build_optimizer

RATES = [0.0, 0.1, 0.03, 0.2]


def section(optimizer: str, **settings) -> OptimizationSection:
    values = {"optimizer": optimizer, "steps": 4, "lr": 0.1, "momentum": 0.8, "weight_decay": 0.05}
    return OptimizationSection(**values | settings)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4)).double()


def updated(model: torch.nn.Module, optimizer, steps: range) -> list[torch.Tensor]:
    for step in steps:
        optimizer.set_lr(RATES[step])
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


LARS_SETTINGS = {"nesterov": True, "trust_coefficient": 0.01, "lr_in_momentum": True}


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "settings", "by_hand"),
    [
        ("adamw", {}, lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.999))),
        ("sgd", {}, lambda groups: torch.optim.SGD(groups, momentum=0.8)),
        ("sgd", {"nesterov": True}, lambda groups: torch.optim.SGD(groups, momentum=0.8, nesterov=True)),
        ("lars", LARS_SETTINGS, lambda groups: LARS(groups, 0.0, momentum=0.8, **LARS_SETTINGS)),
    ],
    ids=["adamw", "sgd", "nesterov", "lars"],
)
def test_optimizer_obeys_each_of_its_settings(optimizer, settings, by_hand, exclude):
    """With exclusion only the matrix decays. By hand the rate is on the host, and torch's optimizers are not fused."""
    model, twin = network(), network()
    plain = [exclude and p.dim() == 1 for p in twin.parameters()]
    decays = [{"weight_decay": 0.0 if each else 0.05, "lars": not each} for each in plain]
    theirs = by_hand([{"params": [p], **decay} for p, decay in zip(twin.parameters(), decays)])
    theirs.set_lr = lambda lr: [group.update(lr=lr) for group in theirs.param_groups]
    config = section(optimizer, exclude_bias_and_norm=exclude, **settings)
    found = updated(model, build_optimizer(config, model, torch.zeros(())), range(4))
    for ours, wanted in zip(found, updated(twin, theirs, range(4))):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-7)  # the rate is float32


@pytest.mark.parametrize("optimizer", ["lars", "adamw", "sgd"])
def test_state_continues_to_the_bit_and_keeps_the_tensor_of_the_rate(optimizer):
    model, rate = network(), torch.zeros(())
    straight = updated(model, build_optimizer(section(optimizer), model, rate), range(4))
    model = network()
    first = build_optimizer(section(optimizer), model, torch.zeros(()))
    updated(model, first, range(2))
    second = build_optimizer(section(optimizer), model, rate)
    second.load_state_dict(first.state_dict())
    assert all(group["lr"] is rate for group in second.param_groups)
    assert float(rate) == pytest.approx(RATES[1])
    for got, wanted in zip(updated(model, second, range(2, 4)), straight):
        assert torch.equal(got, wanted)


def vit_with_a_frozen_classifier() -> nn.Module:
    network = timm.create_model("test_vit4")
    network.head.requires_grad_(False)
    return network


@pytest.mark.parametrize(
    ("made", "unnamed"),
    [
        # The shortcut's gamma is not called "bn".
        (
            lambda: build_model("resnet50", head_batchnorm=True, device="meta"),
            {*(f"encoder.layer{n}.0.downsample.1.weight" for n in (1, 2, 3, 4)), "head.1.weight"},
        ),
        # timm's RmsNorm and its scales of layers are no classes of torch's.
        (
            vit_with_a_frozen_classifier,
            {
                *(f"blocks.{i}.{part}" for i in range(9) for part in ("norm1.weight", "norm2.weight")),
                *(f"blocks.{i}.{part}.gamma" for i in range(9) for part in ("ls1", "ls2")),
                "fc_norm.weight",
            },
        ),
    ],
    ids=["resnet50", "vit"],
)
def test_groups_exclude_every_normalization_and_frozen_parameters(made, unnamed):
    network = made()
    names = {id(p): name for name, p in network.named_parameters() if p.requires_grad}
    groups = parameter_groups(network, exclude_bias_and_norm=True)
    scaled, plain = ({names[id(p)] for p in group["params"]} for group in groups)
    assert scaled == {name for name, p in network.named_parameters() if p.requires_grad and p.dim() > 1}
    assert scaled | plain == set(names.values()) and not scaled & plain
    assert {name for name in plain if "bn" not in name and not name.endswith("bias")} == unnamed
    assert groups[1]["lars"] is False and groups[1]["weight_decay"] == 0
    assert len(parameter_groups(network)[0]["params"]) == len(names)
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), exclude_bias_and_norm=True)) == 1
