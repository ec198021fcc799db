"""BatchNorm, residual and ReLU as one: norm.cu, built for the CPU thread by thread, against PyTorch in float64."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fastsuncet.models import norm_kernel
from fastsuncet.models.norm_kernel import fused_norm
from fastsuncet.models.resnet import BasicBlock, build_model
from fastsuncet.models.sync_batchnorm import RankBatchNorm, fuse, synchronize
from pipelines.cuda_compiler import KernelError
from tests.support.host_kernels import HostModule, on_the_host
from tests.support.networks import narrow_resnet50
from tests.support.ranks import run_ranks

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(scope="module")
def host():
    with on_the_host(norm_kernel) as launched:
        yield launched


@pytest.fixture
def usable(host, monkeypatch):
    """Let `RankBatchNorm` use the kernels on a CPU."""
    monkeypatch.setattr(norm_kernel, "usable", lambda *_: True)
    host.clear()
    return host


def seen_of(function, leaves, d_y):
    """Return the value of `function` at `leaves`, and the gradient of each of them for d_y."""
    leaves = [None if leaf is None else leaf.detach().requires_grad_() for leaf in leaves]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], d_y)]


def draw(shape, dtype, generator, *, mean=0.0):
    x = (torch.randn(shape, generator=generator) + mean).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def fused(x, residual, weight, bias, running=None, relu=True, eps=1e-12, momentum=0.1):
    mean, variance = torch.zeros(2, len(weight)) if running is None else running
    statistics = {"running_mean": mean, "running_var": variance}
    norm = SimpleNamespace(weight=weight, bias=bias, eps=eps, momentum=momentum, **statistics)
    return fused_norm([x], [norm], residual, relu=relu, shared=False)


@pytest.mark.slow
@given(
    shape=st.tuples(st.integers(1, 5), st.sampled_from([8, 16, 24, 40]), st.integers(1, 4), st.integers(2, 5))
    | st.tuples(st.integers(2, 40), st.sampled_from([8, 48])),
    dtype=st.sampled_from(list(ROUNDING)),
    relu=st.booleans(),
    residual=st.booleans(),
    mean=st.sampled_from([0.0, 100.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_kernels_give_pytorchs_values_gradients_and_statistics(
    host, shape, dtype, relu, residual, mean, seed
):
    generator = torch.Generator().manual_seed(seed)
    channels = shape[1]
    x = draw(shape, dtype, generator, mean=mean)
    extra = draw(shape, dtype, generator) if residual else None
    d_y = draw(shape, dtype, generator)
    weight, bias = torch.randn(2, channels, generator=generator)
    running = [torch.randn(channels, generator=generator), torch.rand(channels, generator=generator)]
    truth = [r.double() for r in running]

    def ours(x, extra, weight, bias):
        return fused(x, extra, weight, bias, running, relu, eps=1e-3, momentum=0.3)

    def theirs(x, extra, weight, bias):
        y = F.batch_norm(x, *truth, weight, bias, training=True, momentum=0.3, eps=1e-3)
        y = y if extra is None else y + extra
        # By the signs of ours: where y is within rounding of 0 either is right.
        return y * (found[0] > 0) if relu else y

    leaves = (x, extra, weight, bias)
    found = seen_of(ours, leaves, d_y)
    expected = seen_of(theirs, [None if t is None else t.double() for t in leaves], d_y.double())
    assert found[0].dtype == found[1].dtype == dtype and found[0].stride() == found[1].stride() == x.stride()
    rows = x.numel() // channels
    sharp = x.double().transpose(0, 1).flatten(1).var(1, correction=0).add(1e-3).rsqrt().max().item()
    for a, b in zip((*found, *running), (*expected, *truth)):
        scale = b.abs().max().clamp(min=1).item()
        # A mean of 100 in float32 is precise to 1e-5, and a division by a small deviation enlarges that.
        tolerance = ROUNDING[dtype] * 4 + 2e-7 * (1 + mean) * sharp**2 * 4 + 1e-6 * rows
        assert (a.double() - b).abs().max().item() <= tolerance * scale


def test_kernels_relu_stops_what_pytorchs_stops(host):
    generator = torch.Generator().manual_seed(3)
    x, residual = (draw((4, 16, 5, 3), torch.bfloat16, generator) for _ in range(2))
    for extra in (None, residual):
        leaves = [x, extra, torch.ones(16), torch.zeros(16)]
        d_y = torch.ones_like(x)
        ours = seen_of(fused, leaves, d_y)
        wide = F.batch_norm(x.float(), None, None, training=True, eps=1e-12)
        wide = wide if extra is None else wide + extra.float()
        assert torch.equal(ours[0] > 0, wide.bfloat16() > 0)
        if extra is not None:
            # The gradient of the residual is 1 where it passed.
            assert torch.equal(ours[2], (wide > 0).bfloat16())
        assert ours[-1].tolist() == [(wide > 0).transpose(0, 1)[c].sum().item() for c in range(16)]


def test_kernels_give_the_same_bits_for_any_grid_and_alignment(host, monkeypatch):
    generator = torch.Generator().manual_seed(5)
    x, residual, d_y = (draw((7, 24, 5, 5), torch.bfloat16, generator) for _ in range(3))
    constants = torch.randn(2, 25, generator=generator)
    launched, launch_ = [], HostModule.launch

    def watched(module, kernel, grid, block, *values, **more):
        launched.append((kernel, grid[0] * grid[1], values))
        launch_(module, kernel, grid, block, *values, **more)

    monkeypatch.setattr(HostModule, "launch", watched)
    results = []
    for blocks, (weight, bias) in ((2048, constants[:, :24].clone()), (6, constants[:, :24].clone())):
        if blocks == 6:  # one float after a multiple of 16 bytes
            weight, bias = (torch.cat([torch.zeros(1), c])[1:] for c in (weight, bias))
        monkeypatch.setattr(norm_kernel, "ROW_BLOCKS", blocks)
        results.append(seen_of(fused, (x, residual, weight, bias), d_y))
    assert all(map(torch.equal, *results))
    counts = [count for kernel, count, _ in launched if kernel.endswith("apply")]
    assert counts[0] == counts[1] > 6 == counts[2] == counts[3]
    means = [values[2].data_ptr() for kernel, _, values in launched if kernel == "norm_apply"]
    assert all(address % 16 == 0 for address in means)


def test_kernels_keep_nan(host):
    x = draw((2, 8, 3, 3), torch.bfloat16, torch.Generator().manual_seed(0))
    x[0, 3, 1, 1] = torch.nan
    y = fused(x, None, torch.ones(8), torch.zeros(8))
    assert y[:, 3].isnan().all() and not y[:, :3].isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet_tiny", "resnet50"])
def test_fused_network_is_the_same_network(name, monkeypatch):
    narrow_resnet50(monkeypatch, 8)
    stem = "cifar" if name == "resnet_tiny" else "imagenet"
    network = build_model(name, stem=stem, hidden=8, output=4, head_batchnorm="all")
    parameters, keys = list(network.parameters()), list(network.state_dict())
    plain = copy.deepcopy(network).double()
    fused = fuse(network, shared=False)
    assert list(fused.state_dict()) == keys
    assert all(a is b for a, b in zip(fused.parameters(), parameters))
    assert not any(isinstance(m, nn.ReLU) for m in fused.encoder.children())
    fused = fused.double()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for training in (True, False):
        for a, b in zip(*(_everything(n.train(training), x) for n in (plain, fused))):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_block_or_encoder_that_is_not_known_keeps_a_relu_that_it_uses_twice():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1, self.relu = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()
            self.layer1 = nn.Identity()

        def forward(self, x):
            return self.relu(x + self.bn1(self.conv1(self.relu(x))))

    plain = Block()
    fused = fuse(copy.deepcopy(plain), shared=False)
    assert isinstance(fused.bn1, RankBatchNorm)
    x = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    for a, b in zip(_everything(plain, x), _everything(fused, x)):
        torch.testing.assert_close(a, b)


def _everything(network, x):
    network.zero_grad()
    y = network(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in network.parameters()), *map(torch.clone, network.buffers())]


def test_fused_norm_falls_back_to_the_twin(usable):
    norm = RankBatchNorm(8)
    norm.shared = False
    x = torch.randn(2, 8, 3, 4, generator=torch.Generator().manual_seed(0))
    rows = x.contiguous(memory_format=torch.channels_last)
    for unfit in (x, x.flatten(2), rows.double()):  # another layout, another shape, another dtype
        norm.to(unfit.dtype)(unfit)
    assert usable == []
    norm.float()(rows)
    norm.eval()(rows)
    assert usable == ["norm_moments", "norm_join", "norm_apply"]  # of the step in training
    with pytest.raises(ValueError, match="more than 1 value"):
        norm.train()(rows[:1, :, :1, :1])


def _block_on_a_rank(rank, world_size):
    """Return a step of a block whose shortcut has a BatchNorm, and the bytes of the messages."""
    seen, sent, reduce = {}, [], dist.all_reduce
    with on_the_host(norm_kernel), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda x, **more: (sent.append(x.nbytes), reduce(x, **more))[1])
        for kind in ("kernel", "own", "mixed", "joined", "twin"):
            torch.manual_seed(0)
            block = BasicBlock(8, 16, stride=2).to(memory_format=torch.channels_last)
            for norm in (block.bn2, block.downsample[1]):
                nn.init.normal_(norm.weight)
            by_kernels = kind in ("kernel", "own") or (kind == "mixed" and rank == 1)
            patch.setattr(norm_kernel, "usable", lambda *_, used=by_kernels: used)
            block = synchronize(block) if kind == "twin" else fuse(block, shared=kind != "own")
            generator = torch.Generator().manual_seed(rank)
            x = draw((2 + rank, 8, 6, 6), torch.float32, generator).requires_grad_()
            d_y = torch.randn(2 + rank, 16, 3, 3, generator=generator)
            sent.clear()
            y = block(x)
            y.backward(d_y)
            found = [y.detach(), x.grad, *(p.grad for p in block.parameters()), *block.buffers()]
            seen[kind] = found, sent.copy()
    return seen


@pytest.mark.slow
def test_kernels_of_a_block_share_messages_over_ranks():
    """test_sync_batchnorm.py has the values of one layer."""
    for seen in run_ranks(_block_on_a_rank, 2):
        # mixed: on one rank the kernels do not run; joined: on none. One message of the last layer and the shortcut in
        # place of two, each way.
        for kind in ("kernel", "mixed", "joined"):
            found, sent = seen[kind]
            for a, b in zip(found, seen["twin"][0]):
                torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-5)
            assert sent == [8 * 33, 8 * 66, 4 * 64, 4 * 32]
        assert len(seen["twin"][1]) == 6 and seen["own"][1] == []  # own: not shared


def test_batchnorm_proof_fails_when_kernels_and_twin_differ(host, monkeypatch):
    here, shapes = torch.device("cpu"), [(2, 24, 9, 5), (30, 8)]
    # Channels that the kernels do not take are skipped.
    norm_kernel.prove(here, [*shapes, (2, 18, 3, 3), (30, 2)])
    monkeypatch.setattr(F, "relu", lambda x: x)
    with pytest.raises(KernelError, match=r"BatchNorm of \(2, 24, 9, 5\) in torch.float32 differs from its"):
        norm_kernel.prove(here, shapes)
