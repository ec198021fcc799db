"""BatchNorm over ranks is BatchNorm over the joined batch: values, gradients, running statistics."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastsuncet.models.resnet import build_model
from fastsuncet.models.sync_batchnorm import RankBatchNorm, describe, join_statistics, synchronise
from tests.support.ranks import run_ranks
from tools.bench.dispatch_counter import Counter

CHANNELS = 5
# name: (constructor, its options, shape after the rows, rows on rank r of W)
CASES = {
    "images": (nn.BatchNorm2d, {}, (4, 3), lambda r: 3),
    "channels_last": (nn.BatchNorm2d, {}, (4, 3), lambda r: 2),
    "rows": (nn.BatchNorm1d, {"momentum": 0.3, "eps": 1e-3}, (), lambda r: 4),
    "uneven": (nn.BatchNorm2d, {}, (2, 2), lambda r: 1 + 2 * r),
    "one_row_a_rank": (nn.BatchNorm1d, {}, (), lambda r: 1),
    "plain_average": (nn.BatchNorm2d, {"momentum": None}, (2, 3), lambda r: 2),
    "no_bias": (nn.BatchNorm2d, {}, (2, 3), lambda r: 2),
    "no_affine": (nn.BatchNorm2d, {"affine": False}, (2, 3), lambda r: 2),
    "no_running": (nn.BatchNorm1d, {"track_running_stats": False}, (), lambda r: 3),
}
STEPS = 2


def prepared(name, world_size):
    """The module in float64 with random parameters; for each step each rank's input and loss weights."""
    constructor, options, after, rows = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    norm = constructor(CHANNELS, **options).double()
    if name == "no_bias":
        norm.bias = None  # torch 2.15 has `bias=False` for it, 2.11 has not
    for p in norm.parameters():
        nn.init.normal_(p, mean=1)
    layout = torch.channels_last if name == "channels_last" else torch.contiguous_format

    def draw(rank):
        x, t = torch.randn(2, rows(rank), CHANNELS, *after).double()
        return (x * (rank + 1) + rank).to(memory_format=layout), t

    return norm, [[draw(rank) for rank in range(world_size)] for _ in range(STEPS)]


def passes(norm, draws):
    """Forward and backward of (t * y**2).sum() in training mode, then eval: everything one can see of it."""
    seen = {}
    for step, (x, t) in enumerate(draws):
        norm.zero_grad()
        x = x.clone().requires_grad_()
        y = norm(x)
        (t * y.square()).sum().backward()
        seen |= {f"y{step}": y.detach(), f"dx{step}": x.grad}
        seen |= {f"d_{n}{step}": p.grad.clone() for n, p in norm.named_parameters()}
        seen |= {f"{n}{step}": b.clone() for n, b in norm.named_buffers()}
    if norm.track_running_stats:
        seen["eval"] = norm.eval()(x.detach()).detach()
    return seen


def _passes_on_a_rank(rank, world_size):
    results = {}
    for name in CASES:
        norm, draws = prepared(name, world_size)
        before = dict(norm.named_parameters()), list(norm.state_dict())
        network = synchronise(nn.Sequential(norm.eval(), nn.Identity()))
        assert not network[0].training
        shared = network[0].train()
        assert isinstance(shared, RankBatchNorm) and list(shared.state_dict()) == before[1]
        assert all(p is before[0][n] for n, p in shared.named_parameters())
        results[name] = passes(shared, [step[rank] for step in draws])
    for away in DEVIATIONS_AWAY:
        own = far_rows(world_size, away)[rank]
        variance, mean = torch.var_mean(own, 0, correction=0)
        with Counter() as counter:
            joined = [join_statistics(len(own), mean, variance) for _ in range(2)]
        asked = (counter.operators, counter.moved)
        results[away] = {"own": (mean, variance), "joined": joined, "asked": asked}
    one_value = torch.linspace(1e6, 2e6, 256)
    results["alike"] = join_statistics(1_000_003 + rank, one_value, torch.zeros(256))[2]
    # Of one rank: an infinity, whose variance is none, and a number that is none.
    spoilt = torch.tensor([1.0, torch.inf if rank == 1 else 1.0, torch.nan if rank == 1 else 1.0])
    results["spoilt"] = join_statistics(2, spoilt, spoilt - spoilt)[2]
    return results


@pytest.fixture(scope="module", params=[2, 4])
def on_ranks(request):
    return run_ranks(_passes_on_a_rank, request.param)


@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process_on_the_joined_batch(name, on_ranks):
    norm, draws = prepared(name, len(on_ranks))
    joined = [tuple(torch.cat([rank[i] for rank in step]) for i in (0, 1)) for step in draws]
    expected = passes(norm, joined)
    ranks = [results[name] for results in on_ranks]
    assert all(seen.keys() == expected.keys() for seen in ranks)
    for key, value in expected.items():
        if key.startswith("d_"):  # each rank has its share, and DDP's mean is that of the mean loss
            found = sum(seen[key] for seen in ranks)
        elif key[:2] in ("y0", "y1", "dx", "ev"):
            found = torch.cat([seen[key] for seen in ranks])
        else:  # running statistics: the same bits on every rank, or a checkpoint would depend on who wrote it
            found = ranks[0][key]
            assert all(torch.equal(found, seen[key]) for seen in ranks), key
        torch.testing.assert_close(found, value, rtol=1e-11, atol=1e-11, msg=lambda m, key=key: f"{key}: {m}")


# ------------------------------------------------------------------ sums of squares, of means far from zero
DEVIATIONS_AWAY = (0, 1e3, 1e4)


def far_rows(world_size, away):
    """float32 rows of each rank, 50 and more of 64 channels, `away` deviations from zero."""
    generator = torch.Generator().manual_seed(int(away))
    return [
        (1.3 * (torch.randn(50 + 7 * r, 64, generator=generator).double() + away)).float()
        for r in range(world_size)
    ]


def chan(counts, means, variances):
    """Chan's way of joining, which squares only what is near zero."""
    mean = (counts * means).sum(0) / counts.sum()
    return mean, (counts * (variances + (means - mean).square())).sum(0) / counts.sum()


def off(found, expected):
    return ((found.double() - expected) / expected).abs().max().item()


@pytest.mark.parametrize("away", DEVIATIONS_AWAY)
def test_a_float64_sum_of_squares_loses_nothing_that_a_float32_could_show(away, on_ranks):
    rows = far_rows(len(on_ranks), away)
    counts = torch.tensor([[len(own)] for own in rows])
    means, variances = (torch.stack([ranks[away]["own"][i] for ranks in on_ranks]) for i in (0, 1))
    total, mean, variance = on_ranks[0][away]["joined"][0]
    assert total.tolist() == [sum(map(len, rows))] and variance.dtype == torch.float32

    # The sum alone, beside Chan's in float64 of the very same means and variances.
    exact_mean, exact_variance = chan(counts.double(), means.double(), variances.double())
    assert off(variance, exact_variance) < 2**-24 + 8 * 2**-53 * (1 + away**2)
    torch.testing.assert_close(mean.double(), exact_mean, rtol=2**-24, atol=1e-15)
    # All of it, beside the joined rows: as near as Chan's in float32, whose own rounding is what is left.
    joined = torch.cat(rows).double()
    truth = joined.var(0, correction=0)
    float32 = chan(counts.float(), means, variances)
    assert off(variance, truth) < 1.1 * off(float32[1], truth) + 2e-7
    assert (mean - joined.mean(0)).abs().max() <= (float32[0] - joined.mean(0)).abs().max() + 1e-8
    # And the same sums in float32, to see that there is something to lose.
    shares = counts / counts.sum()
    square = (shares * (variances + means.square())).sum(0) - (shares * means).sum(0).square()
    assert away == 0 or off(square, exact_variance) > 0.05


def test_joined_statistics_are_the_same_bits_on_every_rank_and_in_every_pass(on_ranks):
    for away in DEVIATIONS_AWAY:
        every = [torch.cat(joined) for ranks in on_ranks for joined in ranks[away]["joined"]]
        assert len(every) == 2 * len(on_ranks) and all(torch.equal(each, every[0]) for each in every)


def test_what_a_rank_computes_of_statistics_does_not_grow_with_the_ranks(on_ranks):
    operators, moved = on_ranks[0][0]["asked"]
    assert operators <= 2 * 12  # the small ones that a GPU would start for a layer, the all-reduce among them
    assert moved <= 2 * 8 * 129 * 16  # passes over 1 + 2C float64 numbers, whatever the number of ranks


def test_rows_that_are_all_alike_have_no_variance_and_never_less_than_none(on_ranks):
    for ranks in on_ranks:
        assert (ranks["alike"] >= 0).all() and (ranks["alike"] < 1e-3).all()  # of a mean of 1e6


def test_a_number_that_is_none_spoils_its_channel_on_every_rank_and_no_other(on_ranks):
    for ranks in on_ranks:
        assert ranks["spoilt"].isnan().tolist() == [False, True, True]


# ------------------------------------------------------------------------------ a network under DDP, and bfloat16
def _network_under_ddp(rank, world_size):
    network = build_model(
        "resnet_tiny", stem="cifar", hidden=12, output=6, head_batchnorm=True, seed=1
    ).double()
    ddp = nn.parallel.DistributedDataParallel(synchronise(network), broadcast_buffers=False)
    x, t = joined_images(world_size)
    rows = slice(3 * rank, 3 * rank + 3)
    (ddp(x[rows]) * t[rows]).sum(1).mean().backward()
    seen = {n: p.grad for n, p in network.named_parameters()} | dict(network.named_buffers())

    # bfloat16 images far from zero: their mean is no bfloat16, their deviation is lost in sums of squares.
    norm = synchronise(nn.Sequential(nn.BatchNorm2d(2)))
    x = far_from_zero()[rank::world_size]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm(x)
    seen |= {"bf16": y.detach(), "bf16_mean": norm[0].running_mean, "bf16_var": norm[0].running_var}
    wide = synchronise(nn.Sequential(nn.BatchNorm2d(2, momentum=1.0)))
    wide(x.float() * 100)
    return seen | {"far_var": wide[0].running_var}


def joined_images(world_size):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(3 * world_size, 3, 16, 16, generator=generator).double()
    return x, torch.randn(3 * world_size, 6, generator=generator).double()


def far_from_zero():
    return (torch.randn(8, 2, 9, 9, generator=torch.Generator().manual_seed(8)) + 300).bfloat16()


@pytest.fixture(scope="module")
def networks():
    return run_ranks(_network_under_ddp, 2)


def test_a_network_under_ddp_has_the_gradients_and_buffers_of_one_process(networks):
    alone = build_model(
        "resnet_tiny", stem="cifar", hidden=12, output=6, head_batchnorm=True, seed=1
    ).double()
    x, t = joined_images(2)
    (alone(x) * t).sum(1).mean().backward()
    expected = {n: p.grad for n, p in alone.named_parameters()} | dict(alone.named_buffers())
    for name, value in expected.items():
        assert torch.equal(networks[0][name], networks[1][name]), name
        torch.testing.assert_close(
            networks[0][name], value, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_statistics_are_float32_under_autocast_and_do_not_cancel_far_from_zero(networks):
    x = far_from_zero().double()
    alone = nn.BatchNorm2d(2).double()
    expected = alone(x).detach()
    found = torch.empty_like(expected)
    for rank, seen in enumerate(networks):
        assert seen["bf16"].dtype == torch.bfloat16
        found[rank::2] = seen["bf16"].double()
        torch.testing.assert_close(seen["bf16_mean"].double(), alone.running_mean, rtol=1e-6, atol=0)
        torch.testing.assert_close(seen["bf16_var"].double(), alone.running_var, rtol=1e-5, atol=0)
        variance = (x * 100).transpose(0, 1).flatten(1).var(1)
        torch.testing.assert_close(seen["far_var"].double(), variance, rtol=1e-5, atol=0)
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=1e-5)


# ------------------------------------------------------------------------- nothing read, layout and dtype kept
READS = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "equal",
)  # the host waits for a value or a shape


class Reads(TorchDispatchMode):
    """Counts the operators that make the host wait for a device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        self.count += name in READS or mask
        return function(*args, **(kwargs or {}))


def _keep(kept, tensor):
    kept.append(tensor)
    return tensor


def _a_pass_in_bfloat16(rank, world_size):
    seen = {}
    for momentum in (0.1, None):
        norm = synchronise(nn.Sequential(nn.BatchNorm2d(4, momentum=momentum)))
        x = torch.randn(3, 4, 5, 2).bfloat16().to(memory_format=torch.channels_last).requires_grad_()
        kept = []
        keep = partial(_keep, kept)
        with (
            Reads() as reads,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        ):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = norm(x)
            y.backward(torch.ones_like(y))
        seen[str(momentum)] = {
            "reads": reads.count,
            "strides": [x.stride(), y.stride(), x.grad.stride()],
            "dtypes": [str(t.dtype) for t in (y, x.grad, norm[0].weight.grad, norm[0].running_var)],
            "kept": [(str(t.dtype), t.numel()) for t in kept if t.numel() >= x.numel()],
        }
    with Reads() as reads:
        x[x > 0], x.detach().sum().item(), bool(x.sum() > 0)
    seen["control"] = reads.count
    refusals = []
    for shape in ((3,), (0, 3)):
        with pytest.raises(ValueError) as refused:
            RankBatchNorm(3)(torch.zeros(shape))
        refusals.append(str(refused.value))
    return seen | {"refusals": refusals}


@pytest.fixture(scope="module")
def bfloat16_pass():
    return run_ranks(_a_pass_in_bfloat16, 2)


@pytest.mark.parametrize("momentum", ["0.1", "None"])
def test_a_pass_reads_no_value_on_the_host(momentum, bfloat16_pass):
    for seen in bfloat16_pass:
        assert seen["control"] == 3  # what is counted is seen: a mask's indexing, a number, a condition
        assert seen[momentum]["reads"] == 0


def test_layout_and_dtype_are_the_inputs_and_only_the_input_is_kept(bfloat16_pass):
    for seen in (result["0.1"] for result in bfloat16_pass):
        assert seen["strides"] == [(40, 1, 8, 4)] * 3  # channels last, in and out and back
        assert seen["dtypes"] == ["torch.bfloat16"] * 2 + ["torch.float32"] * 2
        assert seen["kept"] == [("torch.bfloat16", 120)]


def test_an_input_without_statistics_is_refused_by_name(bfloat16_pass):
    one_dimension, empty = bfloat16_pass[0]["refusals"]
    assert "expected (N, C, ...), got 1 dimensions" in one_dimension
    assert "batch is empty" in empty


# ------------------------------------------------------------------------------------- which implementation
def _which(rank, world_size):
    found = {}
    for implementation in ("ranks", "torch"):
        network = build_model("resnet_tiny", stem="cifar", head_batchnorm=True)
        keys = list(network.state_dict())
        for _ in range(2):  # the second time changes nothing
            network = synchronise(network, implementation=implementation)
            assert list(network.state_dict()) == keys
            kinds = {type(m).__name__ for m in network.modules() if "BatchNorm" in type(m).__name__}
            found.setdefault(implementation, []).append(sorted(kinds))
    return found


def test_torchs_own_is_taken_when_asked_for():
    for found in run_ranks(_which, 2):
        assert found == {"ranks": [["RankBatchNorm"]] * 2, "torch": [["SyncBatchNorm"]] * 2}
    with pytest.raises(ValueError, match='it is "ranks" or "torch"'):
        synchronise(nn.Sequential(), implementation="apex")


def test_a_run_says_whose_statistics_it_uses():
    assert describe(8, shared=True) == "statistics of the whole batch, shared by 8 processes (RankBatchNorm)"
    assert describe(1, shared=True) == describe(1, shared=False) == "statistics of the whole batch"
    assert "each process's own images" in describe(2, shared=False)


def test_alone_the_model_is_returned_as_it_is():
    model = build_model("resnet_tiny", stem="cifar")
    kinds = [type(module) for module in model.modules()]
    assert synchronise(model) is model
    assert [type(module) for module in model.modules()] == kinds
