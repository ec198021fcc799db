"""The update of a step, and the gradients' norms that it returns."""

import pytest
import torch

from fastsuncet.distributed.place import Place
from fastsuncet.training import methods
from fastsuncet.training.step import build, in_float32, train_step
from tests.support.methods import METHODS, small
from tests.support.runs import assert_equal_to_the_bit
from tests.support.steps import CPU, S, batch_of


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("method", METHODS)
def test_step_returns_each_loss_gradient_norm_and_changes_no_bit(tmp_path, method, precision):
    """The norms are those of each loss alone, and the weights those of a step that does not watch."""
    config = small(tmp_path, method, f"meta.precision={precision}")
    batch = batch_of(config, S if config.criterion.supervised else 0)
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
    trained = tuple(term != "none" for term in methods.terms(config))
    assert tuple((values[2:] > 0).tolist()) == trained
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
