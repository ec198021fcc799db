"""Time one optimizer step over a ResNet-50 and its head (27.97 M parameters, 163 tensors): LARS against its peers.

    python tools/bench/bench_lars.py [--device cpu|cuda] [--json FILE] [--rounds R] [--quick]

Contenders take turns over the same parameters and gradients: CPU time on one thread, or time between two CUDA events.
Operators, host waits and bytes are counted at torch's dispatcher and hold on any device. The dispatcher does not see
what our own kernel moves, and it counts a foreach call once, though a GPU runs it in a few launches. CUDA itself counts
launches.

The limit in bytes is that of two passes over float32: norms read w and g (8 per parameter), the update reads w, g, b
and writes w, b (20). On a GPU the last row is the time of a copy of as many bytes. A CPU has no such row: a copy there
also reads what it overwrites, which an update in place does not.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from timm.optim import Lars
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from fastsuncet.distributed.launch import pick_device
from fastsuncet.models.resnet import build_model
from fastsuncet.optim import LARS, LARSSettings, lars_apex
from fastsuncet.optim.lars_kernel import prove
from tools.bench import harness
from tools.bench.dispatch_counter import Counter
from tools.bench.harness import target

LEARNING_RATE, SETTINGS = 0.1, LARSSettings(weight_decay=1e-6)
OURS, REFERENCE, TIMM = "fastsuncet foreach", "fastsuncet reference", "timm Lars"
APEX = "fastsuncet with apex's kernels"
KERNEL, GRAPH = "fastsuncet kernel", "fastsuncet kernel, as a CUDA graph"
LIMIT = "limit: a copy of as many bytes"
FLOOR = 28  # bytes per float32 parameter


class LarcAroundSGD:
    """The authors' arrangement: a loop that rescales each gradient, then plain SGD with momentum.

    Its `if` on two norms of each tensor waits for the device each time.
    """

    def __init__(self, params: list[Tensor]):
        self.params, self.sgd = params, torch.optim.SGD(params, lr=LEARNING_RATE, momentum=SETTINGS.momentum)

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters and leave their gradients as they were, because all contenders share them."""
        s, gradients = SETTINGS, [p.grad for p in self.params]
        for p in self.params:
            w_norm, g_norm = p.norm(), p.grad.norm()
            if w_norm != 0 and g_norm != 0:
                ratio = s.trust_coefficient * w_norm / (g_norm + s.weight_decay * w_norm + s.eps)
                p.grad = (p.grad + s.weight_decay * p) * ratio
        self.sgd.step()
        for p, gradient in zip(self.params, gradients):
            p.grad = gradient


def contenders(params: list[Tensor], *, kernel: bool = False) -> dict[str, Callable[[], Any]]:
    """Return one step of each optimizer over the same `params`, with its own momentum buffers. Ours comes first.

    `kernel` adds our own kernel, which runs only on CUDA.
    """
    rule: dict[str, Any] = {"momentum": SETTINGS.momentum, "weight_decay": SETTINGS.weight_decay}
    theirs = {"trust_coeff": SETTINGS.trust_coefficient, "eps": SETTINGS.eps, **rule}
    optimizers: dict[str, Any] = {}
    if kernel:
        # The learning rate is on the device, as in a run, so that a graph reads its present value.
        lr = torch.full((), LEARNING_RATE, device=params[0].device)
        optimizers[KERNEL] = LARS(params, lr, **asdict(SETTINGS), implementation="kernel")
    if params[0].is_cuda and lars_apex.extension() is not None:
        optimizers[APEX] = LARS(params, LEARNING_RATE, **asdict(SETTINGS), implementation="apex")
    optimizers |= {
        OURS: LARS(params, LEARNING_RATE, **asdict(SETTINGS), implementation="foreach"),
        REFERENCE: LARS(params, LEARNING_RATE, **asdict(SETTINGS), implementation="reference"),
        TIMM: Lars(params, LEARNING_RATE, **theirs),
        "timm Lars foreach": Lars(params, LEARNING_RATE, foreach=True, **theirs),
        "loop + SGD, as the authors": LarcAroundSGD(params),
        "no LARS: torch SGD foreach": torch.optim.SGD(params, LEARNING_RATE, foreach=True, **rule),
        "no LARS: torch SGD fused": torch.optim.SGD(params, LEARNING_RATE, fused=True, **rule),
    }
    return {name: optimizer.step for name, optimizer in optimizers.items()}


def apex_problem(device: str = "cpu") -> str | None:
    """Return why our steps are not those of apex's LARC around torch's SGD; None if they are, or without apex.

    LARC is what the authors ran. It changes the gradients and waits for the device, so it is no contender.
    """
    try:
        larc = importlib.import_module("apex.parallel.LARC").LARC
    except (ImportError, AttributeError, OSError):
        return None  # absent, or the package of the same name on the registry
    ours, theirs = parameters("resnet_tiny", device), parameters("resnet_tiny", device)
    rule = {"momentum": SETTINGS.momentum, "weight_decay": SETTINGS.weight_decay}
    around = {"trust_coefficient": SETTINGS.trust_coefficient, "clip": False, "eps": SETTINGS.eps}
    sgd = torch.optim.SGD(theirs, LEARNING_RATE, **rule)
    oracle, optimizer = (
        larc(sgd, **around),
        LARS(ours, LEARNING_RATE, **asdict(SETTINGS), implementation="reference"),
    )
    for _ in range(3):
        for p, q in zip(ours, theirs):
            assert p.grad is not None
            q.grad = p.grad.clone()
        optimizer.step()
        oracle.step()
    # Steps are small: their momentum shows more than the weights.
    momenta = [
        [o.state[p]["momentum_buffer"] for p in params] for o, params in ((optimizer, ours), (sgd, theirs))
    ]
    apart = max(((p - q).norm() / q.norm()).item() for p, q in zip(*momenta))
    return None if apart < 1e-5 else f"our LARS is {apart:.1e} of the momentum from apex's LARC with SGD"


def parameters(network: str, device: str = "cpu") -> list[Tensor]:
    """Return a network's parameters with gradients of usual size, in the memory layout of a run on that device."""
    layout = torch.channels_last if device == "cuda" else torch.contiguous_format
    params = list(build_model(network).to(device, memory_format=layout).parameters())
    generator = torch.Generator(device).manual_seed(0)
    for p in params:
        p.grad = torch.empty_like(p).normal_(std=0.01, generator=generator)
    return params


def measure(params: list[Tensor], rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return one point per contender and one for the limit; and notes on what is missing."""
    device, count = params[0].device.type, sum(p.numel() for p in params)
    problem = harness.kernel_problem("lars.cu", params[0].device, prove)
    notes = [f"no {KERNEL!r}: {problem}"] if problem else []
    calls = contenders(params, kernel=not problem)
    if not problem:
        calls[GRAPH], why = harness.capture_graph(calls[KERNEL])
        if why:
            del calls[GRAPH]
            notes.append(f"no {GRAPH!r}: {why}")
    if device == "cuda":
        calls[LIMIT] = harness.copy_of(FLOOR * count, device)
    seconds = harness.time_in_turns(calls, device, rounds, repeats=20 if device == "cuda" else 1)
    points = harness.points_of(seconds, OURS if problem else KERNEL, LIMIT)
    for point in points:
        name, call = point["name"], calls[point["name"]]
        if device == "cuda" and name != LIMIT:
            point["launches"] = harness.count_launches(call)
        # The dispatcher does not see the kernel.
        if name not in (KERNEL, GRAPH, LIMIT):
            with Counter() as counter:
                call()
            point |= {"operators": counter.operators, "host_waits": counter.waits}
            point["bytes_per_parameter"] = counter.moved / count
    return points, notes


def targets_of(points: list[dict[str, Any]]) -> list[str]:
    """Return the targets of the LARS step: those of the kernel if it ran, else those of the foreach version."""
    rows = {point["name"]: point for point in points}
    if KERNEL in rows:
        best = rows.get(GRAPH, rows[KERNEL])
        found = [target("our kernel's time, times the limit's", best["time_to_limit"], 1.3, at_least=False)]
        if (counted := rows[KERNEL]["launches"]) is not None:
            found.append(target("launches of our kernel's step", [counted], 3, at_least=False))
        return found
    ours, timm = rows[OURS], rows[TIMM]
    return [
        target("time of timm's Lars, times ours", timm["time_to_ours"], 1, at_least=True),
        target("dispatched operators", [ours["operators"]], 30, at_least=False),
        target("host waits", [ours["host_waits"]], 0, at_least=False),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the table and write the JSON."""
    parser = harness.parser(__doc__, rounds=21, quick="a ResNet-18, three turns", device="auto")
    options = parser.parse_args(arguments)
    device = pick_device(options.device, 0).type
    report = harness.Report("bench_lars", options.json, device=device)
    torch.set_num_threads(1)
    params = parameters("resnet18" if options.quick else "resnet50", device)
    points, notes = measure(params, 3 if options.quick else options.rounds)
    problem = apex_problem(device)
    count = sum(p.numel() for p in params)
    clock = harness.CLOCK[device] + (", one thread" if device == "cpu" else "")
    title = f"one step, {count / 1e6:.2f} M parameters in {len(params)} tensors, float32, {clock}"
    columns = [
        *harness.time_columns(device),
        ("launches", "launches", "{:,}".format),
        *harness.COUNTS,
        (f"bytes/parameter, at least {FLOOR}", "bytes_per_parameter", "{:.1f}".format),
    ]
    tables, sizes = [harness.table(title, points, columns)], {"parameters": count, "tensors": len(params)}
    return report.finish(
        tables, notes=notes + targets_of(points), points=points, wrong=[problem] * bool(problem), **sizes
    )


if __name__ == "__main__":
    harness.run(main)
