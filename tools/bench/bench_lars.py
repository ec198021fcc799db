"""One optimizer step over a ResNet-50 and its head (27.97 M parameters, 163 tensors): LARS against its peers.

    python tools/bench/bench_lars.py [--device cpu|cuda] [--json FILE] [--rounds R] [--quick]

Contenders take turns over the same parameters and gradients: CPU time on one thread, or time between two CUDA events.
Operators, host waits and bytes are counted at torch's dispatcher and hold on any device; what our own kernel moves is
not seen there, and a foreach call counts once, though a GPU runs it in a few launches. Launches are counted by CUDA
itself. The limit in bytes is that of two passes over float32: norms read w and g (8 a parameter), the update reads w,
g, b and writes w, b (20). On a GPU the last row is the time of a copy of as many bytes; on a CPU it would be no limit,
because a copy there reads what it overwrites as well, and an update in place does not.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timm.optim import Lars
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, `tools` is not importable yet

from fastsuncet.distributed.launch import pick_device
from fastsuncet.kernels.self_test import agrees
from fastsuncet.models.resnet import build_model
from fastsuncet.optim import LARS, LARSSettings
from fastsuncet.optim.lars_kernel import prove
from tools.bench.common import (
    Counter,
    end,
    environment,
    print_table,
    print_targets,
    ratios,
    spread,
    target,
    told,
    write_json,
)
from tools.bench.device_clock import CLOCK, captured, copying, launches, turns

LEARNING_RATE, SETTINGS = 0.1, LARSSettings(weight_decay=1e-6)
OURS, REFERENCE, TIMM = "fastsuncet foreach", "fastsuncet reference", "timm Lars"
KERNEL, GRAPH, LIMIT = (
    "fastsuncet kernel",
    "fastsuncet kernel, as a CUDA graph",
    "limit: a copy of as many bytes",
)
FLOOR = 28  # bytes a float32 parameter


class LarcAroundSGD:
    """The authors' arrangement: a loop that rescales each gradient, then plain SGD with momentum.

    `if` on two norms a tensor asks the device for a value each time.
    """

    def __init__(self, params: list[Tensor]):
        self.params, self.sgd = params, torch.optim.SGD(params, lr=LEARNING_RATE, momentum=SETTINGS.momentum)

    @torch.no_grad()
    def step(self) -> None:
        # The gradients are put back: in training, backward would write new ones, here all contenders share them.
        s, given = SETTINGS, [p.grad for p in self.params]
        for p in self.params:
            w_norm, g_norm = p.norm(), p.grad.norm()
            if w_norm != 0 and g_norm != 0:
                ratio = s.trust_coefficient * w_norm / (g_norm + s.weight_decay * w_norm + s.eps)
                p.grad = (p.grad + s.weight_decay * p) * ratio
        self.sgd.step()
        for p, gradient in zip(self.params, given):
            p.grad = gradient


def contenders(params: list[Tensor], *, kernel: bool = False) -> dict[str, Callable[[], Any]]:
    """One step of each optimizer over the same `params`, with momentum buffers of its own. Ours first.

    `kernel`: our own kernel too, which runs on CUDA alone.
    """
    rule = {"momentum": SETTINGS.momentum, "weight_decay": SETTINGS.weight_decay}
    theirs = {"trust_coeff": SETTINGS.trust_coefficient, "eps": SETTINGS.eps, **rule}
    found: dict[str, Any] = {}
    if kernel:
        # As a run has it, with the learning rate on the device: a graph reads today's.
        rate = torch.full((), LEARNING_RATE, device=params[0].device)
        found[KERNEL] = LARS(params, rate, SETTINGS, implementation="kernel")
    found |= {
        OURS: LARS(params, LEARNING_RATE, SETTINGS, implementation="foreach"),
        REFERENCE: LARS(params, LEARNING_RATE, SETTINGS, implementation="reference"),
        TIMM: Lars(params, LEARNING_RATE, **theirs),
        "timm Lars foreach": Lars(params, LEARNING_RATE, foreach=True, **theirs),
        "loop + SGD, as the authors": LarcAroundSGD(params),
        "no LARS: torch SGD foreach": torch.optim.SGD(params, LEARNING_RATE, foreach=True, **rule),
        "no LARS: torch SGD fused": torch.optim.SGD(params, LEARNING_RATE, fused=True, **rule),
    }
    return {name: optimizer.step for name, optimizer in found.items()}


def parameters(network: str, device: str = "cpu") -> list[Tensor]:
    """A network's parameters with a gradient each, all of usual size, in the memory layout of a run on that device."""
    layout = torch.channels_last if device == "cuda" else torch.contiguous_format
    params = list(build_model(network).to(device, memory_format=layout).parameters())
    generator = torch.Generator(device).manual_seed(0)
    for p in params:
        p.grad = torch.empty_like(p).normal_(std=0.01, generator=generator)
    return params


def measure(params: list[Tensor], rounds: int, repeats: int = 1) -> tuple[list[dict[str, Any]], list[str]]:
    """One row a contender and one for the limit; and what a reader must be told of them."""
    device = params[0].device.type
    count = sum(p.numel() for p in params)
    said, kernel = [], device == "cuda" and agrees("lars.cu", params[0].device, prove)
    steps = contenders(params, kernel=kernel)
    first = KERNEL if kernel else OURS  # what all are compared with
    if kernel:
        steps[GRAPH], why = captured(steps[KERNEL])
        if why:
            del steps[GRAPH]
            said.append(f"no {GRAPH!r}: {why}")
    elif device == "cuda":
        said.append(f"no {KERNEL!r}: it does not agree with its twin here; the warning says where")
    else:
        said.append(f"no {KERNEL!r}: it runs on CUDA devices, and this is a CPU")
    limit = {LIMIT: copying(FLOOR * count, device)} if device == "cuda" else {}
    seconds = turns({**steps, **limit}, device, rounds, repeats)
    found = []
    for name, step in steps.items():
        row = {"name": name, "seconds": seconds[name], "time_to_ours": ratios(seconds[name], seconds[first])}
        if device == "cuda":
            row["time_to_limit"] = ratios(seconds[name], seconds[LIMIT])
            row["launches"] = launches(step)
        if name not in (KERNEL, GRAPH):  # the dispatcher sees nothing of those
            with Counter() as counter:
                step()
            row |= {"operators": counter.operators, "host_waits": counter.waits}
            moved = counter.moved / count
            row |= {"bytes_per_parameter": moved, "bytes_to_floor": moved / FLOOR}
        found.append(row)
    for name in limit:
        row = {"name": name, "seconds": seconds[name], "time_to_ours": ratios(seconds[name], seconds[first])}
        speed = [FLOOR * count / each / 1e9 for each in seconds[name]]
        floor = {"bytes_per_parameter": FLOOR, "bytes_to_floor": 1.0}
        found.append(row | floor | {"gigabytes_per_second": speed})
    return found, said


def table(found: list[dict[str, Any]], device: str) -> tuple[list[str], list[list[str]]]:
    """Its head and its rows; a column that nobody has a figure for is left out."""
    unit, scale = ("us", 1e6) if device == "cuda" else ("CPU ms", 1e3)
    columns: list[tuple[str, str, Callable[[Any], str]]] = [
        ("", "name", str),
        (unit, "seconds", lambda seconds: told(spread([scale * each for each in seconds]))),
        ("time, x ours", "time_to_ours", told),
        ("time, x limit", "time_to_limit", told),
        ("launches", "launches", "{:,}".format),
        ("operators", "operators", "{:,}".format),
        ("host waits", "host_waits", "{:,}".format),
        ("bytes/parameter", "bytes_per_parameter", "{:.1f}".format),
        (f"x floor of {FLOOR}", "bytes_to_floor", "{:.2f}".format),
    ]
    columns = [column for column in columns if any(row.get(column[1]) is not None for row in found)]
    rows = [["" if row.get(key) is None else form(row[key]) for _, key, form in columns] for row in found]
    return [head for head, _, _ in columns], rows


def targets_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked of the LARS step: of the kernel where there is one, else of what stands in for it on a CPU."""
    rows = {row["name"]: row for row in found}
    if KERNEL in rows:
        best = rows.get(GRAPH, rows[KERNEL])
        asked = [target("our kernel's time, times the limit's", best["time_to_limit"], 1.3, at_least=False)]
        if (counted := rows[KERNEL]["launches"]) is not None:
            asked.append(target("launches of our kernel's step", spread([counted]), 3, at_least=False))
        return asked
    ours, timm = rows[OURS], rows[TIMM]
    return [
        target("time of timm's Lars, times ours", timm["time_to_ours"], 1, at_least=True),
        target("dispatched operators", spread([ours["operators"]]), 30, at_least=False),
        target("host waits", spread([ours["host_waits"]]), 0, at_least=False),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Prints the table and writes the JSON. A missed target is a finding, not a failure: 0 either way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="auto")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--rounds", type=int, default=21, help="turns of each contender")
    parser.add_argument(
        "--quick", action="store_true", help="a ResNet-18, three turns: for a look and for the tests"
    )
    options = parser.parse_args(arguments)
    device = pick_device(options.device, 0).type
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    where = environment()
    try:
        params = parameters("resnet18" if options.quick else "resnet50", device)
        rounds = 3 if options.quick else options.rounds
        found, said = measure(params, rounds, repeats=20 if device == "cuda" else 1)
    finally:
        torch.set_num_threads(threads)
    count = sum(p.numel() for p in params)
    clock = CLOCK[device] + (", one thread" if device == "cpu" else "")
    print(f"one step, {count / 1e6:.2f} M parameters in {len(params)} tensors, float32, {clock}")
    print_table(*table(found, device))
    for line in said:
        print(line)
    targets = targets_of(found)
    print_targets(targets)
    report = {"tool": "bench_lars", "environment": where, "device": device, "clock": clock, "said": said}
    size = {"parameters": count, "tensors": len(params)}
    write_json(options.json, {**report, **size, "points": found, "targets": targets})
    return 0


if __name__ == "__main__":
    end(main)
