"""Time one optimizer step over a ResNet-50 and its head (27.97 M parameters, 163 tensors): LARS against its peers.

Operators, host waits and memory are counted at torch's dispatcher and hold on any device. It does not see our own
kernel, and it counts a foreach call once, though a GPU runs it in a few launches. CUDA itself counts launches.

The limit in bytes is that of two passes over float32: norms read w and g (8 per parameter), the update reads w, g, b
and writes w, b (20). On a GPU the last row is a copy of as many bytes; on a CPU a copy also reads what it overwrites.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastsuncet.distributed.place import pick_device
from fastsuncet.kernels.switches import why_not
from fastsuncet.models.resnet import build_model
from fastsuncet.optim import LARS
from fastsuncet.optim.lars_kernel import apex, prove
from tools.bench import harness

ROUNDS = 21
RATE, RULE = 0.1, {"momentum": 0.9, "weight_decay": 1e-6}
TRUST, EPS = 0.001, 1e-8
OURS, TIMM, SGD = "fastsuncet foreach", "timm Lars", "no LARS: torch SGD fused"
KERNEL, GRAPH = "fastsuncet kernel", "fastsuncet kernel, as a CUDA graph"
APEX = "fastsuncet with apex's kernels"
LIMIT = "limit: a copy of as many bytes"
FLOOR = 28  # bytes per float32 parameter


def contenders(params: list[Tensor], *, kernel: bool = False) -> dict[str, Callable[[], Any]]:
    """Return one step of each optimizer over the same `params`, with its own momentum buffers. Ours comes first.

    `kernel` adds our own kernel, which runs only on CUDA.
    """
    from timm.optim import Lars  # imports torchvision, which takes three seconds

    ours: dict[str, Any] = {**RULE, "trust_coefficient": TRUST, "eps": EPS}
    found: dict[str, torch.optim.Optimizer] = {}
    if kernel:
        # The learning rate is on the device, as in a run, so that a graph reads its present value.
        lr = torch.full((), RATE, device=params[0].device)
        found[KERNEL] = LARS(params, lr, **ours, implementation="kernel")
    if params[0].is_cuda and apex() is not None:
        found[APEX] = LARS(params, RATE, **ours, implementation="apex")
    found[OURS] = LARS(params, RATE, **ours, implementation="foreach")
    found[TIMM] = Lars(params, RATE, trust_coeff=TRUST, eps=EPS, **RULE)
    found[SGD] = torch.optim.SGD(params, RATE, fused=True, **RULE)
    return {name: optimizer.step for name, optimizer in found.items()}


def parameters(network: str, device: str = "cpu") -> list[Tensor]:
    """Return a network's parameters with gradients of usual size, in the memory layout of a run on that device."""
    layout = torch.channels_last if device == "cuda" else torch.contiguous_format
    params = list(build_model(network).to(device, memory_format=layout).parameters())
    generator = torch.Generator(device).manual_seed(0)
    for p in params:
        p.grad = torch.empty_like(p).normal_(std=0.01, generator=generator)
    return params


def measure(options: Namespace) -> int:
    """Time all contenders and the limit, and count what each does."""
    device = pick_device(options.device, 0).type
    torch.set_num_threads(1)
    params = parameters("resnet18" if options.quick else "resnet50", device)
    problem = why_not(params[0].device, prove) if device == "cuda" else "it needs a CUDA device"
    if problem:
        print(f"no {KERNEL!r}: {problem}\n")
    calls, count = contenders(params, kernel=not problem), sum(p.numel() for p in params)
    timed = dict(calls)
    if not problem:
        timed[GRAPH] = harness.capture_graph(GRAPH, calls[KERNEL])
    if device == "cuda":
        # Not empty: unwritten memory is a single page, read from the cache. Half is read, half is written.
        source, copy = (torch.ones(FLOOR // 2 * count, dtype=torch.uint8, device=device) for _ in range(2))
        timed[LIMIT] = partial(copy.copy_, source)
    clock = partial(harness.seconds_of, device=device, repeats=20 if device == "cuda" else 1)
    seconds = harness.time_in_turns(timed, clock, 3 if options.quick else options.rounds)
    rows = harness.rows_of(seconds, device, OURS if problem else KERNEL, LIMIT)
    for name, call in calls.items():
        # The dispatcher does not see our own kernel.
        rows[name] |= harness.launched(call) if name == KERNEL else harness.counted(call, device)
    size = f"{count / 1e6:.2f} M parameters in {len(params)} tensors, at least {FLOOR * count / 1e6:.0f} MB"
    harness.show(f"one step, {size}, {harness.CLOCK[device]}", rows.values())
    if problem:
        slower = harness.ratios(seconds[TIMM], seconds[OURS])
        harness.show_target("time of timm's Lars, times ours", slower, 1, at_least=True)
    else:
        best = harness.ratios(seconds[GRAPH], seconds[LIMIT])
        harness.show_target("our kernel's time, times the limit's", best, 1.3, at_least=False)
    return 0


def add_arguments(add: Callable) -> None:
    add("--device", choices=harness.DEVICES, default="auto")
