"""The network is the paper's: its shapes, names and initial distribution; and only the seed decides it."""

import json
import math

import pytest
import torch
import torchvision
from torch import nn

from fastsuncet.errors import ConfigError
from fastsuncet.models.resnet import WIDTHS, build_model, initialise
from tests.support.vectors import FOLDER


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_the_resnet50_has_the_papers_parameter_counts(library):
    model = build_model(library=library)
    assert count(model.encoder) == 23_508_032
    assert count(model) == 27_966_656
    assert count(build_model(library=library, stem="cifar")) == 27_958_976


@pytest.mark.parametrize("name", ["resnet50", "resnet34", "resnet18"])
@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_the_encoder_has_torchvisions_keys_and_shapes_and_loads_into_it(name, library):
    encoder = build_model(name, library).encoder
    reference = torchvision.models.get_model(name, weights=None)
    shapes = {key: tuple(value.shape) for key, value in encoder.state_dict().items()}
    assert shapes == {
        key: tuple(value.shape) for key, value in reference.state_dict().items() if not key.startswith("fc.")
    }
    reference.fc = nn.Identity()
    reference.load_state_dict(encoder.state_dict())
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(encoder.eval()(images), reference.eval()(images), rtol=1e-5, atol=1e-6)


def test_the_keys_are_those_of_the_authors_checkpoints():
    path = FOLDER / "state_dict_keys_v0.json"
    if not path.exists():
        pytest.skip(f"no {path.name}: set FASTSUNCET_VECTORS to the folder that holds the authors' vectors")
    authors = {key: shape for key, (shape, _) in json.loads(path.read_text()).items()}
    ours = {
        key.removeprefix("encoder.").replace("head.", "fc."): list(value.shape)
        for key, value in build_model().state_dict().items()
    }
    assert ours == authors


def test_one_seed_gives_the_same_weights_from_either_library_and_another_seed_others():
    first = build_model("resnet18", "torchvision", seed=5).state_dict()
    second = build_model("resnet18", "timm", seed=5).state_dict()
    other = build_model("resnet18", "torchvision", seed=6).state_dict()
    assert list(first) == list(second)
    assert all(torch.equal(first[key], second[key]) for key in first)
    drawn = [key for key, value in first.items() if value.dim() > 1 or "head" in key]
    assert len(drawn) == 20 + 4
    assert not any(torch.equal(first[key], other[key]) for key in drawn)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_building_neither_reads_nor_moves_the_global_random_state(library):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model("resnet18", library)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = build_model("resnet18", library)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_on_the_meta_device_there_are_shapes_and_no_weights(library):
    shapes = build_model("resnet18", library, device="meta")
    weights = build_model("resnet18", library)
    assert all(p.is_meta for p in (*shapes.parameters(), *shapes.buffers()))
    assert {k: (v.shape, v.dtype) for k, v in shapes.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in weights.state_dict().items()
    }


@pytest.mark.parametrize(("library", "stem"), [("torchvision", "imagenet"), ("timm", "cifar")])
def test_weights_start_as_the_authors_do(library, stem):
    model = build_model("resnet50", library, stem)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            deviation = math.sqrt(2 / (module.out_channels * module.kernel_size[0] * module.kernel_size[1]))
            size = module.weight.numel()
            assert abs(module.weight.mean()) < 5 * deviation / math.sqrt(size), name
            assert module.weight.std().item() == pytest.approx(deviation, rel=5 / math.sqrt(2 * size)), name
        elif isinstance(module, nn.BatchNorm2d):
            # No zero-initialised last gamma: every residual branch speaks from the first step.
            assert torch.all(module.weight == 1) and torch.all(module.bias == 0), name
            assert torch.all(module.running_mean == 0) and torch.all(module.running_var == 1), name
            assert module.num_batches_tracked == 0 and module.eps == 1e-5 and module.momentum == 0.1, name
        elif isinstance(module, nn.Linear):
            for drawn in (module.weight, module.bias):
                bound = 1 / math.sqrt(module.in_features)
                assert 0.9 * bound < drawn.abs().max() <= bound, name
                spread = 5 * math.sqrt(0.2 / drawn.numel())  # five standard errors of a uniform's deviation
                assert drawn.std().item() == pytest.approx(bound / math.sqrt(3), rel=spread), name


def test_the_cifar_stem_hands_the_first_block_every_pixel_and_the_imagenet_stem_a_sixteenth():
    for stem, side in (("cifar", 32), ("imagenet", 8)):
        for library in ("torchvision", "timm"):
            seen = []
            model = build_model("resnet18", library, stem).eval()
            model.encoder.layer1.register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x[0].shape))
            model(torch.zeros(1, 3, 32, 32))
            assert seen == [(1, 64, side, side)]


@pytest.mark.parametrize("name", WIDTHS)
def test_forward_is_the_head_on_what_encode_returns(name):
    model = build_model(name, stem="cifar", hidden=24, output=10).eval()
    images = torch.randn(2, 3, 16, 16)
    h = model.encode(images)
    assert h.shape == (2, model.width) == (2, WIDTHS[name])
    linear, relu, last = model.head
    assert isinstance(relu, nn.ReLU)
    expected = (h @ linear.weight.T + linear.bias).clamp(min=0) @ last.weight.T + last.bias
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [16, 28, 32])
def test_the_tiny_network_halves_twice_and_has_three_residual_blocks(size):
    model = build_model("resnet_tiny", stem="cifar", hidden=64, output=32)
    shapes = []
    for stage in (model.encoder.layer1, model.encoder.layer2, model.encoder.layer3):
        stage.register_forward_hook(lambda _, __, output: shapes.append(tuple(output.shape)))
    assert model(torch.zeros(2, 3, size, size)).shape == (2, 32)
    assert shapes == [(2, 16, size, size), (2, 32, size // 2, size // 2), (2, 64, size // 4, size // 4)]
    assert count(model.encoder) == 77_392


def test_head_batchnorm_sits_before_the_relu_and_changes_the_keys():
    with_norm = build_model("resnet_tiny", stem="cifar", head_batchnorm=True).head
    assert [type(layer).__name__ for layer in with_norm] == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    plain = build_model("resnet_tiny", stem="cifar").head
    assert list(plain.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_every_parameter_gets_a_gradient():
    model = build_model("resnet_tiny", stem="cifar")
    model(torch.randn(4, 3, 16, 16)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"name": "resnet51"}, r"model\.name: no network named 'resnet51'; one of resnet50, "),
        ({"library": "keras"}, r"model\.library: 'keras' is not one of torchvision, timm"),
        ({"stem": "patch"}, r"model\.stem: 'patch' is not one of imagenet, cifar"),
        (
            {"name": "resnet_tiny", "library": "timm"},
            r"timm has no resnet_tiny; set model\.library to torchvision",
        ),
    ],
)
def test_a_network_that_does_not_exist_is_refused_with_what_does(arguments, told):
    with pytest.raises(ConfigError, match=told):
        build_model(**arguments)


def test_a_layer_without_an_initial_distribution_is_refused_not_left_as_found():
    with pytest.raises(TypeError, match="no rule for the parameters of PReLU"):
        initialise(nn.Sequential(nn.Linear(2, 2), nn.PReLU()), seed=0)
