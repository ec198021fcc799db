"""The step as a graph, with a stand-in for CUDA's: a replay reads today's batch and rate, and a refusal is said."""

import contextlib
import gc
from dataclasses import replace

import pytest
import torch

from fastsuncet.commands import train as run
from fastsuncet.commands.train import start
from fastsuncet.data.dataset import open_images
from fastsuncet.distributed import launch
from fastsuncet.distributed.launch import join
from fastsuncet.training import cuda_graph as captured
from fastsuncet.training.cuda_graph import WARMUP, Step, capture_on_device
from tests.support.runs import assert_equal_to_the_bit, final_state, small_config, train
from tests.training.test_methods import METHODS, small


class FakeGraph:
    """What a CUDA graph does: capturing runs nothing, replaying runs the same on the same tensors."""

    made = 0

    def __init__(self, step):
        FakeGraph.made += 1
        self.step, self.losses, self.replays = step, torch.zeros(2), 0

    def replay(self) -> None:
        self.losses.copy_(self.step())
        self.replays += 1


def fake(step):
    graph = FakeGraph(step)
    return graph, graph.losses


@pytest.mark.parametrize("method", ["SimCLR + SuNCEt", "SimCLR + cross-entropy", "SwAV + SuNCEt"])
def test_a_replayed_run_is_the_run_to_the_bit_through_switch_off_and_frozen_prototypes(
    tmp_path, monkeypatch, method
):
    assert method in METHODS
    epochs = "criterion.supervised_epochs=2"  # eight steps of sixteen, of which four with prototypes at rest
    options = (epochs, "optimization.steps=16", "optimization.lr=0.5")
    train(small(tmp_path / "plain", method, *options))
    FakeGraph.made = 0
    monkeypatch.setattr(
        captured.Step.__init__, "__kwdefaults__", {**Step.__init__.__kwdefaults__, "capture": fake}
    )
    train(small(tmp_path / "graph", method, *options, "meta.cuda_graph=true"))
    assert FakeGraph.made == (3 if method.startswith("SwAV") else 2)
    plain, graph = (final_state(small(tmp_path / name, method, *options)) for name in ("plain", "graph"))
    assert_equal_to_the_bit(graph, plain)


def one_step(tmp_path, **options):
    config = small_config(tmp_path)
    with join("cpu") as place:
        images = open_images(config, place, validation=False)
        trainer = start(config, place, images, tmp_path)
    said = []
    step = Step(
        trainer.task.network,
        trainer.task.optimizer,
        trainer.task.setting,
        graphs=True,
        say=said.append,
        **options,
    )
    return trainer, step, said


def test_without_a_card_it_is_said_once_and_each_step_runs_by_itself(tmp_path):
    trainer, step, said = one_step(tmp_path)
    losses = step(trainer.task.stream(0), 0.1)
    assert losses.shape == (2,) and torch.isfinite(losses).all()
    assert said == [
        "meta.cuda_graph: training without a graph, each step launches its kernels one by one: there is no CUDA device, this is cpu"
    ]


def test_a_step_that_cannot_be_recorded_is_trained_without_a_graph(tmp_path):
    def refused(step):
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    trainer, step, said = one_step(tmp_path, capture=refused)
    before = [p.detach().clone() for p in trainer.task.model.parameters()]
    for number in range(WARMUP + 2):
        step(trainer.task.stream(number), 0.1)
    assert len(said) == 1 and said[0].endswith("not permitted when stream is capturing")
    assert any((p != old).any() for p, old in zip(trainer.task.model.parameters(), before))


def test_what_a_replay_returns_is_overwritten_and_what_a_batch_holds_is_not(tmp_path):
    trainer, step, _ = one_step(tmp_path, capture=fake)
    batches = [trainer.task.stream(number) for number in range(WARMUP + 2)]
    kept = [batch.views[0].clone() for batch in batches]
    results = [step(batch, 0.1) for batch in batches]
    assert results[-1] is results[-2] and results[0] is not results[1]
    for batch, views in zip(batches, kept):
        torch.testing.assert_close(batch.views[0], views, rtol=0, atol=0)


def test_a_new_kind_of_step_lets_go_of_the_graphs_of_the_old_and_an_old_one_that_returns_is_captured_anew(
    tmp_path,
):
    trainer, step, said = one_step(tmp_path, capture=fake)
    FakeGraph.made = 0
    batch = trainer.task.stream(0)
    half = replace(batch, labeled=batch.labeled[:0], labels=batch.labels[:0])
    for _ in range(WARMUP + 1):
        step(batch, 0.1)
    (graph,) = (held[0] for held in step._captured.values())
    for _ in range(WARMUP + 1):
        step(half, 0.1)
    assert FakeGraph.made == 2 and graph not in [held[0] for held in step._captured.values()]
    step(batch, 0.1)
    assert FakeGraph.made == 3 and not said


def test_ddp_has_had_the_passes_that_it_times_before_a_step_is_captured(tmp_path):
    """PyTorch's notes on CUDA graphs: at least eleven; the passes on blank images are not relied on."""
    trainer, step, _ = one_step(tmp_path, capture=fake)
    ddp = torch.nn.parallel.DistributedDataParallel
    wrapped = ddp.__new__(ddp)
    torch.nn.Module.__init__(wrapped)
    in_ddp = Step(wrapped, trainer.task.optimizer, trainer.task.setting, graphs=True, capture=fake)
    assert (step.warmup, in_ddp.warmup) == (WARMUP, 11)


def test_what_another_rank_cannot_record_this_one_does_not_replay(tmp_path, monkeypatch):
    trainer, step, said = one_step(tmp_path, capture=fake)
    monkeypatch.setattr(captured, "any_rank", lambda mine: not mine)
    for number in range(WARMUP + 1):
        step(trainer.task.stream(number), 0.1)
    assert not step._captured and said[0].endswith("another rank could not capture its step")


def test_the_reason_is_what_went_wrong_first_and_not_that_the_capture_then_failed(tmp_path):
    def refused(step):
        try:
            raise RuntimeError("a copy from the host is not permitted")
        finally:
            raise RuntimeError("the capture was invalidated")  # as torch's own end of a capture does

    trainer, step, said = one_step(tmp_path, capture=refused)
    for number in range(WARMUP + 1):
        step(trainer.task.stream(number), 0.1)
    assert said[0].endswith("a copy from the host is not permitted")


@pytest.mark.parametrize("own", [True, False])
def test_a_capture_leaves_other_threads_alone_and_is_on_the_stream_of_the_steps_before_it(monkeypatch, own):
    asked, now = {}, "own" if own else "default"
    left_on = []

    @contextlib.contextmanager
    def graph(made, **options):
        asked.update(options, collecting=gc.isenabled())
        yield

    monkeypatch.setattr(gc, "collect", lambda: None)  # of a whole test session: seconds
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now)
    monkeypatch.setattr(torch.cuda, "set_stream", left_on.append)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    assert capture_on_device(lambda: "losses")[1] == "losses"
    stream = "own" if own else None  # the default one cannot be captured: torch takes one of its own
    assert asked == {"stream": stream, "capture_error_mode": "thread_local", "collecting": False}

    def fails():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        capture_on_device(fails)
    assert gc.isenabled() and left_on == [now, now]


def test_a_rank_works_on_one_stream_which_is_not_cudas_default_one(monkeypatch):
    device, seen = torch.device("cuda", 0), []
    monkeypatch.setattr(launch, "pick_device", lambda wanted, local_rank: device)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(torch.cuda, "set_stream", seen.append)
    launch.work_stream.cache_clear()
    try:
        for _ in range(2):
            with join("cuda") as place:
                assert place.device == device
    finally:
        launch.work_stream.cache_clear()
    assert seen == [device, "a stream of cuda:0"] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_on_a_card_a_replayed_run_is_the_run_to_the_bit(tmp_path, monkeypatch, capfd, precision):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn, which is not here")
    options = ("criterion.supervised_epochs=2", "optimization.steps=16", "meta.device=cuda")
    configs = {
        graph: small_config(
            tmp_path / graph, *options, f"meta.precision={precision}", f"meta.cuda_graph={graph}"
        )
        for graph in ("false", "true")
    }
    for config in configs.values():
        with join("cuda") as place:
            run.train(config, place)
    assert "training without a graph" not in capfd.readouterr().out
    assert_equal_to_the_bit(final_state(configs["true"]), final_state(configs["false"]))
