"""The passes of BatchNorm by torch's CUDA operators: their arithmetic on a CPU, the operators themselves on a GPU."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from fastsuncet.models import norm_kernel, sync_batchnorm
from fastsuncet.models.sync_batchnorm import moments, takes_cuda_operators
from tests.support.host_kernels import on_the_host
from tools.bench.dispatch_counter import Counter
from tools.bench.harness import waiting_raises

GPU = torch.device("cuda", 0)


@pytest.fixture
def operators(monkeypatch):
    """Replace torch's CUDA operators (aten/src/ATen/native/cuda/Normalization.cuh) by their formulas in float64."""

    def stats(x, eps):
        assert x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
        variance, mean = torch.var_mean(x.double(), [d for d in range(x.dim()) if d != 1], correction=0)
        return mean.float(), (variance + eps).rsqrt().float()

    def by_channel(x, *numbers):
        return [n.double().view(-1, *[1] * (x.dim() - 2)) for n in numbers]

    def elemt(x, weight, bias, mean, inverse, eps):
        mean, inverse, weight, bias = by_channel(x, mean, inverse, weight, bias)
        return ((x.double() - mean) * inverse * weight + bias).to(x.dtype)

    def reduce(dy, x, mean, inverse, weight, input_wanted, weight_wanted, bias_wanted):
        assert dy.dtype == x.dtype and dy.stride() == x.stride()
        assert (input_wanted, weight_wanted, bias_wanted) == (True, False, False)
        dims = [d for d in range(x.dim()) if d != 1]
        centered = x.double() - by_channel(x, mean)[0]
        return dy.double().sum(dims).float(), (dy.double() * centered).sum(dims).float(), None, None

    def backward(dy, x, mean, inverse, weight, sum_dy, sum_dy_centered, counts):
        assert counts.dtype == torch.int32
        given = (mean, inverse, weight, sum_dy, sum_dy_centered)
        mean, inverse, weight, sum_dy, slope = by_channel(x, *given)
        total = counts.sum().double()
        d_x = dy.double() - sum_dy / total - (x.double() - mean) * inverse.square() * slope / total
        return (d_x * inverse * weight).to(x.dtype)

    names = ("stats", "elemt", "backward_reduce", "backward_elemt")
    launched = []
    for name, operator in zip(names, (stats, elemt, reduce, backward)):

        def counted(*arguments, name=name, operator=operator):
            launched.append(f"batch_norm_{name}")
            with _disable_current_modes():
                return operator(*arguments)

        monkeypatch.setattr(torch, f"batch_norm_{name}", counted)
    monkeypatch.setattr(sync_batchnorm, "takes_cuda_operators", lambda *_: True)
    return launched


def passed(layer, x, dy):
    """Return y, the gradients of x, weight and bias, and the running statistics."""
    layer = sync_batchnorm.synchronize(copy.deepcopy(layer))
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    (y,) = sync_batchnorm.normalize_over_ranks((layer,), (x,))
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var]


CASES = [
    ((6, 5, 4, 3), torch.channels_last),
    ((6, 5, 4, 3), torch.contiguous_format),
    ((9, 7), torch.contiguous_format),
]


def example(shape, layout, dtype=torch.float32, device="cpu"):
    draw = torch.Generator().manual_seed(2)
    layer = nn.BatchNorm2d(shape[1])
    nn.init.uniform_(layer.weight, 0.5, 2, generator=draw)
    nn.init.uniform_(layer.bias, -1, 1, generator=draw)
    x = (3 * torch.randn(shape, generator=draw) + 7).to(device, dtype, memory_format=layout)
    # The gradient has the other layout, as it can after a flatten or a slice.
    dy = torch.randn(shape, generator=draw).to(device, dtype)
    return layer.to(device), x, dy


@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_cuda_passes_equal_the_plain_ones(shape, layout, operators, monkeypatch):
    layer, x, dy = example(shape, layout)
    found = passed(layer, x, dy)
    monkeypatch.setattr(sync_batchnorm, "takes_cuda_operators", lambda *_: False)
    for ours, plain in zip(found, passed(layer, x, dy), strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-5, atol=2e-5)
    assert found[0].stride() == x.stride() == found[1].stride()


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "forward"), [(True, 9), (False, 25)])
def test_batchnorm_over_ranks_takes_few_launches(operators, monkeypatch, kernels, forward):
    """Without the all-reduces. Of the kernels' calls 4 are allocations forward and 3 backward."""
    for module in (sync_batchnorm, norm_kernel):
        monkeypatch.setattr(module, "world_size", lambda: 2)
    monkeypatch.setattr(norm_kernel, "usable", lambda *_: kernels)
    layer, x, dy = example((6, 16, 4, 4), torch.channels_last)
    layer, dy = sync_batchnorm.synchronize(layer), dy.contiguous(memory_format=torch.channels_last)
    with on_the_host(norm_kernel) as launched, Counter() as counter:
        y = layer(x.requires_grad_())
    assert len(launched) + len(operators) + counter.operators == forward
    operators.clear()
    with on_the_host(norm_kernel) as launched, Counter() as counter:
        y.backward(dy)
    assert len(launched) + len(operators) + counter.operators == 7
    assert len(launched) == 3 * kernels


def test_cuda_passes_give_a_constant_channel_no_variance(operators):
    mean, variance = moments(torch.full((4, 3, 2, 2), 5.0), 1e-5, True)
    assert torch.equal(mean, torch.full((3,), 5.0))
    assert torch.all((variance >= 0) & (variance < 1e-11))


def test_cuda_passes_are_for_a_gpu_and_float32_weights():
    x, single = torch.zeros(2, 3, 1, 1), [torch.ones(3)] * 2
    assert not takes_cuda_operators(x, *single)

    class OnGPU:
        is_cuda, dtype = True, torch.bfloat16

    assert takes_cuda_operators(OnGPU(), *single)
    assert not takes_cuda_operators(OnGPU(), torch.ones(3).double(), single[0])
    OnGPU.dtype = torch.float64
    assert not takes_cuda_operators(OnGPU(), *single)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_cuda_passes_on_a_gpu_equal_the_plain_ones_without_a_sync(shape, layout, dtype, monkeypatch):
    layer, x, dy = example(shape, layout, dtype, GPU)
    assert takes_cuda_operators(x, layer.weight, layer.bias)
    with waiting_raises():
        found = passed(layer, x, dy)
    monkeypatch.setattr(sync_batchnorm, "takes_cuda_operators", lambda *_: False)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    for ours, plain in zip(found, passed(layer, x, dy), strict=True):
        scale = plain.abs().max().float().item() + 1
        torch.testing.assert_close(ours.float(), plain.float(), rtol=tolerance, atol=tolerance * scale)
