"""The update of a step, and the gradients' norms that it returns."""

import pytest
import torch

from fastsuncet.distributed.launch import Place
from fastsuncet.training import methods
from fastsuncet.training.step import build, in_float32, train_step
from tests.support.runs import assert_equal_to_the_bit
from tests.training.test_methods import METHODS, small
from tests.training.test_step_syncs import CPU, S, batch_of


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("method", METHODS)
def test_step_returns_each_loss_gradient_norm_and_changes_no_bit(tmp_path, method, precision):
    """The norms are those of each loss alone, and the weights those of a step that does not watch."""
    config = small(tmp_path, method, f"meta.precision={precision}")
    batch = batch_of(config, S if config.criterion.supervised else 0)
    ours, network, optimizer, setting = build(config, Place(0, 1, 0, CPU), 10)
    values = train_step(network, optimizer, batch, 0.1, setting)

    theirs, network, optimizer, setting = build(config, Place(0, 1, 0, CPU), 10)
    optimizer.set_lr(0.1)
    setting.before_update()
    with setting.autocast():
        out = network(batch.views, batch.labeled)
    out = in_float32(out)
    losses = setting.instance_loss(out), setting.supervised_loss(out, batch.labels)
    wanted = []
    for loss, read in zip(losses, methods.loss_inputs(out)):
        grad = None
        if loss.requires_grad:
            (grad,) = torch.autograd.grad(loss, read, retain_graph=True, allow_unused=True)
        wanted.append(torch.zeros(()) if grad is None else grad.norm())
    setting.scaler.scale(sum(losses)).backward()
    setting.freeze(0)
    setting.scaler.step(optimizer)

    torch.testing.assert_close(values[2:], torch.stack(wanted), rtol=1e-5, atol=0)
    trained = config.criterion.instance != "none", config.criterion.supervised
    assert tuple((values[2:] > 0).tolist()) == trained
    assert_equal_to_the_bit(values[:2], torch.stack([loss.detach() for loss in losses]))
    assert_equal_to_the_bit(ours.state_dict(), theirs.state_dict())
