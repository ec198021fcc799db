"""Whether a kernel can replace its twin on a device: tried once, with a warning that says why not."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastsuncet.kernels import switches


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA device that is only named."""
    monkeypatch.setattr(switches, "_reasons", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return torch.device("cuda", 0)


def test_agrees_asks_a_kernel_once_for_a_proof_that_runs_backward(gpu):
    asked = []

    def prove(device):
        asked.append(device)
        x = torch.ones(2, requires_grad=True)
        (x @ x).backward()
        assert x.grad.dtype == torch.float32

    with torch.inference_mode():
        assert switches.agrees("x.cu", gpu, prove) and switches.agrees("x.cu", gpu, prove)
    assert asked == [gpu]


def test_agrees_warns_once_about_a_kernel_that_differs(gpu):
    def differs(device):
        switches.require_close("the loss", torch.tensor([1.0, torch.nan]), torch.ones(2))

    with pytest.warns(UserWarning, match="x.cu is off on cuda:0.*the loss differs from its twin"):
        assert not switches.agrees("x.cu", gpu, differs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not switches.agrees("x.cu", gpu, differs)


def test_agrees_tries_nothing_during_a_capture_or_when_off(gpu, monkeypatch):
    def untouched(device):
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(UserWarning, match="not tried before"):
        assert not switches.agrees("x.cu", gpu, untouched)
    monkeypatch.setenv("FASTSUNCET_KERNELS", "off")
    assert not switches.agrees("x.cu", gpu, untouched)
    assert switches.switched_off() == "FASTSUNCET_KERNELS is off: unset it"


def test_usable_leaves_tensors_without_memory_to_the_twin(gpu):
    asked = []
    with FakeTensorMode():
        fake = torch.empty(3, device="cuda")
    assert fake.is_cuda and not switches.usable("x.cu", fake, asked.append)
    assert not switches.usable("x.cu", torch.zeros(1), asked.append)  # on a CPU
    assert asked == [] and switches.agrees("x.cu", fake.device, asked.append)
