"""BatchNorm over ranks is BatchNorm over the joined batch: values, gradients, running statistics."""

import copy
import itertools

import pytest
import torch
from torch import nn

from fastsuncet.models import norm_kernel
from fastsuncet.models.sync_batchnorm import RankBatchNorm, from_sums, sums_of, synchronize
from tests.support.host_kernels import on_the_host
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

CHANNELS = 8
# name: (layer, shape after the rows, rows on rank r of W)
CASES = {
    "images": (nn.BatchNorm2d(CHANNELS), (4, 3), lambda r: 3),
    "channels_last": (nn.BatchNorm2d(CHANNELS), (4, 3), lambda r: 2),
    "rows": (nn.BatchNorm1d(CHANNELS, momentum=0.3, eps=1e-3), (), lambda r: 4),
    "uneven": (nn.BatchNorm2d(CHANNELS), (2, 2), lambda r: 1 + 2 * r),
    "one_row_a_rank": (nn.BatchNorm1d(CHANNELS), (), lambda r: 1),
}
# Who computes: the operators; the kernels of norm.cu, from their own source on the CPU; those on all ranks but one. And
# in what, and how near to one process in float64.
EXECUTORS = {
    "operators": (torch.float64, 1e-11),
    "operators, float32": (torch.float32, 3e-5),
    "operators, bfloat16": (torch.bfloat16, 2**-6),
    "kernels": (torch.float32, 3e-5),
    "kernels, bfloat16": (torch.bfloat16, 2**-6),
    "kernels on some ranks": (torch.float32, 3e-5),
}
STEPS = 2
DEVIATIONS_AWAY = (0, 1e3, 1e4)  # of a mean from zero


def prepared(name, world_size):
    """Return the module in float64 with random parameters, and each step's (input, loss weights) of each rank."""
    norm, after, rows = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    norm = copy.deepcopy(norm).double()
    for p in norm.parameters():
        nn.init.normal_(p, mean=1)
    layout = torch.channels_last if name == "channels_last" else torch.contiguous_format

    def draw(rank):
        # Numbers that 16 bits hold, so that every dtype starts from the same ones.
        x, t = torch.randn(2, rows(rank), CHANNELS, *after)
        x = (x * (rank + 1) + rank).bfloat16().double()
        return x.to(memory_format=layout), t.bfloat16().double()

    return norm, [[draw(rank) for rank in range(world_size)] for _ in range(STEPS)]


def passes(norm, draws):
    """Return everything visible of forward and backward of (t * y**2).sum() in training mode, then of eval."""
    seen = {}
    for step, (x, t) in enumerate(draws):
        norm.zero_grad()
        x = x.clone().requires_grad_()
        y = norm(x)
        (t * y.square()).sum().backward()
        seen |= {f"y{step}": y.detach(), f"dx{step}": x.grad}
        seen |= {f"d_{n}{step}": p.grad.clone() for n, p in norm.named_parameters()}
        seen |= {f"{n}{step}": b.clone() for n, b in norm.named_buffers()}
    seen["eval"] = norm.eval()(x.detach()).detach()
    return seen


def run_case(name, executor, rank, world_size):
    norm, draws = prepared(name, world_size)
    dtype, _ = EXECUTORS[executor]
    norm.to(torch.promote_types(dtype, torch.float32))
    parameters, keys = dict(norm.named_parameters()), list(norm.state_dict())
    by_kernels = executor.startswith("kernels") and not (executor.endswith("some ranks") and rank == 0)
    with on_the_host(norm_kernel) as launched, pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_kernel, "usable", lambda *_: by_kernels)
        network = synchronize(nn.Sequential(norm.eval(), nn.Identity()))
        assert not network[0].training
        network = synchronize(network)  # a second time changes nothing
        shared = network[0].train()
        assert isinstance(shared, RankBatchNorm)
        assert list(shared.state_dict()) == keys
        assert all(p is parameters[n] for n, p in shared.named_parameters())
        seen = passes(shared, [[each.to(dtype) for each in step[rank]] for step in draws])
    kernel_takes = by_kernels and name in ("channels_last", "rows")
    assert bool(launched) >= kernel_takes
    return seen


def far_rows(world_size, away):
    """Return float32 rows of each rank, 50 and more of 64 channels, `away` deviations from zero."""
    generator = torch.Generator().manual_seed(int(away))
    return [
        (1.3 * (torch.randn(50 + 7 * r, 64, generator=generator).double() + away)).float()
        for r in range(world_size)
    ]


def join_statistics(count, mean, variance):
    return from_sums(norm_kernel.sum_over_ranks_(sums_of(count, mean, variance)), mean.dtype)


def run_statistics(rank, world_size):
    results = {}
    for away in DEVIATIONS_AWAY:
        own = far_rows(world_size, away)[rank]
        variance, mean = torch.var_mean(own, 0, correction=0)
        results[away] = {"own": (mean, variance), "joined": join_statistics(len(own), mean, variance)}
    results["equal"] = join_statistics(1_000_003 + rank, torch.linspace(1e6, 2e6, 256), torch.zeros(256))[2]
    # One rank has an infinity, whose variance is NaN, and a NaN.
    broken = torch.tensor([1.0, torch.inf if rank == 1 else 1.0, torch.nan if rank == 1 else 1.0])
    results["broken"] = join_statistics(2, broken, broken - broken)[2]
    return results


def run_bfloat16():
    norm = synchronize(nn.Sequential(nn.BatchNorm2d(4)))
    x = torch.randn(3, 4, 5, 2).bfloat16().to(memory_format=torch.channels_last).requires_grad_()
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = norm(x)
        y.backward(torch.ones_like(y))
    return {
        "strides": [x.stride(), y.stride(), x.grad.stride()],
        "dtypes": [str(t.dtype) for t in (y, x.grad, norm[0].weight.grad, norm[0].running_var)],
        "kept": [(str(t.dtype), t.numel()) for t in kept if t.numel() >= x.numel()],
    }


def run_everything(rank, world_size):
    """Compute every case on one set of ranks, whose start costs seconds; inputs without statistics are refused."""
    # The kernel's threads are real ones, and four ranks have two cores.
    table = itertools.product(CASES, EXECUTORS if world_size == 2 else ["operators"])
    results = {(name, executor): run_case(name, executor, rank, world_size) for name, executor in table}
    results |= run_statistics(rank, world_size)
    results["bfloat16"] = run_bfloat16()
    for shape, said in (((3,), "expected at least 2D input"), ((0, 3), "batch is empty")):
        with pytest.raises(ValueError, match=said):
            RankBatchNorm(3)(torch.zeros(shape))
    return results


@pytest.fixture(scope="module", params=[2, 4])
def on_ranks(request):
    return run_ranks(run_everything, request.param)


@pytest.mark.parametrize("name", CASES)
def test_batchnorm_on_ranks_equals_one_process(name, on_ranks):
    norm, draws = prepared(name, len(on_ranks))
    joined = [tuple(torch.cat([rank[i] for rank in step]) for i in (0, 1)) for step in draws]
    expected = passes(norm, joined)
    computed = [executor for executor in EXECUTORS if (name, executor) in on_ranks[0]]
    assert len(computed) == (len(EXECUTORS) if len(on_ranks) == 2 else 1)
    for executor, (key, value) in itertools.product(computed, expected.items()):
        dtype, near = EXECUTORS[executor]
        seen = [results[name, executor] for results in on_ranks]
        assert all(each.keys() == expected.keys() for each in seen)
        if key.startswith("d_"):  # each rank has its share of the gradient of the sum
            found = sum(each[key] for each in seen)
        elif key[:2] in ("y0", "y1", "dx", "ev"):
            found = torch.cat([each[key] for each in seen])
            assert found.dtype == dtype
        else:  # running statistics: the same bits on every rank, or checkpoints would depend on the rank
            found, near = seen[0][key], min(near, 3e-5)
            assert "some ranks" in executor or all(torch.equal(found, each[key]) for each in seen), key
        limit = near * max(1.0, value.abs().max().item())
        said = f"{executor}, {key}: "
        torch.testing.assert_close(
            found.to(value.dtype), value, rtol=near, atol=limit, msg=lambda m, said=said: said + m
        )


def chan(counts, means, variances):
    """Join statistics by Chan's method, which squares only what is near zero."""
    mean = (counts * means).sum(0) / counts.sum()
    return mean, (counts * (variances + (means - mean).square())).sum(0) / counts.sum()


def error(found, expected):
    return ((found.double() - expected) / expected).abs().max().item()


@pytest.mark.parametrize("away", DEVIATIONS_AWAY)
def test_join_statistics_loses_nothing_to_cancellation(away, on_ranks):
    counts = torch.tensor([[len(own)] for own in far_rows(len(on_ranks), away)])
    means, variances = (torch.stack([ranks[away]["own"][i] for ranks in on_ranks]) for i in (0, 1))
    total, mean, variance = joined = on_ranks[0][away]["joined"]
    assert all(torch.equal(torch.cat(ranks[away]["joined"]), torch.cat(joined)) for ranks in on_ranks)
    assert total.tolist() == [counts.sum()] and variance.dtype == torch.float32
    exact_mean, exact_variance = chan(counts.double(), means.double(), variances.double())
    assert error(variance, exact_variance) < 2**-24 + 8 * 2**-53 * (1 + away**2)
    torch.testing.assert_close(mean.double(), exact_mean, rtol=2**-24, atol=1e-15)
    # The same sums in float32 do lose something.
    weights = counts / counts.sum()
    square = (weights * (variances + means.square())).sum(0) - (weights * means).sum(0).square()
    assert away == 0 or error(square, exact_variance) > 0.05


def test_join_statistics_has_no_negative_variance_and_shows_a_nan(on_ranks):
    for ranks in on_ranks:
        assert (ranks["equal"] >= 0).all() and (ranks["equal"] < 1e-3).all()  # of a mean of 1e6
        assert ranks["broken"].isnan().tolist() == [False, True, True]


def test_batchnorm_on_ranks_keeps_layout_dtype_and_only_its_input(on_ranks):
    for seen in (results["bfloat16"] for results in on_ranks):
        assert seen["strides"] == [(40, 1, 8, 4)] * 3  # channels-last
        assert seen["dtypes"] == ["torch.bfloat16"] * 2 + ["torch.float32"] * 2
        assert seen["kept"] == [("torch.bfloat16", 120)]
