"""The step as a graph, with a stand-in for CUDA's: a replay reads today's batch and rate, and a refusal is said."""

import pytest
import torch

from fastsuncet import captured
from fastsuncet.captured import WARMUP, Step
from fastsuncet.images import open_images
from fastsuncet.launch import join
from fastsuncet.run import start
from tests.runs import assert_equal_to_the_bit, final_state, small_config, train
from tests.test_methods import METHODS, small


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
    step = Step(trainer.network, trainer.optimizer, trainer.setting, graphs=True, say=said.append, **options)
    return trainer, step, said


def test_without_a_card_it_is_said_once_and_each_step_runs_by_itself(tmp_path):
    trainer, step, said = one_step(tmp_path)
    losses = step(trainer.stream(0), 0.1)
    assert losses.shape == (2,) and torch.isfinite(losses).all()
    assert said == [
        "cuda graph: none, each step starts its kernels one by one: there is no CUDA device, this is cpu"
    ]


def test_a_step_that_cannot_be_recorded_is_trained_without_a_graph(tmp_path):
    def refused(step):
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    trainer, step, said = one_step(tmp_path, capture=refused)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    for number in range(WARMUP + 2):
        step(trainer.stream(number), 0.1)
    assert len(said) == 1 and said[0].endswith("not permitted when stream is capturing")
    assert any((p != old).any() for p, old in zip(trainer.model.parameters(), before))


def test_what_a_replay_returns_is_overwritten_and_what_a_batch_holds_is_not(tmp_path):
    trainer, step, _ = one_step(tmp_path, capture=fake)
    batches = [trainer.stream(number) for number in range(WARMUP + 2)]
    kept = [batch.views[0].clone() for batch in batches]
    results = [step(batch, 0.1) for batch in batches]
    assert results[-1] is results[-2] and results[0] is not results[1]
    for batch, views in zip(batches, kept):
        torch.testing.assert_close(batch.views[0], views, rtol=0, atol=0)
