"""The network is the paper's: shapes, names and initial distribution; only the arguments decide its weights."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from fastsuncet.models.resnet import build_model, initialize
from tests.support.runs import assert_equal_to_the_bit
from tests.support.vectors import FOLDER


def shapes(module):
    return {key: tuple(value.shape) for key, value in module.state_dict().items()}


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_model_keys_are_those_of_the_authors_checkpoints():
    path = FOLDER / "state_dict_keys_v0.json"
    if not path.exists():
        pytest.skip(f"no {path.name}: set FASTSUNCET_VECTORS to the folder that holds the authors' vectors")
    authors = {key: tuple(shape) for key, (shape, _) in json.loads(path.read_text()).items()}
    ours = shapes(build_model(device="meta")).items()
    assert {key.removeprefix("encoder.").replace("head.", "fc."): shape for key, shape in ours} == authors


@pytest.mark.parametrize(("name", "drawn"), [("resnet18", 20 + 4), ("timm/test_vit", 32)])
def test_weights_depend_on_the_seed_alone(name, drawn):
    """Not on the global random state, which stays as it is."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model(name, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second, other = (build_model(name, seed=seed).state_dict() for seed in (5, 6))
    assert_equal_to_the_bit(dict(first), dict(second))
    assert sum(not torch.equal(x, other[key]) for key, x in first.items()) == drawn


def test_weights_start_as_the_authors_do():
    for name, module in build_model("resnet50").named_modules():
        if isinstance(module, nn.Conv2d):
            deviation = math.sqrt(2 / (module.out_channels * module.kernel_size[0] * module.kernel_size[1]))
            size = module.weight.numel()
            assert abs(module.weight.mean()) < 5 * deviation / math.sqrt(size), name
            assert module.weight.std().item() == pytest.approx(deviation, rel=5 / math.sqrt(2 * size)), name
        elif isinstance(module, nn.BatchNorm2d):
            # The last gamma is 1, not 0: every residual branch contributes from the first step.
            assert torch.all(module.weight == 1) and torch.all(module.bias == 0), name
            assert torch.all(module.running_mean == 0) and torch.all(module.running_var == 1), name
            assert module.num_batches_tracked == 0 and module.eps == 1e-5 and module.momentum == 0.1, name
        elif isinstance(module, nn.Linear):
            for drawn in (module.weight, module.bias):
                bound = 1 / math.sqrt(module.in_features)
                assert 0.9 * bound < drawn.abs().max() <= bound, name
                # Five standard errors of a uniform distribution's deviation.
                spread = 5 * math.sqrt(0.2 / drawn.numel())
                assert drawn.std().item() == pytest.approx(bound / math.sqrt(3), rel=spread), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "resnet18"])
def test_encoder_gives_the_bits_of_torchvisions(name):
    """In a training step: outputs, gradients and statistics. Its state_dict loads into torchvision's network."""
    own = build_model(name).encoder
    with torch.device("meta"):
        theirs = torchvision.models.get_model(name, weights=None)
    theirs.fc = nn.Identity()
    theirs.load_state_dict(copy.deepcopy(own.state_dict()), assign=True)
    images, found = torch.randn(2, 3, 64, 64), []
    for encoder in (own, theirs):
        h = encoder(images)
        h.square().sum().backward()
        gradients = {key: p.grad for key, p in encoder.named_parameters()}
        found.append([h, *gradients.values(), *encoder.state_dict().values()])
    assert len(found[0]) == len(found[1]) and all(torch.equal(a, b) for a, b in zip(*found))


def test_wide_network_halves_twice_and_normalizes_before_its_convolutions():
    model = build_model("wide_resnet28w2", stem="cifar", hidden=128, head_batchnorm=True, head_layers=3)
    seen = []
    for name, stage in model.encoder.named_children():
        stage.register_forward_hook(lambda _, __, output, name=name: seen.append((name, tuple(output.shape))))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 128)
    sides = [(f"layer{n}", (2, 32 * 2 ** (n - 1), 2 ** (6 - n), 2 ** (6 - n))) for n in (1, 2, 3)]
    assert seen[1:4] == sides and seen[4] == ("bn1", (2, 128, 8, 8))
    # 28 layers: 25 convolutions of 3 x 3, 3 of 1 x 1 on shortcuts; the authors' has 2,032 biases more.
    assert count(model.encoder) == 1_466_320
    block = model.encoder.layer2[0].double()
    x = torch.randn(4, 32, 8, 8, dtype=torch.float64)
    inner = block.conv1(F.batch_norm(x, None, None, training=True).relu())
    expected = block.conv2(F.batch_norm(inner, None, None, training=True).relu()) + block.shortcut(x)
    torch.testing.assert_close(block(x), expected)


def test_heads_of_paws_and_of_simclrs_authors_have_their_layers():
    """PAWS on ImageNet: 2048-2048-2048-2048 with BatchNorm, then 2048-512-2048, which begins with one."""
    model = build_model(output=2048, head_batchnorm=True, head_layers=3, prediction_head=True, device="meta")
    simclrs = build_model(head_batchnorm="all", device="meta")
    names = ["Linear", "BatchNorm1d", "ReLU"]
    assert [type(layer).__name__ for layer in model.head] == [*names, *names, "Linear"]
    assert [type(layer).__name__ for layer in simclrs.head] == [*names, "Linear", "BatchNorm1d"]
    assert [type(layer).__name__ for layer in model.predictor] == ["BatchNorm1d", *names, "Linear"]
    assert count(model.head) == 3 * (2048**2 + 2048) + 2 * 2 * 2048
    assert count(model.predictor) == 2 * 2048 + (2048 * 512 + 512) + 2 * 512 + (512 * 2048 + 2048)


def test_stride_over_one_pixel_has_its_gradient_in_bfloat16():
    convolution = build_model("resnet_tiny", seed=1).encoder.layer3[0].conv1
    expected, generator = torch.zeros_like(convolution.weight), torch.Generator().manual_seed(0)
    for _ in range(10):
        written = [torch.full_like(convolution.weight, math.nan, dtype=torch.bfloat16) for _ in range(3)]
        del written  # what a kernel that does not write its result returns
        x = torch.randn(12, 32, 1, 1, generator=generator).bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            convolution(x).sum().backward()
        expected[..., 1, 1] += x.float().sum(0)[:, 0, 0]  # the other weights see padding alone
    torch.testing.assert_close(convolution.weight.grad, expected, rtol=0.02, atol=0.1)


def test_initialize_refuses_a_layer_without_a_rule():
    with pytest.raises(TypeError, match="no rule for the parameters of PReLU"):
        initialize(nn.Sequential(nn.Linear(2, 2), nn.PReLU()), seed=0)
