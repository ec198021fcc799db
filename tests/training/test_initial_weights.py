"""`model.init`: what the encoder starts from is loaded once, recorded, and not exchanged when the run continues."""

import hashlib

import pytest
import safetensors.torch
import torch
import torchvision

from fastsuncet.checkpoint import manager
from fastsuncet.commands.export import export
from fastsuncet.commands.train import plan
from fastsuncet.config import ConfigErrors
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import CheckpointError
from fastsuncet.models.resnet import build_model
from fastsuncet.training import initial_weights
from tests.support.ranks import run_ranks
from tests.support.runs import assert_equal_to_the_bit, final_state, small_config, train

PLACE = Place(0, 1, 0, torch.device("cpu"))


@pytest.fixture
def weights(tmp_path):
    """Return a file of the tiny encoder, other weights than meta.seed=0 gives."""
    model = build_model("resnet_tiny", seed=5)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "init.safetensors")
    return tmp_path / "init.safetensors"


def loaded(config) -> tuple[torch.nn.Module, dict]:
    m = config.model
    model = build_model(m.name, m.library, m.stem, m.hidden, m.output)
    record = initial_weights.load(config, model.encoder, PLACE)
    assert record is not None
    return model, record


def test_initial_weights_fill_the_encoder_and_leave_the_head(tmp_path, weights):
    config = small_config(tmp_path, f"model.init={weights}")
    model, record = loaded(config)
    theirs, drawn = build_model("resnet_tiny", seed=5), build_model("resnet_tiny", hidden=config.model.hidden)
    assert_equal_to_the_bit(dict(model.encoder.state_dict()), dict(theirs.encoder.state_dict()))
    assert torch.equal(model.head[0].weight, drawn.head[0].weight)
    assert record["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert "not loaded: any projection head" in record["note"] and str(weights) in record["note"]
    assert initial_weights.load(small_config(tmp_path), model.encoder, PLACE) is None


def on_a_rank(rank: int, world_size: int, folder, weights) -> dict:
    config = small_config(folder, f"model.init={weights if rank == 0 else folder / 'only rank 0 reads it'}")
    encoder = build_model("resnet_tiny").encoder.to(memory_format=torch.channels_last)
    initial_weights.load(config, encoder, Place(rank, world_size, rank, torch.device("cpu")))
    return dict(encoder.state_dict())


@pytest.mark.slow
def test_initial_weights_are_those_of_rank_0_on_every_rank(tmp_path, weights):
    expected = dict(build_model("resnet_tiny", seed=5).encoder.state_dict())
    for found in run_ranks(on_a_rank, 2, tmp_path, weights):
        assert_equal_to_the_bit(found, expected)


def test_initial_weights_of_torchvision_say_what_is_not_loaded(tmp_path):
    network = torchvision.models.resnet18(num_classes=7)
    torch.save(network.state_dict(), tmp_path / "resnet18.pth")
    words = ["model.name=resnet18", "model.stem=imagenet", f"model.init={tmp_path / 'resnet18.pth'}"]
    model, record = loaded(small_config(tmp_path, *words))
    assert torch.equal(model.encoder.conv1.weight, network.conv1.weight)
    assert "not loaded: the classifier of 7 classes and any projection head" in record["note"]
    with pytest.raises(
        ConfigErrors, match=r"holds\s+a\s+resnet18,\s+stem\s+imagenet;\s+model\.name\s+is\s+resnet_tiny"
    ):
        loaded(small_config(tmp_path, words[-1]))


def test_initial_weights_refuse_a_wrong_path_or_sha256(tmp_path, weights):
    with pytest.raises(ConfigErrors, match=r"is\s+no\s+file\s+of\s+weights"):
        loaded(small_config(tmp_path, f"model.init={tmp_path / 'nothing'}"))
    with pytest.raises(ConfigErrors, match=r"is\s+not\s+the\s+sha256\s+of"):
        loaded(small_config(tmp_path, f"model.init={weights}", f"model.init_sha256={'a' * 64}"))
    with pytest.raises(ConfigErrors, match=r"is\s+read\s+only\s+with\s+model\.init"):
        small_config(tmp_path, f"model.init_sha256={'a' * 64}")


@pytest.mark.slow
def test_initial_weights_of_a_run_are_read_once(tmp_path, weights):
    """A resume needs no file and ends with the same bits; a run and its export can be started from."""
    words = [f"model.init={weights}"]
    whole, stopped = (small_config(tmp_path / name, *words) for name in ("whole", "stopped"))
    assert any("encoder from" in line for line in plan(whole)[0])
    train(whole)
    train(stopped, stop_at=4)
    weights.rename(tmp_path / "elsewhere.safetensors")
    train(stopped)
    assert_equal_to_the_bit(final_state(stopped), final_state(whole))
    meta = manager.load_newest(whole.run_folder / "checkpoints").meta
    assert meta["init"]["path"] == str(weights)
    begun = manager.load_newest(whole.run_folder / "checkpoints").model
    for source in (whole.run_folder, export(whole.run_folder, "torchvision")):
        model, _ = loaded(small_config(tmp_path, f"model.init={source}"))
        assert torch.equal(model.encoder.conv1.weight, begun["encoder.conv1.weight"])


def test_initial_weights_check_refuses_other_weights_on_resume(tmp_path, weights):
    begun = {"init": {"path": str(weights), "sha256": "a" * 64, "note": ""}}
    initial_weights.check(small_config(tmp_path, f"model.init={weights}"), begun)
    moved = [f"model.init={tmp_path / 'moved'}"]
    initial_weights.check(small_config(tmp_path, *moved, f"model.init_sha256={'a' * 64}"), begun)
    for words, meta, said in (
        ([], begun, "was started from .*, and model.init is None now"),
        (moved, {}, "was started without model.init, and model.init is .*moved now"),
        (moved, begun, f"set model.init_sha256={'a' * 64} if the file was only moved"),
        ([*moved, f"model.init_sha256={'b' * 64}"], begun, "from weights with the sha256 a+, and"),
    ):
        with pytest.raises(CheckpointError, match=said):
            initial_weights.check(small_config(tmp_path, *words), meta)
