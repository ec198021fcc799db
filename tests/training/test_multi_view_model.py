"""The step in pieces (criterion.micro_batch): gradients of the whole batch, statistics once a piece, the same bits."""

import copy

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from fastsuncet.distributed.place import Place
from fastsuncet.models.flops import update_macs
from fastsuncet.training import methods
from fastsuncet.training.multi_view_model import MultiViewModel, Outputs, PiecewiseModel
from fastsuncet.training.step import build, in_float32
from tests.support.methods import (
    CPU,
    METHODS,
    batch_of,
    config_of,
    images,
    loss_and_gradients,
    network,
    small,
)
from tests.support.ranks import run_ranks
from tests.support.runs import assert_equal_to_the_bit

MIXED = "SimCLR + SuNCEt"


def in_pieces(config, most: int, batchnorm: bool = True) -> nn.Module:
    """Return the float64 model of a run, in pieces of `most` views, with BatchNorm or without statistics."""
    made = PiecewiseModel(network(config).model, most)
    return made if batchnorm else without_statistics(made)


def without_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        module.train(not isinstance(module, _BatchNorm))
    return model


def send(sent: list[int], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over ranks as DDP does, and note how many gradients it has."""
    sent.append(bucket.buffer().numel())
    mean = bucket.buffer().div_(torch.distributed.get_world_size())
    work = torch.distributed.all_reduce(mean, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def on_a_rank(rank: int, world_size: int) -> dict:
    """Return what a rank finds with and without BatchNorm, how many gradients it sent, and its parameters."""
    found = {}
    for method, batchnorm in [*((method, False) for method in METHODS), (MIXED, True)]:
        config = config_of(method)
        views, labeled, labels = images(config)
        *views, labeled, labels = (x.chunk(world_size)[rank] for x in (*views, labeled, labels))
        # Cuts 2 images of V views and 6 labeled ones into several pieces, mostly uneven.
        most = 8 if config.criterion.instance in ("swav", "paws") else 5
        pieces = in_pieces(config, most if config.criterion.supervised else 3, batchnorm)
        ddp = DistributedDataParallel(pieces, static_graph=True)
        sent: list[int] = []
        ddp.register_comm_hook(sent, send)
        losses = loss_and_gradients(config, ddp, views, labeled, labels)
        found[method, batchnorm] = (losses, sum(sent), sum(p.numel() for p in ddp.parameters()))
    return found


@pytest.mark.slow
def test_pieces_on_two_ranks_are_those_of_one_process_and_gradients_are_sent_once():
    ranks = run_ranks(on_a_rank, 2)
    for method, batchnorm in ranks[0]:
        config = config_of(method)
        views, labeled, labels = images(config)
        whole = without_statistics(network(config))
        if batchnorm:
            # Two pieces on each rank: the n-th pieces of both ranks share statistics, as one piece of this order.
            whole = in_pieces(config, 10)
            order = torch.tensor([0, 2, 1, 3])
            rows = torch.tensor([0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11])
            views, labeled, labels = [view[order] for view in views], labeled[rows], labels[rows]
        expected = loss_and_gradients(config, whole, views, labeled, labels)
        found = [rank[method, batchnorm] for rank in ranks]
        mean = torch.stack([losses for (losses, _), *_ in found]).mean(0)
        for (_, gradients), sent, parameters in found:
            assert sent == parameters
            torch.testing.assert_close(mean, expected[0], rtol=1e-9, atol=0)
            torch.testing.assert_close(gradients, expected[1], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pieces_step_is_grad_cache_by_hand_to_the_bit(tmp_path, precision):
    """Also the running statistics, once a piece, and what both passes give to the last layer."""
    config = small(tmp_path, MIXED, f"meta.precision={precision}", "criterion.micro_batch=8")
    _, ours, _, method = build(config, Place(0, 1, CPU), 10)
    batch, seen = batch_of(config, 8), []
    plain = MultiViewModel(copy.deepcopy(ours.model))
    ours.model.head[-1].register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))

    def losses(out: Outputs) -> torch.Tensor:
        out = in_float32(out)
        return sum(loss(out, batch.labels) for loss in methods.losses(config))

    with method.autocast():
        out = ours(batch.views, batch.labeled)
    losses(out).backward()

    # 6 images of 2 views and 8 labeled ones: 3 pieces.
    views = list(zip(*(view.split([2, 2, 2]) for view in batch.views)))
    pieces = list(zip(views, batch.labeled.split([3, 3, 2])))
    with torch.no_grad(), method.autocast():
        outs = [plain(*piece) for piece in pieces]
    statistics = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    z = torch.cat([o.projections.unflatten(0, (2, 2)) for o in outs], 1).flatten(0, 1).requires_grad_()
    z_labeled = torch.cat([o.labeled for o in outs]).requires_grad_()
    losses(Outputs(z, z_labeled, None, None)).backward()
    gradients = zip(z.grad.view(2, 3, 2, -1).unbind(1), z_labeled.grad.split([3, 3, 2]))
    for piece, (d_views, d_labeled) in reversed(list(zip(pieces, gradients))):
        with method.autocast():
            again = plain(*piece)
        torch.autograd.backward([again.projections, again.labeled], [d_views.flatten(0, 1), d_labeled])
    assert_equal_to_the_bit([out.projections, out.labeled], [z, z_labeled])
    ours_now, theirs = ({n: p.grad for n, p in each.named_parameters()} for each in (ours, plain))
    torch.testing.assert_close(ours_now, theirs, rtol=1e-6, atol=1e-9)
    assert_equal_to_the_bit(dict(ours.named_buffers()), statistics)
    assert statistics["model.encoder.bn1.num_batches_tracked"] == 3
    first, second = seen[:3], seen[3:]
    assert_equal_to_the_bit(first, second[::-1])


def test_pieces_cost_a_third_more(tmp_path):
    plain, flops = small(tmp_path, MIXED, "model.stem=cifar"), []
    config = plain.with_values({"criterion.micro_batch": 20})
    for model in (network(config), in_pieces(config, 8)):
        with FlopCounterMode(display=False) as counter:
            loss_and_gradients(config, model, *images(config))
        flops.append(counter.get_total_flops())
    counted = [update_macs(each, each.resolve(1, 146), True) for each in (plain, config)]
    assert counted[1] == counted[0] * 4 // 3
    # The gradient of the images and the last layer of the second pass are counted, and not computed.
    assert flops[1] / flops[0] == pytest.approx(4 / 3, rel=0.02)
