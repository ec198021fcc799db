"""LARS by apex's kernels, on a stand-in of `amp_C` that follows their contract: csrc/ of github.com/NVIDIA/apex."""

import pytest
import torch

from fastsuncet.optim import LARS, LARSSettings, lars, lars_apex
from fastsuncet.optim.device_lr import fill, on_host
from fastsuncet.optim.lars_reference import lars_reference
from pipelines.cuda_compiler import KernelError

HERE = torch.device("cpu")


def checked(chunk, flag, lists):
    """What every kernel of apex asks of its tensors."""
    assert isinstance(chunk, int) and flag.dtype == torch.int32 and flag.shape == (1,)
    for tensors in zip(*lists, strict=True):
        for x in tensors:
            dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
            assert dense and x.dtype == torch.float32 and x.numel() == tensors[0].numel()


class StandIn:
    """`amp_C` in torch's operators."""

    def __init__(self):
        self.calls = []

    def multi_tensor_l2norm(self, chunk, flag, lists, per_tensor):
        checked(chunk, flag, lists)
        self.calls.append("l2norm")
        norms = torch.stack([x.norm() for x in lists[0]])
        if not norms.isfinite().all():
            flag.fill_(1)  # and goes on
        return norms.norm().view(1), norms if per_tensor else norms[:0]

    def multi_tensor_sgd(
        self, chunk, flag, lists, wd, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale
    ):
        checked(chunk, flag, lists)
        # pybind takes no tensor for a float.
        assert all(type(x) is float for x in (wd, momentum, dampening, lr, scale))
        assert all(type(x) is bool for x in (nesterov, first_run, wd_after_momentum))
        self.calls.append("sgd")
        if flag.item():
            return
        for g, w, b in zip(*lists):
            step = g * scale if wd_after_momentum else g * scale + wd * w
            if momentum:
                b.copy_(step if first_run else b * momentum + (1 - dampening) * step)
                step = step + momentum * b if nesterov else b
            w.sub_(lr * (step + wd * w if wd_after_momentum else step))


@pytest.fixture
def apex(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(lars_apex, "extension", lambda: stand_in)
    return stand_in


@pytest.mark.parametrize("lr_in_momentum", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_lars_apex_follows_the_formula(apex, lr_in_momentum, nesterov, adapts, on_device, scaled):
    settings = LARSSettings(
        weight_decay=1e-2,
        lr_in_momentum=lr_in_momentum,
        nesterov=nesterov,
        lars=adapts,
        trust_coefficient=0.1,
    )
    generator = torch.Generator().manual_seed(0)

    def draw(zero):
        shapes = [(3, 5), (8, 4, 3, 3), (7,)]
        tensors = [torch.randn(shape, generator=generator) * (i != zero) for i, shape in enumerate(shapes)]
        tensors[1] = tensors[1].contiguous(memory_format=torch.channels_last)
        return tensors

    params = draw(zero=0)
    buffers = [torch.zeros_like(p) for p in params]
    truth = [p.double() for p in params], [b.double() for b in buffers]
    scale = torch.tensor(64.0) if scaled else None
    for rate, overflow in ((0.5, 0.0), (0.3, 1.0), (0.2, 0.0)):
        grads = [g * (64 if scaled else 1) for g in draw(zero=2)]
        lr = torch.zeros(())
        fill(lr, rate)
        scaling = (scale, torch.tensor(overflow)) if scaled else (None, None)
        lars_apex.lars_apex(params, grads, buffers, lr if on_device else rate, settings, *scaling)
        if not (scaled and overflow):
            lars_reference(truth[0], [g.double() for g in grads], truth[1], rate, settings, scale)
    for found, expected in zip(params + buffers, truth[0] + truth[1]):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert apex.calls == [*["l2norm"] * (2 * adapts), "sgd"] * 3


def test_lars_apex_shows_a_gradient_that_is_not_finite(apex):
    """The norms' kernel sets its flag then, which must not skip the step: training would go on without a word."""
    p, b = torch.ones(3), torch.zeros(3)
    lars_apex.lars_apex([p], [torch.tensor([1.0, torch.nan, 1.0])], [b], 0.1, LARSSettings())
    assert p.isnan().any() and b.isnan().any()


def test_lars_apex_refuses_what_it_would_compute_otherwise(apex, monkeypatch):
    tensors, rate = [[torch.ones(3)] for _ in range(3)], torch.tensor(0.1)
    for settings, lr, reason in (
        (LARSSettings(momentum=0.0), 0.1, "without momentum"),
        (LARSSettings(), rate, "only the device knows"),
        (LARSSettings(lr_in_momentum=True), torch.tensor(0.1).double(), "a setting is torch.float64"),
    ):
        with pytest.raises(KernelError, match=reason):
            lars_apex.lars_apex(*tensors, lr, settings)
    fill(rate, 0.1)
    assert on_host(rate) == 0.1
    rate.mul_(2)  # by others
    assert on_host(rate) is None
    fill(rate, torch.tensor(0.3))
    assert on_host(rate) is None
    assert apex.calls == []
    monkeypatch.undo()
    if lars_apex.extension() is None:
        with pytest.raises(KernelError, match="is not installed"):
            lars_apex.lars_apex(*tensors, 0.1, LARSSettings())


def test_lars_apex_is_proved_against_foreach(apex, monkeypatch):
    lars_apex.prove(HERE, sizes=[100])
    real = apex.multi_tensor_sgd
    monkeypatch.setattr(apex, "multi_tensor_sgd", lambda *a: real(*a[:4], 0.8, *a[5:]))
    with pytest.raises(KernelError, match="LARS' weights differs from its twin"):
        lars_apex.prove(HERE)
    monkeypatch.setattr(apex, "multi_tensor_sgd", lambda *_: exec("raise TypeError('11 arguments')"))
    with pytest.raises(KernelError, match="apex: 11 arguments"):
        lars_apex.prove(HERE)


def test_lars_auto_uses_apex_where_the_kernel_is_off(apex, monkeypatch):
    p = torch.ones(3, requires_grad=True)
    optimizer = LARS([p], torch.zeros(()))
    for usable, calls in (({"apex"}, ["l2norm", "l2norm", "sgd"]), (set(), [])):
        for module in (lars, lars_apex):
            monkeypatch.setattr(module, "usable", lambda source, *_, usable=usable: source in usable)
        p.grad = torch.ones(3)
        optimizer.set_lr(0.1)
        apex.calls.clear()
        optimizer.step()
        assert apex.calls == calls
