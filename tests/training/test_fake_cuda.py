"""The training step on a GPU that is not there: all its tensors are on the GPU, and nothing comes from the host.

A CPU test cannot tell: there all tensors are on one device. Here they have shapes, strides and dtypes on cuda:0 but no
memory (torch's FakeTensorMode). They refuse what a GPU refuses, operands on two devices, and what would make the host
wait, since there is no value to wait for: `.item()`, a boolean index, `nonzero`. They cannot show numbers, the
project's kernels (a fake tensor has no address, so the plain twins run), streams, events, graphs, DDP and
torch.compile.

Two parts of torch still ask the driver and are replaced. Autocast switches itself off where no GPU is visible. And the
C++ engine of `backward` looks for the stream of every device ("hasPrimaryContext expects a valid device index"), so
`backward` here walks the same graph node by node from Python, adding up gradients as the engine does.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from fastsuncet import paws
from fastsuncet.commands.tune import candidates
from fastsuncet.config import Config
from fastsuncet.data.paired_stream import Batch, views
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation.finetuning.fit import FineTuning, sigmoid_loss, softmax_loss
from fastsuncet.evaluation.knn import knn_predict
from fastsuncet.metrics import interval
from fastsuncet.models import resnet
from fastsuncet.training.determinism import PRECISIONS
from fastsuncet.training.step import build, train_step
from tests.support.methods import METHODS, small
from tests.support.networks import narrow_resnet50, one_block
from tools.bench import step as step_bench
from tools.bench.dispatch_counter import tensors

pytestmark = pytest.mark.slow

CARD = torch.device("cuda", 0)
HERE = Place(0, 1, CARD)
U, S = 6, 8


@contextlib.contextmanager
def fake_card() -> Iterator[None]:
    """Make tensors fake inside, also on CARD. Networks are drawn with memory, on the CPU, and become fake when they are
    moved: PyTorch does not move a module of fake parameters."""
    drawn = resnet.build_model

    def build_model(*arguments, **settings) -> resnet.Model:
        with unset_fake_temporarily():
            return drawn(*arguments, **settings)

    with (
        patch.object(resnet, "build_model", build_model),
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        patch.object(Tensor, "backward", backward),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


@torch.no_grad()
def backward(loss: Tensor) -> None:
    """Do `loss.backward()`: run each node once all gradients of its outputs are there."""
    waiting, seen, look = Counter(), {loss.grad_fn}, [loss.grad_fn]
    while look:
        for after, _ in look.pop().next_functions:
            waiting[after] += 1
            if after is not None and after not in seen:
                seen.add(after)
                look.append(after)
    given, ready = defaultdict(dict), [loss.grad_fn]
    given[loss.grad_fn][0] = torch.ones_like(loss)
    while ready:
        node = ready.pop()
        grads = given.pop(node, {})
        for (after, number), grad in gradients(node, grads):
            if after is None:
                continue
            if grad is not None:
                grad = as_output(after, number, grad)
                held = given[after].get(number)
                given[after][number] = grad if held is None else held + grad
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)


def gradients(node, grads: dict[int, Tensor]) -> Iterable[tuple[tuple, Tensor | None]]:
    """Return (the node before and its output, gradient) of each input of a node, given those of its outputs by number.

    A leaf keeps its own.
    """
    if hasattr(node, "variable"):
        leaf = node.variable
        if 0 in grads:
            leaf.grad = grads[0] if leaf.grad is None else leaf.grad + grads[0]
        return ()
    in_python = isinstance(node, BackwardCFunction)
    asked = (node.apply if in_python else node)(*(grads.get(i) for i in range(len(node._input_metadata))))
    asked = asked if isinstance(asked, tuple) else (asked,)
    if not in_python:
        return zip(node.next_functions, asked)
    # It answers for arguments that are no tensors too, which have no edge.
    needed = (grad for grad, needs in zip(asked, node.needs_input_grad) if needs)
    return zip((edge for edge in node.next_functions if edge[0] is not None), needed)


def as_output(node, number: int, grad: Tensor) -> Tensor:
    """Return a gradient as the engine hands it on: summed over broadcast dimensions, in the output's dtype."""
    expected = node._input_metadata[number]
    assert grad.device == expected.device, f"{node.name()}: a gradient on {grad.device} for {expected.device}"
    return grad.sum_to_size(tuple(expected.shape)).to(expected.dtype)


class Watch(TorchDispatchMode):
    """Records what happens inside, backward included.

    mixed: operators with tensors on two devices, every copy between devices among them.
    convolutions: of each, its dtype, and whether its images and its weights are channels last in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixed: list[str] = []
        self.convolutions: list[tuple[torch.dtype, bool, bool]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        devices = {x.device for x in tensors((args, kwargs or {}, result))}
        if len(devices) > 1:
            self.mixed.append(function.name())
        if function.name() == "aten::convolution":
            images, weights = args[:2]
            last = [x.is_contiguous(memory_format=torch.channels_last) for x in (images, weights)]
            self.convolutions.append((images.dtype, *last))
        return result


def places(network: nn.Module, optimizer: torch.optim.Optimizer, *more: object) -> set[torch.device]:
    """Return the devices of parameters, buffers, and all tensors of the optimizer's state and groups; and of those in
    `more`, which are tensors or objects with tensors as attributes."""
    state = [list(optimizer.state.values()), [list(group.values()) for group in optimizer.param_groups]]
    held = [x if isinstance(x, Tensor) else list(vars(x).values()) for x in more]
    return {x.device for x in tensors([list(network.parameters()), list(network.buffers()), state, held])}


def pixels(count: int, size: int) -> torch.Tensor:
    """Return images as DALI hands them over: rows of channels, seen as (N, 3, H, W)."""
    return torch.empty(count, size, size, 3, device=CARD).permute(0, 3, 1, 2)


def batch_of(config: Config, labeled: int) -> Batch:
    shown = tuple(pixels(U, view.size) for view in views(config))
    labels = torch.arange(labeled, device=CARD) // 2
    return Batch(0, shown, pixels(labeled, config.data.augmentation.size), labels)


def watched(config: Config, monkeypatch, *, labeled: int = S) -> Watch:
    """Make a step and the sums of its metrics as a run does; return what was seen of it."""
    no_events = SimpleNamespace(restart=lambda: None)  # events ask the driver
    monkeypatch.setattr(interval, "DataTimer", lambda device: no_events)
    with fake_card():
        model, network, optimizer, method = build(config, HERE, 10, [4] * 10)
        sums = interval.MetricsInterval(CARD, 4)
        batch = batch_of(config, labeled)
        with Watch() as watch:
            values = train_step(network, optimizer, batch, 0.1, method)
            sums.add(values, batch.step, 2 * U + labeled)
        assert values.shape == (4,) and values.device == CARD
        assert places(model, optimizer, method, method.scaler, sums) == {CARD}
    return watch


@pytest.mark.parametrize(
    ("method", "precision"),
    [("PAWS", "bf16"), ("SwAV + SuNCEt", "bf16"), *((each, "fp16") for each in METHODS)],
)
def test_step_of_any_method_stays_on_the_gpu(tmp_path, monkeypatch, method, precision):
    """With keys that get gradient as with keys that get none, and either mean of the labeled loss, in turn."""
    one_block(monkeypatch)  # a whole network steps below
    options = ("criterion.keys=detached", "criterion.average=class") if precision == "fp16" else ()
    config = small(tmp_path, method, f"meta.precision={precision}", *options)
    watch = watched(config, monkeypatch, labeled=S if config.criterion.supervised else 0)
    assert watch.mixed == []
    dtypes, images, weights = zip(*watch.convolutions)
    assert set(dtypes) == {PRECISIONS[precision]} and all(weights)
    # Without a GPU torch does not know that cuDNN convolves bfloat16 channels last, and fakes another layout.
    assert precision == "bf16" or all(images)


def test_step_of_a_large_network_is_channels_last(tmp_path, monkeypatch):
    narrow_resnet50(monkeypatch, 8, blocks=(2, 1, 1, 1))
    options = ("meta.precision=fp16", "model.name=resnet50", "model.fused_batchnorm=true")
    watch = watched(small(tmp_path, "SimCLR + SuNCEt", *options), monkeypatch)
    assert watch.mixed == [] and set(watch.convolutions) == {(torch.float16, True, True)}


@pytest.mark.parametrize("loss", [softmax_loss, sigmoid_loss])
def test_finetuning_step_stays_on_the_gpu(loss):
    drawn = torch.nn.Sequential(resnet.build_model("resnet_tiny").encoder, torch.nn.Linear(64, 10))
    with fake_card():
        network = drawn.to(CARD, memory_format=torch.channels_last)
        # Not fused as a fit's is: torch's fused step has no fake twin. So in bf16, whose scaler is off: fp16's would
        # ask the host whether to make a step that is not fused.
        groups = [{"params": list(network.parameters()), "scale": 1.0}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
        task = SimpleNamespace(network=network, optimizer=optimizer, loss=loss, place=HERE, start=[])
        task.scaler = torch.amp.GradScaler("cuda", enabled=False)
        task.autocast = partial(torch.autocast, "cuda", torch.bfloat16)
        task.config = SimpleNamespace(finetune=SimpleNamespace(accumulate=2))
        targets = torch.arange(4, device=CARD)
        if loss is sigmoid_loss:
            targets = torch.zeros(4, 10, dtype=torch.int8, device=CARD)
        batch = [(pixels(4, 32), targets)] * 2
        with Watch() as watch:
            values = FineTuning.train_step(task, batch, 0.1)
        assert values.shape == (2,) and places(network, optimizer) == {CARD} == {values.device}
    assert watch.mixed == []


def test_paws_of_an_unknown_number_of_classes_stays_on_the_gpu():
    """A run passes its number; to count them the host would wait."""
    with fake_card(), Watch() as watch:
        anchors, supports, targets = (torch.randn(rows, 8, device=CARD) for rows in (20, 12, 10))
        labels = torch.zeros(12, dtype=torch.int64, device=CARD)
        loss = sum(paws(anchors.requires_grad_(), supports, labels, targets, supports, views=4))
        loss.backward()
    assert loss.device == CARD and watch.mixed == []


def test_nearest_neighbors_stay_on_the_gpu():
    with fake_card(), Watch() as watch:
        queries, supports = (torch.empty(rows, 16, device=CARD) for rows in (2500, 40))
        found = knn_predict(queries, supports, torch.arange(40, device=CARD) // 4)
        assert found.shape == (2500,) and found.device == CARD
    assert watch.mixed == []


def test_every_contender_on_a_gpu_is_a_config_that_steps(tmp_path, monkeypatch):
    # A switch of the whole process.
    monkeypatch.setattr(step_bench, "set_determinism", lambda config, place: None)
    config = small(tmp_path, "SimCLR + SuNCEt")
    plain = config.with_values({"meta.cuda_graph": False, "model.fused_batchnorm": True})
    rungs = candidates(config, plain, "cuda")
    assert len(rungs) >= 4
    with fake_card():
        for name, values in rungs:
            if "meta.compile" not in values:  # compiled for a GPU, which is not there
                bench = step_bench.StepBench(config.with_values(values), HERE, batch_of(config, S), 10)
                step = bench.ours(lambda _, bench=bench: bench.batch)
                with Watch() as watch:
                    loss = step()
                assert loss.device == CARD and watch.mixed == [], name
