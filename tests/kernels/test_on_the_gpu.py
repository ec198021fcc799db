"""The kernels on a GPU, each against its twin: `pytest -m gpu tests/kernels/test_on_the_gpu.py`."""

import copy
import gc

import pytest
import torch
from torch.torch_version import TorchVersion

from fastsuncet import nt_xent, suncet, sup_con
from fastsuncet.config import load_config
from fastsuncet.models import norm_kernel, sync_batchnorm
from fastsuncet.models.resnet import build_model
from fastsuncet.optim import LARS, parameter_groups
from fastsuncet.training.cuda_graph import FREES_FAILED_CAPTURES, capture_on_device
from fastsuncet.training.multi_view_model import PiecewiseModel
from fastsuncet.tuning.fast_paths import PATHS
from fastsuncet.tuning.trials import try_kernel
from tests.support import dense_losses
from tests.support.dense_losses import gradient
from tests.support.networks import give_gradients
from tests.support.runs import CONFIGS
from tools.bench import lars, run
from tools.bench.harness import waiting_raises

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _float32_is_float32():
    """Turn TF32 off: torch convolves in TF32 by default, and an image can turn it on for products too."""
    switches = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [each.allow_tf32 for each in switches]
    for each in switches:
        each.allow_tf32 = False
    yield
    for each, value in zip(switches, before):
        each.allow_tf32 = value


@pytest.mark.parametrize("config", ["in1k_10pct", "cifar10_suncet"])
def test_every_kernel_agrees_with_its_twin_on_a_runs_own_shapes(config):
    words = ["data.root=none", "model.fused_batchnorm=true", "meta.precision=bf16"]
    words += ["data.split.file=none"] if config == "in1k_10pct" else []
    many = config == "in1k_10pct"
    config = load_config(CONFIGS / f"{config}.yaml", words)
    sizes = config.resolve(64 if many else 1, 1_281_167, 1000 if many else 10, 128_000)
    with torch.cuda.stream(torch.cuda.Stream()):
        for name, path in PATHS.items():
            if path.trial and not path.excluded(config, sizes) and not path.missing():
                verdict = try_kernel(name, path.trial(config, sizes), GPU)
                assert verdict.problem is None, (name, verdict)
    for dtype in norm_kernel.ELEMENTS:
        norm_kernel.prove(GPU, dtypes=[dtype])


@pytest.mark.parametrize("dtype", list(norm_kernel.ELEMENTS))
def test_batchnorm_over_ranks_by_kernels_is_that_by_operators_without_a_sync(dtype, monkeypatch):
    generator = torch.Generator(GPU).manual_seed(0)
    # A gradient of its own: that by x itself is zero but for its rounding.
    rows = torch.randn(2, 32, 56, 56, 64, device=GPU, dtype=dtype, generator=generator)
    x, d_y = rows.movedim(-1, 2)
    for module in (sync_batchnorm, norm_kernel):
        monkeypatch.setattr(module, "world_size", lambda: 2)
    results = []
    for kernels in (True, False):
        monkeypatch.setattr(norm_kernel, "usable", lambda *_, kernels=kernels: kernels)
        layer, own = sync_batchnorm.RankBatchNorm(64).to(GPU), x.detach().clone().requires_grad_()
        layer(own).sum().backward()  # compiles the kernels
        with waiting_raises():
            y = layer(own)
            y.backward(d_y)
        results.append([y.detach(), own.grad, layer.weight.grad, layer.running_mean, layer.running_var])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for a, b in zip(*results):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.xfail(
    TorchVersion(torch.__version__) < FREES_FAILED_CAPTURES,
    reason="torch keeps the memory of a failed capture",
    run=False,  # its allocator would believe in every later test of this process that the capture goes on
)
def test_failed_capture_gives_its_memory_back():
    def refused():
        return torch.ones(64 << 20, device=GPU).sum().item()  # a sync

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError):
        capture_on_device(refused, GPU)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (4 << 20)


def stepped(implementation, *, capture=False):
    """Return a ResNet-18's parameters and momentum after four steps of LARS."""
    network = build_model("resnet18", stem="cifar").to(GPU, memory_format=torch.channels_last)
    groups = parameter_groups(network, exclude_bias_and_norm=True)
    lr = torch.full((), 0.3, device=GPU)
    optimizer = LARS(groups, lr, weight_decay=1e-4, implementation=implementation)
    for p in network.parameters():
        p.grad = torch.zeros_like(p)

    def draw(seed):
        generator = torch.Generator(GPU).manual_seed(seed)
        for p in network.parameters():
            p.grad.normal_(generator=generator)

    graph = None
    for step in range(4):
        draw(step)
        if capture and step == 1:  # step 0 has loaded the kernels and laid out the tables
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
        if graph is not None:
            graph.replay()
        else:
            optimizer.step()
    state = [optimizer.state[p]["momentum_buffer"] for p in network.parameters()]
    return [x.detach().clone() for x in (*network.parameters(), *state)]


def test_lars_equals_its_twin_and_repeats_its_bits_in_a_graph():
    kernel, again, twin = map(stepped, ("kernel", "auto", "foreach"))
    graph = stepped("kernel", capture=True)
    for a, b, c, d in zip(kernel, again, graph, twin):
        assert torch.equal(a, b) and torch.equal(a, c)
        torch.testing.assert_close(a, d, rtol=1e-4, atol=1e-5 * d.abs().max().item())


def test_lars_under_a_scaler_does_not_sync():
    network = build_model("resnet18", stem="cifar")
    give_gradients(network)
    network.to(GPU)
    optimizer = LARS(network.parameters(), torch.full((), 0.1, device=GPU), implementation="kernel")
    optimizer.step()  # its tables are copied from the host
    before = [p.clone() for p in network.parameters()]
    optimizer.grad_scale = torch.full((), 8.0, device=GPU)
    optimizer.found_inf = torch.ones((), device=GPU)
    with waiting_raises():
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters()))


@pytest.mark.parametrize("rows", [64, 1000, 3000])
def test_losses_by_the_kernel_are_the_dense_equations(rows):
    z = torch.randn(rows, 128, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(rows) % (rows // 4)
    for loss, arguments in ((nt_xent, ()), (suncet, (labels,)), (sup_con, (labels,))):
        on_card = [a.to(GPU) for a in arguments]
        value, slope = gradient(loss, z.to(GPU), *on_card, temperature=0.1)
        z_on_card = z.to(GPU)
        with waiting_raises():
            again = gradient(loss, z_on_card, *on_card, temperature=0.1)
        dense = getattr(dense_losses, loss.__name__)
        true_value, true_slope = gradient(dense, z.double(), *arguments, temperature=0.1)
        assert value.item() == pytest.approx(true_value.item(), rel=1e-5)
        assert (slope.cpu().double() - true_slope).norm() < 1e-5 * true_slope.norm()
        assert torch.equal(value, again[0]) and torch.equal(slope, again[1])


@pytest.mark.parametrize("most", [None, 4])
def test_fused_network_trains_as_the_plain_one_also_in_pieces_and_in_a_graph(most):
    twin = build_model("resnet50", hidden=64, output=16).to(GPU, memory_format=torch.channels_last)
    network = sync_batchnorm.fuse(copy.deepcopy(twin), shared=False)
    x = torch.randn(8, 3, 64, 64, device=GPU).contiguous(memory_format=torch.channels_last)

    def gradients(model, dtype):
        model.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            z = PiecewiseModel(model, most)((x,), x[:0]).projections if most else model(x)
            loss = z.float().square().mean()
        loss.backward()
        return loss.detach(), [p.grad for p in model.parameters()]

    # In float32: fifty layers at random weights enlarge a rounding some hundred times, and in bfloat16 the gradients of
    # two right networks have little in common (on a CPU a cosine of 0.3; in float32, even with a variance by the
    # difference of two sums, 0.9996).
    loss, found = gradients(network, torch.float32)
    expected_loss, expected = gradients(twin, torch.float32)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-3)
    for a, b in zip(found, expected):
        assert torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.99
    if most:
        return  # no step in pieces is captured

    loss, _ = gradients(network, torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(network, torch.bfloat16)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = gradients(network, torch.bfloat16)
    graph.replay()
    assert captured.item() == pytest.approx(loss.item(), rel=1e-3)


def test_bench_times_lars_as_a_graph(capsys):
    assert run.main(["lars", "--quick", "--device", "cuda"]) == 0
    assert lars.GRAPH in (said := capsys.readouterr().out) and lars.LIMIT in said and "launched" not in said
