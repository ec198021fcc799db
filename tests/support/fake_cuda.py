"""A fake GPU: tensors on cuda:0 with shapes, strides and dtypes but without memory (torch's FakeTensorMode).

They refuse what a GPU refuses, operands on two devices, and what would make the host wait, since there is no value to
wait for: `.item()`, a boolean index, `nonzero`. They cannot show numbers, the project's kernels (a fake tensor has no
address, so the plain twins run), streams, events, graphs, DDP and torch.compile.

Two parts of torch still ask the driver and are replaced. Autocast switches itself off where no GPU is visible. And the
C++ engine of `backward` looks for the stream of every device ("hasPrimaryContext expects a valid device index"), so
`backward` here walks the same graph node by node from Python, adding up gradients as the engine does.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from fastsuncet.models import resnet
from tools.bench.dispatch_counter import tensors

CARD = torch.device("cuda", 0)


@contextlib.contextmanager
def fake_card() -> Iterator[None]:
    """Make tensors fake inside, also on CARD. Networks are drawn with memory, on the CPU, and become fake when they
    are moved: PyTorch does not move a module of fake parameters."""
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
