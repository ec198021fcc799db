"""The fit of an encoder and a classifier: against a float64 oracle, in parts, on ranks, stopped, killed, refused."""

import json
import math
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fastsuncet.checkpoint import manager
from fastsuncet.distributed.launch import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import CheckpointError, NumericalError, Preempted
from fastsuncet.evaluation.encoder import Encoder, load_encoder
from fastsuncet.evaluation.supervised.fine_tuning import FitResult, FitSettings, fit
from fastsuncet.evaluation.supervised.network import Classifier, sigmoid_loss
from fastsuncet.evaluation.supervised.stream import FineTuningStream
from fastsuncet.models.resnet import build_model
from pipelines.datasets.index import ImageIndex
from pipelines.sampling.augmentation import Augmentation
from tests.support.ranks import run_ranks
from tests.support.runs import TIMED, assert_equal_to_the_bit, small_config

CPU = torch.device("cpu")
ALONE = Place(0, 1, 0, CPU)
CLASSES = 3
SETTING = FitSettings(
    steps=6,
    batch=12,
    lr=0.1,
    momentum=0.9,
    nesterov=True,
    weight_decay=0.0,
    size=8,
    resize=8,
    crop_scale=(0.3, 1.0),
    mean=(0.5, 0.4, 0.3),
    std=(0.5, 0.25, 0.2),
    num_classes=CLASSES,
    loss="softmax",
    bn_momentum=None,
    seed=5,
    precision="fp32",
    accumulate=1,
    save_every=3,
)


def pictures(count: int, *, seed: int = 0) -> ImageIndex:
    """8 x 8 images in memory whose class is which of the three colours is strongest; noise beside it."""
    draws = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    pixels = draws.integers(0, 90, (count, 8, 8, 3))
    pixels[np.arange(count), :, :, labels] += 120
    return ImageIndex(
        root=None,
        files=[f"{i}" for i in range(count)],
        labels=labels.astype(np.int64),
        classes=("red", "green", "blue"),
        sizes=np.full((count, 2), 8, np.int32),
        pixels=pixels.astype(np.uint8),
        presence=np.where(labels[:, None] == np.arange(CLASSES), 1, -1).astype(np.int8),
    )


def plain_encoder() -> Encoder:
    """No BatchNorm: what an image gives depends on no other image."""
    torch.manual_seed(2)
    module = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(54, 16), nn.ReLU()
    )
    return Encoder(module, 16, "resnet_tiny", "cifar", "made here", 7, 1.5, {"updates": 7}, "SimCLR")


def resnet() -> Encoder:
    module = build_model("resnet_tiny", stem="cifar", seed=4).encoder
    return Encoder(module, 64, "resnet_tiny", "cifar", "made here", 7, 1.5, {"updates": 7}, "SimCLR")


def config_in(folder: Path, *overrides: str):
    fast = ("data.backend=torchvision", "data.decode_threads=1", "logging.log_every=2", "meta.device=cpu")
    return small_config(folder, *fast, *overrides)


def run(
    folder: Path,
    setting: FitSettings = SETTING,
    encoder: Encoder | None = None,
    place: Place = ALONE,
    train: ImageIndex | None = None,
) -> FitResult:
    """A fit of 40 of 45 images, evaluated on 10 others."""
    torch.set_num_threads(1)
    train, validation = train or pictures(45), pictures(10, seed=1)
    indices, asked = np.arange(45)[5:][::-1].copy(), np.arange(10)
    config = config_in(folder)
    encoder = encoder or plain_encoder()
    identity = {key: value for key, value in asdict(setting).items() if key != "save_every"}
    with SignalFlag() as signals:
        return fit(
            encoder,
            train,
            indices,
            validation,
            asked,
            setting,
            place,
            folder,
            config,
            signals=signals,
            identity=identity,
        )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return manager.load_newest(folder / "checkpoints").model


def lines(folder: Path) -> list[dict]:
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMED} for line in told]


# ------------------------------------------------------------------------------------------------------- what it learns
def test_a_separable_set_is_learnt_whole(tmp_path):
    done = run(tmp_path, replace(SETTING, steps=45))
    assert done.logits.shape == (10, CLASSES) and done.logits.dtype == torch.float32
    assert (done.logits.argmax(1).numpy() == np.arange(10) % CLASSES).all()
    assert done.accuracy > 0.9 and (done.ledger.images, done.ledger.updates) == (45 * 12, 45)


def test_the_classifier_begins_at_zero_and_draws_nothing(tmp_path):
    torch.manual_seed(9)
    before = torch.get_rng_state()
    model = Classifier(nn.Flatten(), 12, 5)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model(torch.randn(4, 3, 2, 2)), torch.zeros(4, 5))
    done = run(tmp_path, replace(SETTING, steps=1))
    assert done.loss == pytest.approx(math.log(CLASSES), rel=1e-6), "classes do not begin equally likely"


def cosine(lr: float, step: int, steps: int) -> float:
    return lr * (1 + math.cos(math.pi * step / steps)) / 2


@pytest.mark.parametrize(("nesterov", "decay"), [(True, 0.0), (False, 0.05), (True, 0.05)])
def test_the_weights_are_those_of_nesterovs_formula_in_float64(tmp_path, nesterov, decay):
    setting = replace(SETTING, nesterov=nesterov, weight_decay=decay)
    run(tmp_path, setting)
    view = Augmentation(8, (0.3, 1.0), jitter=0, grey=0, blur=0, mean=setting.mean, std=setting.std)
    sizes = {"batch": 12, "passes": 1, "seed": 5, "multi_label": False}
    stream = FineTuningStream(
        pictures(45),
        np.arange(5, 45),
        view,
        config_in(tmp_path),
        ALONE,
        **sizes,
    )
    model = Classifier(plain_encoder().module, 16, CLASSES).double()
    speed = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(setting.steps):
        images, labels = stream(step, 0)
        logp = model(images.double()).log_softmax(1)
        gradients = torch.autograd.grad(-logp[torch.arange(12), labels].mean(), list(model.parameters()))
        with torch.no_grad():
            for p, v, g in zip(model.parameters(), speed, gradients, strict=True):
                g = g + decay * p
                v.mul_(0.9).add_(g)
                p -= cosine(0.1, step, setting.steps) * (g + 0.9 * v if nesterov else v)
    found = weights(tmp_path)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name].double(), p.detach(), rtol=2e-5, atol=2e-6)


def test_the_learning_rate_falls_along_half_a_cosine(tmp_path):
    run(tmp_path)
    told = [(line["step"], line["lr"]) for line in lines(tmp_path)]
    assert told == [(step, pytest.approx(cosine(0.1, step - 1, 6))) for step in (2, 4, 6)]


def test_an_image_is_cropped_and_flipped_and_its_colour_left_alone(tmp_path):
    index = pictures(45)
    index.pixels[:] = [10, 200, 90]
    view = Augmentation(8, (0.3, 1.0), jitter=0, grey=0, blur=0)
    sizes = {"batch": 40, "passes": 1, "seed": 0, "multi_label": False}
    stream = FineTuningStream(index, np.arange(40), view, config_in(tmp_path), ALONE, **sizes)
    images, labels = stream(3, 0)
    assert torch.equal(
        (images * 255).round(), torch.tensor([10.0, 200, 90]).view(1, 3, 1, 1).expand(40, 3, 8, 8)
    )
    assert sorted(labels.tolist()) == sorted(index.labels[:40].tolist()), "each image once an epoch"


# ------------------------------------------------------------------------------------------------ in parts and on ranks
def close(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], but: str = "running|tracked"
) -> None:
    for name in ours:
        if not any(part in name for part in but.split("|")):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6, msg=name)


def test_an_update_in_passes_is_the_update_in_one(tmp_path):
    whole = run(tmp_path / "1")
    for passes in (2, 3):
        parts = run(tmp_path / str(passes), replace(SETTING, accumulate=passes))
        close(weights(tmp_path / "1"), weights(tmp_path / str(passes)))
        torch.testing.assert_close(parts.logits, whole.logits, rtol=1e-4, atol=1e-5)
        assert parts.loss == pytest.approx(whole.loss, rel=1e-5)


def on_rank(rank: int, world_size: int, folder: str, kind: str, passes: int) -> dict:
    place = Place(rank, world_size, rank, CPU)
    encoder = plain_encoder() if kind == "plain" else resnet()
    setting = replace(SETTING, accumulate=passes, steps=4)
    done = run(Path(folder), setting, encoder, place)
    return {"logits": done.logits, "loss": done.loss, "images": done.ledger.images}


def test_three_ranks_equal_one_and_count_ten_images_once(tmp_path):
    ranks = run_ranks(on_rank, 3, str(tmp_path / "ranks"), "plain", 1)
    alone = run(tmp_path / "alone", replace(SETTING, steps=4))
    for told in ranks:
        assert told["logits"].shape == (10, CLASSES), (
            "an image is missing, or one that filled up a rank counts"
        )
        assert torch.equal(told["logits"], ranks[0]["logits"])
        torch.testing.assert_close(told["logits"], alone.logits, rtol=1e-4, atol=1e-5)
        assert told["images"] == 48 and told["loss"] == pytest.approx(alone.loss, rel=1e-5)
    close(weights(tmp_path / "ranks"), weights(tmp_path / "alone"))


def test_batchnorm_is_each_ranks_own_so_two_ranks_equal_two_passes_of_one(tmp_path):
    run_ranks(on_rank, 2, str(tmp_path / "ranks"), "resnet", 1)
    run(tmp_path / "passes", replace(SETTING, accumulate=2, steps=4), resnet())
    run(tmp_path / "whole", replace(SETTING, steps=4), resnet())
    ours, passes, whole = (weights(tmp_path / name) for name in ("ranks", "passes", "whole"))
    close(ours, passes)
    assert (ours["classifier.weight"] - whole["classifier.weight"]).abs().max() > 1e-4, "BatchNorm was shared"
    # Rank 0 normalises the first half of a batch: its statistics are not those of both halves.
    assert not torch.allclose(ours["encoder.bn1.running_mean"], passes["encoder.bn1.running_mean"])


def test_two_ranks_in_two_passes_equal_four_passes_of_one(tmp_path):
    run_ranks(on_rank, 2, str(tmp_path / "ranks"), "resnet", 2)
    run(tmp_path / "passes", replace(SETTING, accumulate=4, steps=4), resnet())
    close(weights(tmp_path / "ranks"), weights(tmp_path / "passes"))


def test_batchnorms_momentum_can_be_set(tmp_path):
    encoder = resnet()
    run(tmp_path, replace(SETTING, bn_momentum=0.25, steps=1), encoder)
    assert {m.momentum for m in encoder.module.modules() if isinstance(m, nn.BatchNorm2d)} == {0.25}


# ----------------------------------------------------------------------------------------------------- several classes
def test_what_is_not_asked_has_no_loss_and_no_gradient():
    logits = torch.randn(
        5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    presence = torch.tensor([[1, -1, 0, 1], [-1, -1, -1, -1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, -1, 1]])
    loss, right = sigmoid_loss(logits, presence.to(torch.int8))
    wanted, correct = 0.0, 0
    for row, asked in zip(logits.tolist(), presence.tolist(), strict=True):
        for value, there in zip(row, asked, strict=True):
            wanted += math.log1p(math.exp(-there * value)) if there else 0.0
            correct += bool(there) and (value > 0) == (there > 0)
    assert loss.item() == pytest.approx(wanted / 20, rel=1e-6) and right.item() == pytest.approx(correct / 20)
    loss.backward()
    assert (logits.grad[presence == 0] == 0).all() and (logits.grad[presence != 0] != 0).all()


def test_several_classes_an_image_are_learnt_from_presence(tmp_path):
    done = run(tmp_path, replace(SETTING, loss="sigmoid", steps=60))
    wanted = np.arange(10)[:, None] % CLASSES == np.arange(CLASSES)
    assert ((done.logits.numpy() > 0) == wanted).all()


# ----------------------------------------------------------------------------------------------- stopped and continued
class Killed(BaseException):
    """What kill -9 leaves behind: no handler ran, nothing was saved on the way out."""


def interrupt(monkeypatch, at: int, how) -> None:
    """Calls `how()` when the fit asks for the images of step `at`."""
    read = FineTuningStream.__call__

    def watched(stream, step, part):
        if (step, part) == (at, 0):
            how()
        return read(stream, step, part)

    monkeypatch.setattr(FineTuningStream, "__call__", watched)


def kill() -> None:
    raise Killed


@pytest.mark.parametrize("at", [0, 2, 3, 5])  # saved are steps 3 and 6
@pytest.mark.parametrize("gently", [True, False], ids=["SIGTERM", "SIGKILL"])
def test_a_fit_stopped_anywhere_is_continued_to_the_bit(tmp_path, monkeypatch, at, gently):
    whole = run(tmp_path / "whole", encoder=resnet())
    cut = tmp_path / "cut"
    last = at == SETTING.steps - 1
    with monkeypatch.context() as patch:
        if gently:
            interrupt(patch, at, lambda: os.kill(os.getpid(), signal.SIGTERM))
            with pytest.raises(Preempted, match=f"SIGTERM: saved after step {at + 1}; the same command"):
                run(cut, encoder=resnet())
        else:
            interrupt(patch, at, kill)
            with pytest.raises(Killed):
                run(cut, encoder=resnet())
    done = run(cut, encoder=resnet())
    assert torch.equal(done.logits, whole.logits)
    assert (done.loss, done.accuracy) == (whole.loss, whole.accuracy)
    assert done.ledger.images == whole.ledger.images
    ours, theirs = (manager.load_newest(folder / "checkpoints") for folder in (cut, tmp_path / "whole"))
    assert_equal_to_the_bit([ours.model, ours.state], [theirs.model, theirs.state])
    assert lines(cut) == lines(tmp_path / "whole")
    assert last or not gently or ours.step == SETTING.steps


def test_only_the_last_network_is_kept_and_can_be_evaluated(tmp_path):
    done = run(tmp_path, encoder=resnet())
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_00000006"]
    encoder = load_encoder(tmp_path, config_in(tmp_path))
    assert (encoder.step, encoder.epoch, encoder.method, encoder.tuned) == (7, 1.5, "SimCLR", 6)
    assert encoder.ledger == {"updates": 7} and encoder.stem == "cifar"
    pixels = torch.from_numpy(pictures(10, seed=1).pixels).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (SETTING.mean, SETTING.std))
    with torch.no_grad():
        logits = encoder.classifier(encoder.module.eval()((pixels - mean) / std))
    torch.testing.assert_close(logits, done.logits, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------- what is refused
def test_a_folder_begun_with_other_settings_or_weights_names_what_differs(tmp_path):
    run(tmp_path)
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(CheckpointError, match=r"lr: 0\.1 there, 0\.2 now\n  seed: 5 there, 6 now"):
        run(tmp_path, replace(SETTING, lr=0.2, seed=6))
    other = plain_encoder()
    with torch.no_grad():
        other.module[0].weight[0, 0, 0, 0] += 1
    with pytest.raises(CheckpointError, match="encoder: "):
        run(tmp_path, encoder=other)
    with pytest.raises(CheckpointError, match="images: "):
        run(tmp_path, train=pictures(45, seed=8))
    assert run(tmp_path, replace(SETTING, save_every=2)).logits.shape == (10, CLASSES), "when to save is free"
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()) == before


def test_a_batch_of_all_images_is_an_epoch(tmp_path):
    done = run(tmp_path, replace(SETTING, batch=40, steps=2))
    assert done.ledger.images == 80 and lines(tmp_path)[-1]["epoch"] == 2


def test_a_loss_that_is_no_number_saves_nothing_and_names_images(tmp_path):
    with pytest.raises(NumericalError, match="cross_entropy is not a finite number at step"):
        run(tmp_path, replace(SETTING, lr=1e38))
    assert not (tmp_path / "checkpoints").exists()
