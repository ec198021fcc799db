"""Fine-tuning: against a float64 oracle, in passes, on ranks, stopped, killed, refused."""

import math
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from fastsuncet.checkpoint import manager
from fastsuncet.commands.finetune import require_norm
from fastsuncet.config import Config, ConfigErrors
from fastsuncet.distributed.place import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import CheckpointError, ConfigError, Preempted
from fastsuncet.evaluation import features
from fastsuncet.evaluation.encoder import Encoder, linear_layer, load_encoder
from fastsuncet.evaluation.finetuning import fit, frozen
from fastsuncet.evaluation.finetuning.record import with_sizes
from fastsuncet.models.resnet import build_model
from pipelines.datasets.index import ImageIndex
from tests.support import runs
from tests.support.colors import ALONE
from tests.support.ranks import run_ranks
from tests.support.runs import Killed, kill, metrics, terminate

pytestmark = pytest.mark.slow

CLASSES = 3
MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.25, 0.2)


def pictures(count: int, *, seed: int = 0, several: bool = False) -> ImageIndex:
    """Return 8 x 8 images in memory, in noise, whose class is the strongest of the three colors.

    With `several` the index says of each class whether it is in the image.
    """
    draws = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    pixels = draws.integers(0, 90, (count, 8, 8, 3))
    pixels[np.arange(count), :, :, labels] += 120
    presence = np.where(labels[:, None] == np.arange(CLASSES), 1, -1).astype(np.int8) if several else None
    names, classes = list(map(str, range(count))), ("red", "green", "blue")
    arrays = {"pixels": pixels.astype(np.uint8), "presence": presence}
    return ImageIndex(None, names, labels, classes, np.full((count, 2), 8, np.int32), **arrays)


def encoder_of(module: nn.Module, width: int) -> Encoder:
    return Encoder(module, width, "resnet_tiny", "cifar", "made here", 7, 1.5, {"updates": 7}, "SimCLR")


def plain_encoder() -> Encoder:
    """Without BatchNorm, an image's output depends on no other image."""
    torch.manual_seed(2)
    layers = (nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(54, 16), nn.ReLU())
    return encoder_of(nn.Sequential(*layers), 16)


def resnet() -> Encoder:
    return encoder_of(build_model("resnet_tiny", stem="cifar", seed=4).encoder, 64)


def config_in(folder: Path, **values) -> Config:
    """Return the config of a fine-tuning of 12 images an update, with other `values` of its section."""
    fast = ("data.backend=torchvision", "data.decode_threads=1", "logging.log_every=2", "meta.device=cpu")
    pixels = (f"data.augmentation.mean={list(MEAN)}", f"data.augmentation.std={list(STD)}")
    config = runs.small_config(folder, *fast, *pixels, "data.augmentation.size=8", "meta.seed=5")
    own = {"head": "zero", "batch_size": 12, "lr": 0.1, "crop_scale": (0.3, 1.0)}
    return with_sizes(config, **own | values)


def run(folder: Path, steps=6, encoder=None, place=ALONE, train=None, **values) -> SimpleNamespace:
    """Fine-tune on 40 of 45 images, evaluate on 10 others."""
    torch.set_num_threads(1)
    options = {"steps": steps, "bn_momentum": values.pop("bn_momentum", None)}
    encoder, config = encoder or plain_encoder(), config_in(folder, **values)
    images = (train or pictures(45), np.arange(5, 45)[::-1].copy())
    task = fit.FineTuning(encoder, *images, config, place, folder, also=options, **options)
    with SignalFlag() as signals:
        logits, trainer = fit.fit(task, pictures(10, seed=1), np.arange(10), signals)
    loss, accuracy = trainer.means
    kept = {"loss": loss, "accuracy": accuracy, "ledger": trainer.ledger, "model": task.model}
    return SimpleNamespace(logits=logits, **kept)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return manager.load_newest(folder / "checkpoints").model


@pytest.mark.parametrize("several", [False, True])
def test_fit_learns_a_separable_set(tmp_path, several):
    result = run(tmp_path, 60, train=pictures(45, several=several))
    assert result.logits.shape == (10, CLASSES) and result.logits.dtype == torch.float32
    wanted = np.arange(10)[:, None] % CLASSES == np.arange(CLASSES)
    found = result.logits > (0 if several else result.logits.mean(1, keepdim=True))
    assert (found.numpy() == wanted).all()
    assert result.accuracy > 0.9 and (result.ledger.views, result.ledger.updates) == (60 * 12, 60)


def cosine(step: int) -> float:
    return 0.1 * (1 + math.cos(math.pi * step / 6)) / 2


@pytest.mark.parametrize(("nesterov", "decay", "passes"), [(True, 0.0, 1), (False, 0.05, 1), (True, 0.05, 3)])
def test_fit_steps_as_torchs_sgd_in_float64(tmp_path, nesterov, decay, passes):
    """In one pass or several, with a learning rate that falls along half a cosine."""
    values = {"nesterov": nesterov, "weight_decay": decay}
    result = run(tmp_path, accumulate=passes, **values)
    rates = [(line["step"], line["lr"]) for line in metrics(tmp_path)]
    assert rates == [(step, pytest.approx(cosine(step - 1))) for step in (2, 4, 6)]
    stream = fit.FineTuningStream(pictures(45), np.arange(5, 45), config_in(tmp_path), ALONE)
    layer = linear_layer(torch.zeros(CLASSES, 16), torch.zeros(CLASSES))
    model = nn.Sequential(OrderedDict(encoder=plain_encoder().module, classifier=layer)).double()
    sgd, losses = torch.optim.SGD(model.parameters(), momentum=0.9, **values), []
    for step in range(6):
        images, labels = stream(step, 0)
        sgd.param_groups[0]["lr"] = cosine(step)
        sgd.zero_grad()
        losses.append(nn.functional.cross_entropy(model(images.double()), labels))
        losses[-1].backward()
        sgd.step()
    assert result.loss == pytest.approx((losses[4] + losses[5]).item() / 2, rel=1e-5)
    found = weights(tmp_path)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name].double(), p.detach(), rtol=2e-5, atol=2e-6)


def test_stream_shows_each_image_once_an_epoch_in_its_own_color(tmp_path):
    index = pictures(45)
    index.pixels[:] = [10, 200, 90]
    config = config_in(tmp_path, batch_size=40)
    images, labels = fit.FineTuningStream(index, np.arange(40), config, ALONE)(3, 0)
    color = (torch.tensor([10, 200, 90]) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(images, color.view(3, 1, 1).expand(40, 3, 8, 8), rtol=0, atol=2e-3)
    assert sorted(labels.tolist()) == sorted(index.labels[:40].tolist())


def test_batchnorm_momentum_can_be_set_and_a_batch_of_all_images_is_an_epoch(tmp_path):
    result = run(tmp_path, 2, resnet(), bn_momentum=0.25, batch_size=40)
    assert {m.momentum for m in result.model.modules() if isinstance(m, nn.BatchNorm2d)} == {0.25}
    assert result.ledger.views == 80 and metrics(tmp_path)[-1]["epoch"] == 2


def test_sigmoid_loss_has_no_loss_and_no_gradient_where_presence_is_unknown():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    presence = torch.tensor([[1, -1, 0, 1], [-1, -1, -1, -1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, -1, 1]])
    loss, right = fit.sigmoid_loss(logits, presence.to(torch.int8))
    signed = (presence * logits.detach())[presence != 0]
    assert loss.item() == pytest.approx((-signed).exp().log1p().sum().item() / 20, rel=1e-6)
    assert right.item() == pytest.approx((signed > 0).sum().item() / 20)
    loss.backward()
    assert ((logits.grad == 0) == (presence == 0)).all()


def test_update_after_one_that_overflows_is_the_first(tmp_path, monkeypatch):
    """In fp16 the first update often overflows. torch's own fused SGD then reads momentum that nothing has written."""
    monkeypatch.setattr(torch, "empty_like", lambda x, **how: torch.full_like(x, torch.nan, **how))
    images, found = (pictures(45), np.arange(45)), []
    for overflows in (False, True):
        encoder, config = plain_encoder(), config_in(tmp_path / str(overflows))
        task = fit.FineTuning(encoder, *images, config, ALONE, tmp_path, steps=2)
        task.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in [torch.inf] * overflows + [1.0]:
            task.loss = lambda x, labels, by=factor: (fit.softmax_loss(x, labels)[0] * by, labels[0])
            task.train_step(iter([task.stream(0, 0)]), 0.1)
        task.stream.close()
        found.append([x.detach() for x in task.model.parameters()])
    assert all(map(torch.equal, *found))


def test_strong_classifier_moves_the_encoder_by_no_more_than_the_bound(tmp_path):
    """A classifier's large weights are large gradients of the encoder; in fp16 times the scaler's scale."""
    images, encoder = (pictures(45), np.arange(45)), plain_encoder()
    weight, config = torch.randn(CLASSES, 16) * 1e3, config_in(tmp_path, head="linear")
    start = fit.Frozen(encoder.module, False, weight, torch.zeros(CLASSES), 1.0, {})
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4.0)):
        task = fit.FineTuning(encoder, *images, config, ALONE, tmp_path, steps=2, frozen=start)
        task.scaler = scaler or task.scaler
        before = [x.detach().clone() for x in task.model.parameters()]
        task.train_step(iter([task.stream(0, 0)]), 0.1)
        task.stream.close()
        moved = [x.detach() - y for x, y in zip(task.model.parameters(), before)]
        # Nesterov's first step is 1 + momentum times the gradient, whose norm is 1 now.
        assert torch.stack([x.norm() for x in moved]).norm().item() == pytest.approx(0.1 * 1.9, rel=1e-3)


def on_rank(rank: int, world_size: int, folder: str, passes: tuple[int, ...]) -> dict:
    place = Place(rank, world_size, ALONE.device)
    for accumulate in passes:
        result = run(Path(folder, str(accumulate)), 2, resnet(), place, accumulate=accumulate)
    return {"logits": result.logits, "loss": result.loss, "views": result.ledger.views}


def test_two_ranks_are_two_passes_of_one_also_in_batchnorm(tmp_path):
    """And two ranks in two passes are four passes of one. All evaluate every image once.

    After two updates: from then on a ReLU near 0 can fall on either side, by the rounding of the processor.
    """
    first, second = run_ranks(on_rank, 2, str(tmp_path / "ranks"), (1, 2))
    assert first["logits"].shape == (10, CLASSES) and torch.equal(first["logits"], second["logits"])
    alone = {number: run(tmp_path / str(number), 2, resnet(), accumulate=number) for number in (1, 2, 4)}
    for found in (first, second):
        assert found["views"] == 24 and found["loss"] == pytest.approx(alone[4].loss, rel=1e-5)
    one, two, four = (weights(tmp_path / str(accumulate)) for accumulate in alone)
    ours, in_passes = (weights(tmp_path / "ranks" / passes) for passes in "12")
    for name in two:
        if "running" not in name and "tracked" not in name:  # statistics are each rank's own
            torch.testing.assert_close(ours[name], two[name], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(in_passes[name], four[name], rtol=1e-4, atol=1e-6)
    assert (ours["classifier.weight"] - one["classifier.weight"]).abs().max() > 1e-4, "BatchNorm was shared"
    # Rank 0 normalizes the first half of a batch: its statistics are not those of both halves.
    assert not torch.allclose(ours["encoder.bn1.running_mean"], two["encoder.bn1.running_mean"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, SimpleNamespace]:
    """The folder and the result of an undisturbed fit."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, encoder=resnet())


# Saved are steps 3 and 6; 6 is the evaluation.
@pytest.mark.parametrize(
    ("how", "at"), [(terminate, 0), (terminate, 2), (terminate, 6), (kill, 2), (kill, 5), (kill, 6)]
)
def test_fit_stopped_anywhere_continues_to_the_bit(tmp_path, monkeypatch, whole, at, how):
    opened, done = features.open_evaluation_loader, min(at + 1, 6)
    stopped = pytest.raises(Killed)
    if how is terminate:
        stopped = pytest.raises(Preempted, match=f"SIGTERM: saved after step {done}; the same command")
    with monkeypatch.context() as patch, runs.interrupted_at(fit.FineTuningStream, at, how):
        if at == 6:
            patch.setattr(features, "open_evaluation_loader", lambda *a, **more: how() or opened(*a, **more))
        with stopped:
            run(tmp_path, encoder=resnet())
    result = run(tmp_path, encoder=resnet())
    folder, expected = whole
    assert torch.equal(result.logits, expected.logits)
    assert (result.loss, result.accuracy) == (expected.loss, expected.accuracy)
    assert result.ledger.views == expected.ledger.views
    ours, theirs = (manager.load_newest(path / "checkpoints") for path in (tmp_path, folder))
    runs.assert_equal_to_the_bit([ours.model, ours.state], [theirs.model, theirs.state])
    assert metrics(tmp_path) == metrics(folder)


def test_fit_keeps_the_last_network_only_with_the_cost_of_its_pre_training(whole):
    folder, _ = whole
    assert [path.name for path in (folder / "checkpoints").glob("step_*")] == ["step_00000006"]
    encoder = load_encoder(folder)
    assert (encoder.step, encoder.epoch, encoder.method, encoder.tuned) == (7, 1.5, "SimCLR", 6)
    assert encoder.ledger == {"updates": 7} and encoder.stem == "cifar"


def test_fit_in_a_folder_of_other_weights_or_images_is_refused(tmp_path):
    run(tmp_path)
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file())
    other = plain_encoder()
    with torch.no_grad():
        other.module[0].weight[0, 0, 0, 0] += 1
    with pytest.raises(CheckpointError, match="encoder: "):
        run(tmp_path, encoder=other)
    with pytest.raises(CheckpointError, match="images: "):
        run(tmp_path, train=pictures(45, seed=8))
    assert run(tmp_path).logits.shape == (10, CLASSES)
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()) == before


def test_fit_that_does_not_fit_a_gpu_names_its_key(tmp_path, monkeypatch):
    # Its first product is behind the encoder's activations: cuBLAS takes memory of its own then.
    full = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    monkeypatch.setattr(fit.FineTuning, "train_step", mock.Mock(side_effect=full))
    said = r"finetune.batch_size.* CUBLAS_STATUS_ALLOC_FAILED .*\. Lower it, or set finetune.accumulate"
    with pytest.raises(ConfigError, match=said):
        run(tmp_path)


def test_mean_square_makes_no_second_copy_of_the_features(monkeypatch):
    """Of all of ImageNet's two in float64 are 42 GB of a GPU."""
    sizes, double = [], torch.Tensor.double
    monkeypatch.setattr(frozen, "ROWS", 4)
    monkeypatch.setattr(torch.Tensor, "double", lambda x: sizes.append(x.numel()) or double(x))
    h = torch.arange(30.0).view(10, 3)
    assert frozen.mean_square(h) == h.square().sum().item() / 10 and max(sizes) == 4 * 3


def test_pass_that_overflows_batchnorms_index_is_refused(tmp_path):
    """The default batch on one GPU: a ResNet-18 has 51 GB of activations there, which a card of 80 GB holds."""
    config = config_in(tmp_path, batch_size=4096).with_values({"data.augmentation.size": 224})
    place = Place(0, 1, torch.device("cuda", 0))
    encoder = Encoder(nn.Identity(), 512, "resnet18", "imagenet", "here")
    text = r"finetune\.batch_size.*\(4096, 64, 112, 112\).*2,674 views at most\. Set finetune\.accumulate"
    with pytest.raises(ConfigError, match=text):
        require_norm(config, place, encoder)
    require_norm(with_sizes(config, accumulate=2), place, encoder)
    one = with_sizes(config, accumulate=4096)
    require_norm(one, place, encoder)
    said = "a pass one image of 32 pixels, one value a channel for BatchNorm"
    with pytest.raises(ConfigErrors, match=said):
        require_norm(one.with_values({"data.augmentation.size": 32}), place, encoder)
