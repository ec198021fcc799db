"""Which parameters are scaled and decayed, and which are plain SGD."""

from torch import nn

from fastsuncet.models.resnet import build_model
from fastsuncet.optim import parameter_groups


def test_groups_of_the_paper_scale_and_decay_everything():
    network = build_model("resnet18", stem="cifar", device="meta")
    (group,) = parameter_groups(network)
    assert [id(p) for p in group["params"]] == [id(p) for p in network.parameters()]
    assert "lars" not in group and "weight_decay" not in group


def test_groups_exclusion_finds_the_shortcuts_batchnorm():
    """Exclusion goes by the module's type: the shortcut's gamma is not called "bn"."""
    network = build_model("resnet50", head_batchnorm=True, device="meta")
    names = {id(p): name for name, p in network.named_parameters()}
    groups = parameter_groups(network, exclude_bias_and_norm=True)
    scaled, plain = ({names[id(p)] for p in group["params"]} for group in groups)
    assert scaled == {name for name, p in network.named_parameters() if p.dim() > 1}
    assert scaled | plain == set(names.values()) and not scaled & plain
    assert {name for name in plain if "bn" not in name and "bias" not in name} == {
        *(f"encoder.layer{n}.0.downsample.1.weight" for n in (1, 2, 3, 4)),
        "head.1.weight",
    }
    assert groups[1]["lars"] is False and groups[1]["weight_decay"] == 0


def test_groups_exclude_every_normalization_and_frozen_parameters():
    norms = [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.SyncBatchNorm(4), nn.RMSNorm(4)]
    norms.append(nn.InstanceNorm2d(4, affine=True))
    network = nn.Sequential(*norms, nn.Linear(4, 4), nn.Linear(4, 4))
    network[-1].requires_grad_(False)
    scaled, plain = parameter_groups(network, exclude_bias_and_norm=True)
    assert [id(p) for p in scaled["params"]] == [id(network[-2].weight)]
    assert len(plain["params"]) == 9 + 1
    assert len(parameter_groups(network)[0]["params"]) == 11
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), exclude_bias_and_norm=True)) == 1
