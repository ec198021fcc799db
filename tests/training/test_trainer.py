"""The training loop on real data: what it refuses, what it logs, and that ranks share one experiment."""

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fastsuncet.checkpoint import manager
from fastsuncet.checkpoint.run_folder import exclusive_run_folder
from fastsuncet.commands.ranks import as_rank
from fastsuncet.commands.train import train as train_run
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed.place import join
from fastsuncet.errors import CheckpointError, ConfigError, NumericalError
from fastsuncet.metrics.rankme import COLLAPSED
from fastsuncet.training.methods import TERMS, loss_of
from fastsuncet.training.pretraining import Pretraining
from fastsuncet.training.trainer import Trainer
from pipelines.data_errors import BadImage
from tests.support.checkpoints import steps
from tests.support.pictures import write_pictures
from tests.support.ranks import run_ranks, start_forked
from tests.support.runs import (
    assert_continues,
    final_state,
    interrupted_at,
    metrics,
    small_config,
    tiny_config,
    train,
)

pytestmark = pytest.mark.slow


EVALUATED = "evaluation.knn_every_epochs=10"


def test_training_lowers_both_losses_and_raises_knn_accuracy(tmp_path, capfd):
    longer = ("optimization.steps=40", "criterion.unsupervised_batch_size=64")
    config = small_config(tmp_path, EVALUATED, *longer)
    train(config)
    first, *_, last = metrics(config.run_folder, "train")
    assert last["nt_xent"] < first["nt_xent"] - 0.3
    assert last["suncet"] < first["suncet"] - 0.3
    evaluated = metrics(config.run_folder, "knn")[-1]
    assert evaluated["knn_accuracy"] > 0.6  # chance is 0.1
    assert 2 * COLLAPSED < evaluated["rankme"] < 128 and 2 * COLLAPSED < evaluated["rankme_features"] < 64
    out = capfd.readouterr().out
    assert re.search(rf"knn: step 40 .* knn_accuracy {evaluated['knn_accuracy']:.4g}", out)
    assert "collapsed" not in out


def test_encoder_that_collapses_is_reported(tmp_path, monkeypatch, capfd):
    """A real run whose loss draws all images to one point, and has nothing that pushes them apart."""
    to_a_point = lambda z, *_, **__: 1 - F.normalize(z)[:, 0].mean()  # noqa: E731
    monkeypatch.setattr("fastsuncet.losses.nt_xent.nt_xent", to_a_point)
    fast = ("optimization.lr=10", "optimization.steps=20", "optimization.warmup=0")
    train(config := tiny_config(tmp_path, EVALUATED, *fast, "criterion.supervised_epochs=0"))
    assert 1 <= metrics(config.run_folder, "knn")[-1]["rankme"] < COLLAPSED
    assert "suncet" not in metrics(config.run_folder, "train")[-1]  # SimCLR has no loss on labels
    assert re.search(r"representation has collapsed: rankme 1\.\d+ \(embeddings z\)", capfd.readouterr().out)


PLATEAU = (
    "criterion.supervised_epochs=plateau",
    "criterion.plateau_epochs=1",
    "criterion.plateau_gain=0.5",  # a loss that does not halve from one epoch to the next has plateaued
    "optimization.steps=14",  # three epochs and a half
    "logging.log_every=1",
)


def test_supervision_ends_at_a_plateau_at_the_same_step_after_stops(tmp_path):
    whole, parts = tiny_config(tmp_path / "a", *PLATEAU), tiny_config(tmp_path / "b", *PLATEAU)
    assert_continues(whole, parts, 2, 7, 8, 11)  # in an epoch, at its end, after the switch-off
    lines = metrics(whole.run_folder, "train")
    # Two epochs of four updates are compared, and the second one gained too little.
    assert [line["suncet"] > 0 for line in lines] == [True] * 8 + [False] * 6
    views = [0, *(line["views"] for line in lines)]
    assert [after - before for before, after in itertools.pairwise(views)] == [112] * 8 + [72] * 6


NAN, INF = float("nan"), float("inf")
FOUR = (
    *("criterion.supervised_imgs_per_class=2", "optimization.steps=4", "optimization.warmup=0"),
    *("checkpoint.every=2", "logging.log_every=100"),
)
NO_LOSS = "{} is not a finite number at step {} on rank {}"
NO_WEIGHT = "a weight is not a finite number after step {}"


def infinite_gradient(loss: torch.Tensor) -> torch.Tensor:
    """Return the same loss; the derivative of a square root at 0 is infinite."""
    return loss + (loss - loss.detach()).sqrt()


def spoil(patch: pytest.MonkeyPatch, name: str, how: float | Callable, updates: set[int]) -> None:
    """Multiply one of the losses by `how`, or let `how` change it, in some of four updates, counted from 1."""
    loss, count = loss_of(name), itertools.count(1)

    def spoiled(*arguments, **keywords):
        value = loss(*arguments, **keywords)
        if next(count) not in updates:
            return value
        return how(value) if callable(how) else value * how

    patch.setattr(f"fastsuncet.losses.{name}.{name}", spoiled)


NOT_FINITE = {  # a loss, what happens to it and when, the step of a stop signal, the message, the checkpoint before it
    "at the first update": ("nt_xent", NAN, {1}, None, NO_LOSS.format("nt_xent", 0, 0), []),
    "negative, twice": ("suncet", -INF, {3, 4}, None, NO_LOSS.format("suncet", 2, 0), [2]),
    "at the last update": ("nt_xent", NAN, {4}, None, NO_LOSS.format("nt_xent", 3, 0), [2]),
    "at the update of a signal": ("suncet", NAN, {3}, 2, NO_LOSS.format("suncet", 2, 0), [2]),
    "gradient at the last update": ("suncet", infinite_gradient, {4}, None, NO_WEIGHT.format(4), [2]),
    "gradient before that": ("suncet", infinite_gradient, {3}, None, NO_LOSS.format("nt_xent", 3, 0), [2]),
}


@pytest.mark.parametrize("case", NOT_FINITE)
def test_loss_or_weight_not_finite_is_named_with_its_images_and_never_saved(case, tmp_path, monkeypatch):
    name, how, updates, stop_at, message, saved = NOT_FINITE[case]
    config = tiny_config(tmp_path, *FOUR)
    with monkeypatch.context() as patch:
        spoil(patch, name, how, updates)
        with pytest.raises(NumericalError, match=message) as error:
            train(config, stop_at=stop_at)
    if message.startswith("suncet"):
        with join("cpu") as place:
            images = open_images(config, place, validation=False)
        named = set(re.findall("^  (synthetic train/.*)", str(error.value), re.M))
        assert named and named <= {images.train.name(int(i)) for i in images.split.indices}
    assert json.loads((config.run_folder / "status.json").read_text())["state"] == "failed"
    assert steps(config.run_folder / "checkpoints") == saved
    if saved:
        weights = final_state(config)[0].values()
        assert all(torch.isfinite(w).all() for w in weights if w.is_floating_point())


def test_gradient_not_finite_in_fp16_leaves_out_its_update(tmp_path, monkeypatch):
    """The scaler of fp16 expects gradients that overflow; it halves its scale and keeps weights and momentum."""
    options = ("meta.precision=fp16", "checkpoint.every=1", "checkpoint.keep=4")
    fp16 = small_config(tmp_path, *FOUR, "criterion.unsupervised_batch_size=40", *options)
    with monkeypatch.context() as patch:
        spoil(patch, "suncet", infinite_gradient, {3})
        train(fp16)
    states = [manager.load(fp16.run_folder / "checkpoints" / f"step_{n:08d}") for n in (1, 2, 3, 4)]
    scales = [state.state["scaler"]["scale"] for state in states]
    assert scales == [scales[0], scales[0], scales[0] / 2, scales[0] / 2]
    moved = [
        any(not torch.equal(w, after.model[k]) for k, w in before.model.items() if k.endswith("weight"))
        for before, after in itertools.pairwise(states)
    ]
    assert moved == [True, False, True]


def spoiled_on_one_rank(rank: int, world_size: int, folder: str) -> list[str]:
    found = []
    for how in (NAN, infinite_gradient):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                spoil(patch, "suncet", how, {4})
            with pytest.raises(NumericalError) as error:
                train(tiny_config(Path(folder, str(len(found))), *FOUR))
        found.append(str(error.value).splitlines()[0])
    config = tiny_config(Path(folder, "refused"), *FOUR)
    if rank == 0:
        (config.run_folder / "metrics.csv").mkdir(parents=True)  # a table cannot take its place
    with pytest.raises(CheckpointError) as refused:
        train(config)
    return [*found, str(refused.value).removeprefix("rank 0: ")]


def test_loss_gradient_or_metrics_refused_on_one_rank_ends_all(tmp_path):
    first, second = run_ranks(spoiled_on_one_rank, 2, str(tmp_path))
    assert first == second
    assert first[0].startswith(NO_LOSS.format("suncet", 3, 1)) and first[1].startswith(NO_WEIGHT.format(4))
    assert " cannot be written: " in first[2] and "metrics.csv" in first[2]


def test_loss_not_finite_on_several_ranks_names_images_of_each():
    class Stream:
        def files(self, step, rank, role):
            return [f"{role}/{rank}-{step}-{i}" for i in range(12)]

    task = SimpleNamespace(terms=("nt_xent", "suncet"), roles=("unlabeled", "labeled"), stream=Stream())
    trainer = SimpleNamespace(task=task)
    with pytest.raises(NumericalError) as error:
        Trainer.require_finite(trainer, torch.tensor([[-1.0, 7.0], [-1.0, 9.0], [-1.0, 7.0]]))
    message = str(error.value)
    assert "suncet is not a finite number at step 7 on ranks 0, 2, any of which can be its origin" in message
    assert "The 24 images of that loss:\n  labeled/0-7-0\n  labeled/2-7-0\n  labeled/0-7-1" in message
    assert message.endswith("\n  labeled/2-7-9\n  and 4 more")
    Trainer.require_finite(trainer, torch.full((3, 2), -1.0))  # all losses are finite


FOLDER = (
    *("data.kind=image_folder", "data.validation=null", "data.split.kind=all", "data.split.fraction=null"),
    *("criterion.unsupervised_batch_size=8", "criterion.classes_per_batch=2", "data.augmentation.blur=0.5"),
    *("criterion.supervised_imgs_per_class=2", "optimization.steps=4", "optimization.warmup=0"),
    *("checkpoint.every=2", "logging.log_every=1", "data.augmentation.strength=1.0"),
)


def folder_config(top: Path, *overrides: str):
    """Return a run on image files: two classes of JPEGs, all labeled, through DALI's decoder."""
    return small_config(top / "runs", *FOLDER, f"data.root={top / 'data'}", *overrides)


def test_truncated_image_ends_the_run_or_is_replaced_and_counted(tmp_path):
    write_pictures(tmp_path / "data" / "train", count=16, classes=2)
    victim = next((tmp_path / "data" / "train").rglob("*.jpg"))
    whole = victim.read_bytes()
    victim.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadImage, match=victim.name):
        train(folder_config(tmp_path))
    config = folder_config(tmp_path, "data.bad_images=1", "logging.write_tag=allowed")
    train(config, stop_at=1)
    assert metrics(config.run_folder, "train")[-1]["replaced_images"] == 1
    victim.write_bytes(whole)  # the count is that of the whole run
    train(config.with_values({"data.changed_images": True}))
    assert metrics(config.run_folder, "train")[-1]["replaced_images"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_run_on_a_gpu_continues_to_the_same_bits(tmp_path, precision):
    """From JPEGs that DALI decodes there."""
    write_pictures(tmp_path / "data" / "train", count=16, classes=2)
    words = ("meta.device=cuda", f"meta.precision={precision}")
    names = ("logging.write_tag=straight", "logging.write_tag=stopped")
    straight, stopped = (folder_config(tmp_path, *words, name) for name in names)
    assert_continues(straight, stopped, 1)


def test_other_labels_are_refused_on_resume(tmp_path):
    write_pictures(tmp_path / "data" / "train", count=16, classes=2)
    train(folder_config(tmp_path))
    write_pictures(tmp_path / "data" / "train", count=18, classes=2)
    for index in (tmp_path / "runs" / "indices").iterdir():
        index.unlink()
    with pytest.raises(CheckpointError, match="images or their labels differ from those"):
        train(folder_config(tmp_path))


def network_sockets() -> set[str]:
    """Return the TCP and UDP sockets of this process, of Python and of libraries."""
    tables = [Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6", "udp", "udp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    known, found = {f"socket:[{row[9]}]" for row in rows}, set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return known & found


def train_without_network(folder: str) -> None:
    def refuse(event: str, arguments: tuple) -> None:
        talks = event in ("socket.connect", "socket.bind", "socket.sendto")
        asks = event in ("socket.getaddrinfo", "socket.gethostbyname")
        if asks or (talks and arguments[0].family != socket.AF_UNIX):
            raise AssertionError(f"{event} {arguments}")

    with socket.create_server(("127.0.0.1", 0)):
        assert network_sockets(), "this test would not notice one"

    read = PairedStream.__call__

    def reading(stream, step, supervised=True):
        assert network_sockets() == set()
        return read(stream, step, supervised)

    PairedStream.__call__ = reading
    sys.addaudithook(refuse)  # for the rest of the process
    train(tiny_config(Path(folder), *FEW))


@pytest.mark.parametrize("fits", [True, False])
def test_run_frees_the_images_that_it_has_read_ahead_and_its_activations(tmp_path, monkeypatch, fits):
    """A notebook goes on, with a smaller batch where this one did not fit the GPU, and keeps the traceback."""
    config, noted, step = tiny_config(tmp_path, *FEW), [], Pretraining.train_step

    def noting(task, batch, lr):
        activations = torch.ones(1)
        noted.extend([task.stream, weakref.ref(activations)])
        if not fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(task, batch, lr)

    monkeypatch.setattr(Pretraining, "train_step", noting)
    refused = contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="does not fit")
    with as_rank(config) as place, refused as raised:  # noqa: F841 - it keeps the traceback
        train_run(config, place)
    stream, activations, *_ = noted
    assert [loader._engine for loader in stream._loaders.values()] == [None, None] and activations() is None


def test_training_opens_no_network_socket(tmp_path):
    """A run of several ranks opens those to its ranks."""
    process = start_forked(train_without_network, str(tmp_path))
    process.join(300)
    assert process.exitcode == 0


def test_second_process_in_the_folder_of_a_run_is_refused(tmp_path):
    config = tiny_config(tmp_path)
    holder = f"another process is running in .*, process {os.getpid()} on {socket.gethostname()}: stop"
    refused = pytest.raises(CheckpointError, match=holder)
    with join("cpu") as place, exclusive_run_folder(config.run_folder, place), refused:
        train(config)


def test_run_whose_folder_was_replaced_ends_at_its_next_save(tmp_path):
    """It writes nothing more there, where another run has made the folder again."""
    config = tiny_config(tmp_path)
    folder = config.run_folder

    def replace() -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / ".running").touch()

    gone = pytest.raises(CheckpointError, match="removed, moved, replaced or unmounted while the run used it")
    with interrupted_at(PairedStream, 4, replace), gone:
        train(config)
    assert [path.name for path in folder.glob("*")] == [".running"]


def test_folder_that_cannot_be_written_is_refused():
    with pytest.raises(CheckpointError, match="/proc/nope/run cannot be written"):
        train(tiny_config(Path("/proc/nope"), "logging.write_tag=run"))


def test_full_disk_is_found_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(manager.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(CheckpointError, match=r"checkpoint of this run is .* and needs twice that"):
        train(tiny_config(tmp_path), stop_at=0)  # a first step would end the run as preempted


def test_checkpoint_without_a_key_is_refused_by_its_name(tmp_path):
    config = tiny_config(tmp_path)
    train(config, stop_at=1)
    folder = config.run_folder / "checkpoints"
    old = manager.load_newest(folder)
    for key in ("config", "images", "world_size", "ledger"):
        meta = {name: value for name, value in old.meta.items() if name != key}
        manager.save(folder, old.step, model=old.model, state=old.state, meta=meta, keep=1)
        with pytest.raises(CheckpointError, match=f"has no '{key}': it is not one of such a run"):
            train(config)
    old.state["optimizer"]["param_groups"][0]["params"].pop()  # a version that groups parameters otherwise
    manager.save(folder, old.step, model=old.model, state=old.state, meta=old.meta, keep=1)
    with pytest.raises(CheckpointError, match=r"does not fit \(.*parameter group.*\): it is not one of such"):
        train(config)


# Few steps: rounding differences double every few updates, and the question is whether it is the same experiment.
FEW = ("optimization.steps=3", "optimization.warmup=0", "logging.log_every=1")


def train_on_rank(rank: int, world_size: int, folder: Path) -> None:
    train(tiny_config(folder, *FEW))


def test_ranks_train_to_the_weights_of_one_process(tmp_path):
    """test_multi_view_model.py has the gradients of every method."""
    config, on_ranks = (tiny_config(tmp_path / name, *FEW) for name in ("one", "many"))
    train(config)
    run_ranks(train_on_rank, 4, tmp_path / "many")
    (one, _, one_lines), (many, _, many_lines) = final_state(config), final_state(on_ranks)
    torch.testing.assert_close(many, one, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(many_lines, one_lines, strict=True):
        for name in TERMS.keys() & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3 if name == "suncet" else 1e-4)
            assert ours[f"{name}_gradient"] == pytest.approx(theirs[f"{name}_gradient"], rel=1e-3)
