"""Every kind of file gives the same encoder; what is none ends in a message that says what it is."""

import argparse
import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import torchvision

from fastsuncet.checkpoint import manager
from fastsuncet.config import Config, load_config
from fastsuncet.distributed.place import Place
from fastsuncet.errors import CheckpointError, ConfigError
from fastsuncet.evaluation.encoder import choose, load_chosen, load_encoder
from fastsuncet.models.pretrained_weights import read_weights_of, require_fit
from fastsuncet.models.resnet import build_model
from tests.support.checkpoints import HARMS, save_model
from tests.support.exports import built, features
from tests.support.ranks import run_ranks
from tests.support.runs import CONFIGS


@pytest.fixture(scope="module")
def config():
    return load_config(CONFIGS / "digits_demo.yaml")


def test_load_encoder_takes_a_run_its_checkpoints_or_one_of_them(tmp_path, config):
    """The checkpoint says which network it is; the config can be of another one."""
    model = built()
    save_model(tmp_path, config, model, 10, 20)
    other = load_config(CONFIGS / "in1k_10pct.yaml")
    for where in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step_00000020"):
        encoder = load_encoder(where, other)
        assert torch.equal(features(encoder.module), features(model.encoder))
        assert (encoder.width, encoder.name, encoder.stem) == (64, "resnet_tiny", config.model.stem)
        assert (encoder.step, encoder.epoch, encoder.method) == (20, 5.0, "SimCLR + SuNCEt")
        assert encoder.ledger["updates"] == 20
        assert all(p.requires_grad for p in encoder.module.parameters())
        json.dumps(encoder.record())
    assert [path.name for path in choose(tmp_path, step=10)] == ["step_00000010"]


def on_disks_of_their_own(rank: int, world_size: int, folder: Path, config: Config) -> None:
    os.chdir(folder / str(rank))
    with pytest.raises(ConfigError, match=r"not started alike\. the weights in run/checkpoints/.*00010:"):
        next(load_chosen(Place(rank, world_size, torch.device("cpu")), config, Path("run"), None))


@pytest.mark.slow
def test_ranks_that_read_different_weights_are_refused(tmp_path, config):
    model = built()
    for rank in range(2):
        save_model(tmp_path / str(rank) / "run", config, model, 10)
        next(model.parameters()).data.neg_()
    run_ranks(on_disks_of_their_own, 2, tmp_path, config)


def test_load_encoder_refuses_a_run_of_other_pixels_or_another_version(tmp_path, config):
    save_model(tmp_path, config, built(), 10)
    other = load_config(CONFIGS / "digits_demo.yaml", ["data.augmentation.std=[0.5, 0.5, 0.5]"])
    with pytest.raises(ConfigError, match=r"10 was trained .*std=\[1,1,1\], but .*std=\[0.5,0.5,0.5\]"):
        load_encoder(tmp_path, other)
    meta = {"config": config.canonical() | {"tomorrow": {"key": 1}}}
    manager.save(
        tmp_path / "checkpoints", 11, model={"encoder.x": torch.ones(1)}, state={}, meta=meta, keep=2
    )
    alone, said = Place(0, 1, torch.device("cpu")), "does not say what network it holds"
    for load in (load_encoder, lambda run: [*load_chosen(alone, config, run, None, every=True)]):
        with pytest.raises(CheckpointError, match=said):
            load(tmp_path)


def test_choose_lists_good_checkpoints_and_names_a_damaged_one(tmp_path, config, capsys):
    save_model(tmp_path, config, built(), 30, 10, 20)
    HARMS["flipped"](tmp_path / "checkpoints" / "step_00000020" / "model.safetensors")
    assert [path.name for path in choose(tmp_path, every=True)] == ["step_00000010", "step_00000030"]
    (line,) = capsys.readouterr().out.splitlines()
    assert "step_00000020" in line
    assert load_encoder(tmp_path, config).step == 30  # `latest` names the damaged one
    with pytest.raises(ConfigError, match=r"step 20\. It has 10, 30"):
        choose(tmp_path, step=20)


def test_choose_refuses_what_it_cannot_find(tmp_path, config):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for where in (tmp_path / "empty", tmp_path / "empty" / "checkpoints"):
        with pytest.raises(CheckpointError, match=r"no checkpoint that can be used.*checkpoint\.every"):
            choose(where)
    with pytest.raises(ConfigError, match=r"nowhere does not exist\. An encoder is"):
        choose(tmp_path / "nowhere")
    save_model(tmp_path, config, built(), 10)
    with pytest.raises(ConfigError, match="is one checkpoint"):
        choose(tmp_path / "checkpoints" / "step_00000010", step=10)


def wrapped(state: dict, how: str) -> dict:
    """Return `state` as trainers save it: with a prefix, below a key, next to an optimizer and an epoch."""
    prefix, _, key = how.partition(" in ")
    inner = {f"{prefix}{name}": value for name, value in state.items()}
    optimizer = {"state": {0: {"momentum": torch.ones(2)}}}
    return {key: inner, "optimizer": optimizer, "epoch": 3} if key else inner


@pytest.mark.slow
@pytest.mark.parametrize(("name", "library"), [("resnet34", "torchvision"), ("resnet50", "timm")])
def test_load_encoder_reads_files_of_torchvision_and_timm(tmp_path, config, name, library):
    make = torchvision.models.get_model if library == "torchvision" else timm.create_model
    network = make(name, num_classes=7).eval()
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    encoder = load_encoder(tmp_path / "weights.pth", config)
    assert (encoder.name, encoder.stem) == (name, "imagenet")
    assert encoder.width == network.fc.in_features
    assert (encoder.step, encoder.ledger, encoder.method) == (None, None, None)
    network.fc = torch.nn.Identity()
    torch.testing.assert_close(features(encoder.module), features(network))


def without(state: dict, *parts: str) -> dict:
    return {key: value for key, value in state.items() if not any(part in key for part in parts)}


def of_the_authors(state: dict, prefix: str, *layers: str) -> dict:
    """Return what SuNCEt's or PAWS's authors save, with the `layers` of their heads."""
    for layer in layers:
        state |= {f"{layer}.weight": torch.randn(4, 4), f"{layer}.bias": torch.randn(4)}
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"params": [0]}]}
    content = {"encoder": {f"{prefix}{key}": value for key, value in state.items()}, "opt": optimizer}
    return content | {"epoch": 100, "unlabel_prob": 0.9, "s_batch_size": 2, "u_batch_size": 44, "amp": None}


FILES = {
    "as it is": lambda s: s,
    "below a prefix": lambda s: wrapped(s, "module.encoder_q."),
    "below a key": lambda s: wrapped(s, "module. in state_dict"),
    "averaged": lambda s: {"state_dict": {k: 0 * x for k, x in s.items()}, "state_dict_ema": s},
    "to be averaged": lambda s: {"model": s, "model_ema": {"decay": 0.99}},
    "DINO's": lambda s: {"student": {k: 0 * x for k, x in s.items()}, "teacher": wrapped(s, "backbone.")},
    "below both": lambda s: wrapped(s, "encoder. in model"),
    "old, without num_batches_tracked": lambda s: without(s, "num_batches_tracked"),
    "SuNCEt's": lambda s: of_the_authors(s, "", "fc.0", "fc.2"),
    "PAWS's": lambda s: of_the_authors(
        s, "module.", "fc.fc1", "fc.bn1", "fc.fc2", "fc.bn2", "fc.fc3", "pred.fc1"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FILES)
def test_load_encoder_finds_the_weights_in_any_file(tmp_path, config, what):
    """A projection head is no classifier."""
    network, path = built(stem="cifar").encoder, tmp_path / "weights.pth.tar"
    torch.save(FILES[what](dict(network.state_dict())), path)
    encoder = load_encoder(path, config)
    assert (encoder.name, encoder.stem, encoder.width) == ("resnet_tiny", "cifar", 64)
    assert torch.equal(features(encoder.module), features(network)) and encoder.classifier is None


@pytest.mark.slow
def test_load_encoder_reads_float16_of_safetensors_as_float32(tmp_path, config):
    network = built().encoder
    half = {k: v.half() if v.is_floating_point() else v for k, v in network.state_dict().items()}
    safetensors.torch.save_file(half, tmp_path / "WEIGHTS.SAFETENSORS")
    module = load_encoder(tmp_path / "WEIGHTS.SAFETENSORS", config).module
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert torch.equal(module.conv1.weight, network.conv1.weight.half().float())


@pytest.mark.slow
def test_load_encoder_keeps_a_classifier_that_fits(tmp_path, config):
    def classifier_of(weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Linear | None:
        state = built().encoder.state_dict() | {"fc.weight": weight, "fc.bias": bias}
        torch.save({"model": state}, tmp_path / "weights.pth")
        return load_encoder(tmp_path / "weights.pth", config).classifier

    weight, bias = torch.randn(7, 64), torch.randn(7)
    kept = classifier_of(weight, bias)
    assert torch.equal(kept.weight, weight) and torch.equal(kept.bias, bias)
    for other in ((torch.ones(7, 99), bias), (weight, torch.ones(3)), (torch.ones(7, 64, 1), bias)):
        assert classifier_of(*other) is None


def plus(key: str, *shape: int):
    return lambda state: state | {key: torch.ones(shape)}


def changed(change):
    return lambda state: state | {"bn1.weight": change(state["bn1.weight"])}


# What the file holds instead of the state of a resnet_tiny, a block in each of three stages, -> what the message says.
SPOILED = {
    "another depth": (plus("layer3.1.conv1.weight", 64, 64, 3, 3), r"1-1-2 blocks of two.*resnet50"),
    "another width": (plus("layer1.0.conv1.weight", 8, 16, 3, 3), r"conv1\.weight is \(8, .*expected \(16, "),
    "another family": (lambda s: {"features.0.weight": torch.ones(8, 3)}, r"no ResNet.*features\.0\.weight"),
    "missing keys": (lambda s: without(s, "layer3.0.conv1"), r"missing: layer3\.0\.conv1\.weight"),
    "a stage too few": (lambda s: without(s, "layer3"), "1-1 blocks"),
    "extra layers": (plus("attnpool.weight", 1), r"other keys than conv1.*attnpool\.weight"),
    "extra in a block": (plus("layer1.0.se.weight", 1), r"not in this network: layer1\.0\.se\.weight"),
    "not a number": (changed(lambda x: x * float("nan")), r"not finite.*bn1\.weight"),
    "no values": (changed(lambda x: x.to("meta")), r"bn1\.weight \(without values"),
    "sparse": (changed(torch.Tensor.to_sparse), r"bn1\.weight \(torch\.sparse_coo\)"),
    "quantized": (changed(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)), r"\(quantized\)"),
    "int64": (changed(lambda x: x.to(torch.int64)), r"bn1\.weight \(torch\.int64\)"),
    "expanded": (changed(lambda x: torch.ones(1).expand(1 << 36)), r"from fewer values to 274\.9 GB"),
    "two networks": (
        lambda s: wrapped(s, "encoder_q.") | wrapped(s, "encoder_k."),
        r"holds 2 networks, under encoder_q\., encoder_k\.",
    ),
    "no tensors": (lambda s: {"epoch": 3, "note": "x"}, "holds no state_dict but the keys epoch, note"),
    "a list": (lambda s: [torch.ones(2)], "holds no state_dict but a list"),
    # A pickle, which is not run.
    "a class": (
        lambda s: s | {"args": argparse.Namespace(lr=1)},
        r"Namespace.*nothing of it was read(?s:.*)torch\.save",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SPOILED)
def test_load_encoder_says_what_does_not_fit(tmp_path, config, what):
    spoil, said = SPOILED[what]
    torch.save(spoil(dict(built().encoder.state_dict())), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=said) as caught:
        load_encoder(tmp_path / "weights.pth", config)
    assert str(tmp_path / "weights.pth") in str(caught.value)


@pytest.mark.parametrize("what", ["sparse", "two networks"])
def test_read_weights_of_a_timm_network_refuses_what_is_not_its_weights(tmp_path, what):
    spoil, said = SPOILED[what]
    state = build_model("timm/test_resnet").encoder.state_dict()
    torch.save(spoil(dict(state)), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=said):
        read_weights_of("timm/test_resnet", tmp_path / "weights.pth")


def test_load_encoder_takes_timms_network_of_the_config_or_a_resnet(tmp_path):
    config = load_config(CONFIGS / "digits_demo.yaml", ["model.name=timm/test_resnet"])
    path = tmp_path / "weights.pth"
    network = timm.create_model("test_resnet", num_classes=7).eval()
    torch.save(network.state_dict(), path)
    encoder = load_encoder(path, config)
    assert (encoder.name, encoder.width) == ("timm/test_resnet", network.num_features)
    assert torch.equal(encoder.classifier.weight, network.fc.weight)
    network.fc = torch.nn.Identity()
    torch.testing.assert_close(features(encoder.module), features(network))
    torch.save(built().encoder.state_dict(), path)
    assert load_encoder(path, config).name == "resnet_tiny"
    torch.save({"a": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match=r"missing: conv1\.0\.weight"):  # of the config's network
        load_encoder(path, config)


CLASSIFIERS = {
    "without a bias": ("test_resnet", lambda s: without(s, "fc.bias"), "fc"),
    "a convolution": ("dla46x_c", lambda s: s, "fc"),
    "several layers, and int64": ("efficientformer_l1", lambda s: s, None),
    "with a head": ("test_resnet", lambda s: plus("head.0.bias", 7)(wrapped(s, "encoder.")), "encoder.fc"),
    "an MLP": ("test_resnet", lambda s: without(s, "fc.") | {"fc.0.weight": torch.ones(7, 9)}, None),
}


@pytest.mark.parametrize("what", CLASSIFIERS)
def test_read_weights_of_a_timm_network_keeps_a_linear_classifier_alone(tmp_path, what):
    name, change, layer = CLASSIFIERS[what]
    state = change(timm.create_model(name, num_classes=7).state_dict())
    torch.save(state, tmp_path / "weights.pth")
    weights = read_weights_of(f"timm/{name}", tmp_path / "weights.pth")
    require_fit(build_model(f"timm/{name}", device="meta").encoder, weights.encoder, name)
    if layer is None:
        assert weights.classifier is None
    else:
        weight, bias = weights.classifier
        assert torch.equal(weight, state[f"{layer}.weight"].flatten(1))
        assert torch.equal(bias, state.get(f"{layer}.bias", torch.zeros(7)))


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 cut short", b"\x80\x02}q\x00."])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_load_encoder_refuses_bytes_that_are_no_weights(tmp_path, config, content, suffix):
    path = tmp_path / f"file{suffix}"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not a file of tensors|no state_dict"):
        load_encoder(path, config)
