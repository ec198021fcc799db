"""`model.init`: what the encoder starts from is loaded once, recorded, and not exchanged when the run continues."""

import hashlib
from unittest import mock

import pytest
import safetensors.torch
import timm
import torch
import torchvision

from fastsuncet.checkpoint import manager
from fastsuncet.commands.dry_run import print_plan
from fastsuncet.commands.export import export
from fastsuncet.config import ConfigErrors
from fastsuncet.distributed.place import Place
from fastsuncet.errors import CheckpointError, ConfigError
from fastsuncet.evaluation.encoder import load_encoder
from fastsuncet.models import timm_backbone
from fastsuncet.models.resnet import build_model, projection_head_of
from fastsuncet.training import initial_weights
from tests.support.methods import PAWS, PAWS_HEADS
from tests.support.ranks import run_ranks
from tests.support.runs import assert_equal_to_the_bit, final_state, tiny_config, train

PLACE = Place(0, 1, torch.device("cpu"))


@pytest.fixture
def weights(tmp_path):
    """Return a file of the tiny encoder, other weights than meta.seed=0 gives."""
    model = build_model("resnet_tiny", seed=5)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "init.safetensors")
    return tmp_path / "init.safetensors"


def loaded(config) -> tuple[torch.nn.Module, dict]:
    m = config.model
    model = build_model(m.name, m.stem, *m.head)
    return model, initial_weights.load(config, model, PLACE)


def assert_refused(folder, said: str, *words: str) -> None:
    """Require that the weights of a run are refused by an error of the config that says so, on lines of any length."""
    with pytest.raises(ConfigErrors, match=said.replace(" ", r"\s+")):
        loaded(tiny_config(folder, *words))


def on_a_rank(rank: int, world_size: int, folder, weights) -> dict:
    config = tiny_config(folder, f"model.init={weights if rank == 0 else folder / 'only rank 0 reads it'}")
    model = build_model("resnet_tiny").to(memory_format=torch.channels_last)
    initial_weights.load(config, model, Place(rank, world_size, torch.device("cpu")))
    return dict(model.encoder.state_dict())


# As PAWS's authors name the layers of their heads, and as this project's checkpoints do.
AUTHORS = {
    **{f"head.{n}.": f"fc.{name}." for n, name in {0: "fc1", 1: "bn1", 3: "fc2", 4: "bn2", 6: "fc3"}.items()},
    **{f"predictor.{n}.": f"pred.{name}." for n, name in {0: "bn1", 1: "fc1", 2: "bn2", 4: "fc2"}.items()},
    "encoder.": "",
}


@pytest.mark.parametrize(
    ("of", "batchnorm"), [("the authors", True), ("this project", True), ("this project", "all")]
)
def test_initial_weights_fill_the_heads_of_paws(tmp_path, of, batchnorm):
    words = [*PAWS, *PAWS_HEADS, "swav.small_size=8", "model.hidden=24", "model.output=8"]
    words += ["model.init_heads=true", f"model.init={tmp_path / 'w.pth'}"]
    words += [f"model.head_batchnorm={batchnorm}".lower()]
    theirs = build_model("resnet_tiny", "imagenet", 24, 8, batchnorm, 3, True, seed=5).state_dict()
    found = theirs
    if of == "the authors":  # paws_imgnt_300ep.pth.tar
        named = {}
        for key, x in theirs.items():
            ours = next(prefix for prefix in AUTHORS if key.startswith(prefix))
            named[key.replace(ours, AUTHORS[ours], 1)] = x
        found = {"encoder": {f"module.{key}": x for key, x in named.items()}, "epoch": 300}
    torch.save(found, tmp_path / "w.pth")
    model, record = loaded(tiny_config(tmp_path, *words))
    assert_equal_to_the_bit(dict(model.state_dict()), dict(theirs))
    assert record["note"].startswith("encoder and heads from")
    assert "not loaded" not in record["note"] and "drawn" not in record["note"]
    encoder = load_encoder(tmp_path / "w.pth")
    projection_head_of(encoder.head).load_state_dict(encoder.head)
    last = max(key for key, x in encoder.head.items() if x.ndim == 2)
    assert projection_head_of(encoder.head | {last: torch.zeros(3, 5)}) is None
    torch.save({key: x for key, x in theirs.items() if key.startswith("encoder")}, tmp_path / "w.pth")
    assert_refused(tmp_path, "does not hold the heads", *words)


@pytest.mark.parametrize("name", ["timm/test_vit", "timm/test_convnext"])  # that one has a head of its own
def test_initial_weights_of_timms_networks(tmp_path, name):
    size, path = "data.augmentation.size=48", tmp_path / "w.pth"
    words = [f"model.name={name}", size, f"model.init={path}", "model.init_heads=true"]
    config = tiny_config(tmp_path, *words)
    theirs = build_model(name, config.model.stem, *config.model.head, seed=5)
    torch.save(theirs.state_dict(), path)
    model, _ = loaded(config)
    assert_equal_to_the_bit(dict(model.state_dict()), dict(theirs.state_dict()))
    torch.save({f"module.{key}": x for key, x in theirs.encoder.state_dict().items()}, path)
    found = load_encoder(path, config)
    assert_equal_to_the_bit(dict(found.module.state_dict()), dict(theirs.encoder.state_dict()))
    assert not found.head
    assert_refused(tmp_path, "does not hold the heads", *words)
    torch.save(build_model("resnet_tiny").encoder.state_dict(), path)
    assert load_encoder(path, config).name == "resnet_tiny"


@pytest.mark.slow
def test_initial_weights_are_those_of_rank_0_on_every_rank(tmp_path, weights):
    expected = dict(build_model("resnet_tiny", seed=5).encoder.state_dict())
    for found in run_ranks(on_a_rank, 2, tmp_path, weights):
        assert_equal_to_the_bit(found, expected)


def test_initial_weights_of_torchvision_fill_the_encoder_alone(tmp_path):
    network = torchvision.models.resnet18(num_classes=7)
    torch.save(network.state_dict(), tmp_path / "resnet18.pth")
    words = ["model.name=resnet18", "model.stem=imagenet", f"model.init={tmp_path / 'resnet18.pth'}"]
    config = tiny_config(tmp_path, *words)
    model, record = loaded(config)
    trunk = {key: x for key, x in network.state_dict().items() if not key.startswith("fc.")}
    assert_equal_to_the_bit(dict(model.encoder.state_dict()), trunk)
    drawn = build_model("resnet18", hidden=config.model.hidden)
    assert torch.equal(model.head[0].weight, drawn.head[0].weight)
    assert record["sha256"] == hashlib.sha256((tmp_path / "resnet18.pth").read_bytes()).hexdigest()
    assert "not loaded: the classifier of 7 classes and any projection head" in record["note"]
    assert_refused(tmp_path, r"holds a resnet18, stem imagenet; model\.name", words[-1])


@pytest.mark.parametrize("name", ["resnet18", "timm/test_vit"])
def test_initial_weights_published_by_timm(tmp_path, monkeypatch, name):
    """The tests are offline, so timm gives weights of another seed as its published ones."""
    network = timm.create_model(name.removeprefix("timm/"), num_classes=0)
    given = mock.Mock(return_value=network)
    words = [f"model.name={name}", "model.stem=imagenet", "model.init=timm", "data.augmentation.size=32"]
    config = tiny_config(tmp_path, *words)
    with monkeypatch.context() as patch:
        patch.setattr(timm, "create_model", given)
        tensors, about = timm_backbone.published(name)
    assert given.call_args.kwargs["pretrained"] and about["architecture"] == name.removeprefix("timm/")
    monkeypatch.setattr(timm_backbone, "published", lambda name: (tensors, about))
    model, record = loaded(config)
    assert_equal_to_the_bit(dict(model.encoder.state_dict()), dict(network.state_dict()))
    assert record["path"] == "timm" and "timm's published weights" in record["note"]
    assert f"they were trained with data.augmentation.mean {about['mean']}" in record["note"]
    assert_refused(tmp_path, "is not the sha256 of", *words, f"model.init_sha256={'a' * 64}")


def test_initial_weights_of_timm_without_a_network(monkeypatch):
    def refuse(*_, **__):
        raise OSError(f"offline: {timm_backbone.constants.HF_HUB_OFFLINE}\nmore")

    monkeypatch.setattr(timm, "create_model", refuse)
    monkeypatch.setattr(timm_backbone, "_reachable", lambda: False)
    with pytest.raises(ConfigError, match=r"resnet18 cannot be downloaded .*offline: True\nConnect"):
        timm_backbone.published("resnet18")
    with pytest.raises(ConfigError, match="no published weights of resnet_tiny"):
        timm_backbone.published("resnet_tiny")


def test_initial_weights_refuse_a_wrong_path_or_sha256(tmp_path, weights):
    assert_refused(tmp_path, "is no file of weights", f"model.init={tmp_path / 'nothing'}")
    assert_refused(tmp_path, "is not the sha256 of", f"model.init={weights}", f"model.init_sha256={'a' * 64}")
    with open(tmp_path / "huge.pth", "wb") as file:
        file.truncate(50 << 30)
    with pytest.raises(CheckpointError, match=r"huge\.pth has 54 GB, and files of weights have at most 21"):
        loaded(tiny_config(tmp_path, f"model.init={tmp_path / 'huge.pth'}"))


@pytest.mark.slow
def test_initial_weights_of_a_run_are_read_once(tmp_path, weights, capsys):
    """A resume needs no file and ends with the same bits; a run and its export can be started from."""
    words = [f"model.init={weights}"]
    whole, stopped = (tiny_config(tmp_path / name, *words) for name in ("whole", "stopped"))
    print_plan(whole, show_config=False)
    assert "\ninit     encoder from" in capsys.readouterr().out
    train(whole)
    train(stopped, stop_at=4)
    weights.rename(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="this run was started with"):
        train(tiny_config(tmp_path / "stopped"))
    train(stopped)
    assert_equal_to_the_bit(final_state(stopped), final_state(whole))
    begun = manager.load_newest(whole.run_folder / "checkpoints")
    assert begun.meta["init"]["path"] == str(weights)
    for source in (whole.run_folder, export(whole.run_folder, "torchvision")):
        words = [f"model.init={source}", "data.augmentation.std=[1,1,0.5]"]
        model, record = loaded(tiny_config(tmp_path, *words))
        assert torch.equal(model.encoder.conv1.weight, begun.model["encoder.conv1.weight"])
        note = "; they were trained with data.augmentation.mean (0.0, 0.0, 0.0) and std (1.0,"
        assert note in record["note"]
    torch.save(build_model("resnet_tiny").encoder.state_dict(), source)
    with pytest.raises(CheckpointError, match="was changed after it was exported"):
        loaded(tiny_config(tmp_path, f"model.init={source}"))


def test_initial_weights_check_refuses_other_weights_on_resume(tmp_path, weights):
    begun = {"init": {"path": str(weights), "sha256": "a" * 64, "note": ""}}
    initial_weights.check(tiny_config(tmp_path, f"model.init={weights}"), begun)
    moved = [f"model.init={tmp_path / 'moved'}"]
    initial_weights.check(tiny_config(tmp_path, *moved, f"model.init_sha256={'a' * 64}"), begun)
    for words, meta, said in (
        ([], begun, "was started with model.init: /.* of sha256 a+, and it is null now"),
        (moved, {"init": None}, "was started with model.init: null, and it is /.*moved now"),
        (moved, begun, f"set model.init_sha256={'a' * 64} if the file was only moved"),
        ([*moved, f"model.init_sha256={'b' * 64}"], begun, "of sha256 a+, and it is .* of sha256 b+ now"),
    ):
        with pytest.raises(CheckpointError, match=said):
            initial_weights.check(tiny_config(tmp_path, *words), meta)
