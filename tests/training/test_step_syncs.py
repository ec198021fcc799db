"""A training step never waits for the device, launches few operators, and returns its gradients' norms.

Counted on a CPU: an operator that hands a value to Python (`_local_scalar_dense`, `item`) or sizes its result by one
(`nonzero`, a boolean index) makes the host of a GPU wait for it, whatever the device of the test.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastsuncet.config import Config
from fastsuncet.data.paired_stream import LABELED, PairedStream
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation.finetuning.fit import FineTuningStream
from fastsuncet.metrics.interval import MetricsInterval
from fastsuncet.training import methods
from fastsuncet.training.step import build, in_float32, train_step
from tests.support.methods import CPU, METHODS, batch_of, small
from tests.support.networks import one_block
from tests.support.ranks import run_ranks
from tests.support.runs import assert_equal_to_the_bit
from tools.bench.dispatch_counter import Counter


class RankCounter(Counter):
    """A Counter that leaves out DDP's reducer: it scales every gradient by a number that it wraps, in C++, as a CPU
    tensor (int32 or float64, which no loss has) and reads back from there, on any device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        self.waits -= name == "aten::_local_scalar_dense" and args[0].dtype in (torch.int32, torch.float64)
        return super().__torch_dispatch__(function, types, args, kwargs)


def counted(
    config: Config, labeled: int = 8, images: int = 6, place: Place | None = None, counts=Counter
) -> Counter:
    """Return what the third step of a run does: the first ones create momentum and, on several ranks, buckets."""
    _, network, optimizer, method = build(config, place or Place(0, 1, CPU), 10, range(1, 11))
    batch, interval = batch_of(config, labeled, images), MetricsInterval(CPU, 4)
    for _ in range(2):
        train_step(network, optimizer, batch, 0.1, method)
    with counts() as counter:
        losses = train_step(network, optimizer, batch, 0.1, method)
        interval.add(losses, 0, 2 * images + labeled)
    assert torch.isfinite(losses).all()
    return counter


# test_fake_cuda.py has every method without pieces: a fake tensor has no value to wait for.
@pytest.mark.parametrize("labeled", [8, 0])  # with supervision and after the switch-off
def test_step_in_pieces_does_not_wait(tmp_path, labeled):
    config = small(tmp_path, "SwAV + SuNCEt", "meta.precision=fp16", "criterion.micro_batch=20")
    assert counted(config, labeled).waits == 0


def waits_on_a_rank(rank: int, world_size: int, folder) -> int:
    config = small(folder, "SimCLR + SuNCEt")
    return counted(config, place=Place(rank, world_size, CPU), counts=RankCounter).waits


@pytest.mark.slow
def test_step_on_two_ranks_does_not_wait(tmp_path):
    assert run_ranks(waits_on_a_rank, 2, tmp_path) == [0, 0]


def test_step_launches_few_operators_however_large_its_batch(tmp_path):
    config = small(tmp_path, "SimCLR + SuNCEt")
    operators = counted(config).operators
    # About 290: 36 layers forward and backward, the losses, LARS by 21. A loop over tensors or classes adds hundreds.
    assert 200 < operators <= 330
    assert counted(config, labeled=40, images=30).operators == operators


class LabelsOfFive:
    """A loader of one view."""

    def __call__(self, number: int) -> list[torch.Tensor]:
        return [torch.zeros(5, 3, 2, 2)]

    def draws(self, number: int) -> SimpleNamespace:
        return SimpleNamespace(labels=np.arange(5))


@pytest.mark.parametrize(("device", "pinned"), [("cuda", ["pinned"]), ("cpu", [])])
def test_streams_copy_to_a_gpu_from_pinned_memory(monkeypatch, device, pinned):
    place, calls = Place(0, 1, torch.device(device)), []
    ours, tuning = PairedStream.__new__(PairedStream), FineTuningStream.__new__(FineTuningStream)
    ours.place, ours.views, ours.arithmetic = place, (), SimpleNamespace(supervised_steps=1)
    ours._loaders = {LABELED: LabelsOfFive()}
    tuning._place, tuning.passes, tuning._loader = place, 1, LabelsOfFive()
    tuning._index = SimpleNamespace(presence=None)
    ours._no_images = ours._no_labels = torch.empty(0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **how: calls.append(how) or self)
    for images, labels in (tuning(0, 0), (ours(0).labeled, ours(0).labels)):
        assert images.shape == (5, 3, 2, 2) and labels.tolist() == list(range(5))
    assert calls == [*pinned, {"non_blocking": True}] * 6


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("method", METHODS)
def test_step_returns_each_loss_gradient_norm_and_changes_no_bit(tmp_path, monkeypatch, method, precision):
    """The norms are those of each loss alone, and the weights those of a step that does not watch."""
    one_block(monkeypatch)
    config = small(tmp_path, method, f"meta.precision={precision}")
    batch = batch_of(config, 8 if config.criterion.supervised else 0)
    ours, network, optimizer, method = build(config, Place(0, 1, CPU), 10, range(1, 11))
    values = train_step(network, optimizer, batch, 0.1, method)

    theirs, network, optimizer, method = build(config, Place(0, 1, CPU), 10, range(1, 11))
    optimizer.set_lr(0.1)
    method.before_update()
    with method.autocast():
        out = network(batch.views, batch.labeled)
    out = in_float32(out)
    losses = method.instance_loss(out, batch.labels), method.supervised_loss(out, batch.labels)
    wanted = []
    for loss, read in zip(losses, methods.loss_inputs(out)):
        grad = None
        if loss.requires_grad:
            (grad,) = torch.autograd.grad(loss, read, retain_graph=True, allow_unused=True)
        wanted.append(torch.zeros(()) if grad is None else grad.norm())
    method.scaler.scale(sum(losses)).backward()
    method.freeze(0)
    method.scaler.step(optimizer)

    torch.testing.assert_close(values[2:], torch.stack(wanted), rtol=1e-5, atol=0)
    assert (values[2:] > 0).tolist() == [term != "none" for term in methods.terms(config)]
    assert_equal_to_the_bit(values[:2], torch.stack([loss.detach() for loss in losses]))
    assert_equal_to_the_bit(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("compiled", [True, False])
def test_first_passes_of_ddp_have_the_shape_of_a_step_where_it_compiles(tmp_path, monkeypatch, compiled):
    config, shapes = small(tmp_path, "SimCLR + SuNCEt", f"meta.compile={compiled}"), []

    def seen(views, labeled):
        shapes.append([len(x) for x in (*views, labeled)])
        return (labeled,)

    monkeypatch.setattr("fastsuncet.distributed.ddp.parallel", lambda *_, blank_pass, **__: blank_pass(seen))
    sizes = config.resolve(2, 146, 10)
    build(config, Place(0, 2, CPU), 10, range(1, 11), sizes)
    assert sizes.local_unlabeled > 2 < sizes.local_labeled
    assert shapes == [[sizes.local_unlabeled] * 2 + [sizes.local_labeled] if compiled else [2, 2, 2]]
