"""One optimizer step over a ResNet-50 and its head (27.97 M parameters, 164 tensors): LARS against its peers.

    python tools/bench_lars.py [--json FILE] [--rounds R] [--quick]

Time is CPU time on one thread, contenders in turns over the same parameters and gradients. Operators, host waits
and bytes are counted at torch's dispatcher and hold on any device; a foreach call counts once, though a GPU runs
it in a few launches. The limit in bytes is that of two passes over float32: norms read w and g (8), the update
reads w, g, b and writes w, b (20).
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timm.optim import Lars
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, `tools` is not importable yet

from fastsuncet.model import build_model
from fastsuncet.optim import LARS
from tools.bench_common import (
    Counter,
    environment,
    interleaved,
    print_table,
    print_targets,
    ratios,
    spread,
    target,
    told,
    write_json,
)

LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, TRUST, EPS = 0.1, 0.9, 1e-6, 1e-3, 1e-8
OURS, REFERENCE, TIMM = "fastsuncet foreach", "fastsuncet reference", "timm Lars"
FLOOR = 28  # bytes a float32 parameter


class LarcAroundSGD:
    """The authors' arrangement: a loop that rescales each gradient, then plain SGD with momentum.

    `if` on two norms a tensor asks the device for a value each time.
    """

    def __init__(self, params: list[Tensor]):
        self.params, self.sgd = params, torch.optim.SGD(params, lr=LEARNING_RATE, momentum=MOMENTUM)

    @torch.no_grad()
    def step(self) -> None:
        # The gradients are put back: in training, backward would write new ones, here all contenders share them.
        given = [p.grad for p in self.params]
        for p in self.params:
            w_norm, g_norm = p.norm(), p.grad.norm()
            if w_norm != 0 and g_norm != 0:
                ratio = TRUST * w_norm / (g_norm + WEIGHT_DECAY * w_norm + EPS)
                p.grad = (p.grad + WEIGHT_DECAY * p) * ratio
        self.sgd.step()
        for p, gradient in zip(self.params, given):
            p.grad = gradient


def contenders(params: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """One step of each optimizer over the same `params`, with momentum buffers of its own. Ours first."""
    rule = {"momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    ours = {"trust_coefficient": TRUST, "eps": EPS, **rule}
    theirs = {"trust_coeff": TRUST, "eps": EPS, **rule}
    found = {
        OURS: LARS(params, LEARNING_RATE, implementation="foreach", **ours),
        REFERENCE: LARS(params, LEARNING_RATE, implementation="reference", **ours),
        TIMM: Lars(params, LEARNING_RATE, **theirs),
        "timm Lars foreach": Lars(params, LEARNING_RATE, foreach=True, **theirs),
        "loop + SGD, as the authors": LarcAroundSGD(params),
        "no LARS: torch SGD foreach": torch.optim.SGD(params, LEARNING_RATE, foreach=True, **rule),
        "no LARS: torch SGD fused": torch.optim.SGD(params, LEARNING_RATE, fused=True, **rule),
    }
    return {name: optimizer.step for name, optimizer in found.items()}


def parameters(network: str) -> list[Tensor]:
    """A network's parameters with a gradient each, all of usual size."""
    params = list(build_model(network).parameters())
    generator = torch.Generator().manual_seed(0)
    for p in params:
        p.grad = 0.01 * torch.randn(p.shape, generator=generator)
    return params


def measure(params: list[Tensor], rounds: int) -> list[dict[str, Any]]:
    """One row a contender."""
    steps = contenders(params)
    seconds = interleaved(steps, rounds)
    count = sum(p.numel() for p in params)
    found = []
    for name, step in steps.items():
        with Counter() as counter:
            step()
        found.append(
            {
                "name": name,
                "cpu_seconds": seconds[name],
                "time_to_ours": ratios(seconds[name], seconds[OURS]),
                "operators": counter.operators,
                "host_waits": counter.waits,
                "bytes_per_parameter": counter.moved / count,
                "bytes_to_floor": counter.moved / count / FLOOR,
            }
        )
    return found


def show(found: list[dict[str, Any]]) -> None:
    """The table."""
    head = ["", "CPU ms", "x ours", "operators", "host waits", "bytes/parameter", f"x floor of {FLOOR}"]
    print_table(
        head,
        [
            [
                row["name"],
                told(spread([1e3 * s for s in row["cpu_seconds"]])),
                told(row["time_to_ours"]),
                f"{row['operators']:,}",
                f"{row['host_waits']:,}",
                f"{row['bytes_per_parameter']:.1f}",
                f"{row['bytes_to_floor']:.2f}",
            ]
            for row in found
        ],
    )


def targets_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked of the LARS step on a CPU."""
    rows = {row["name"]: row for row in found}
    ours, timm = rows[OURS], rows[TIMM]
    return [
        target("time of timm's Lars, times ours", timm["time_to_ours"], 1, at_least=True),
        target("dispatched operators", spread([ours["operators"]]), 30, at_least=False),
        target("host waits", spread([ours["host_waits"]]), 0, at_least=False),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Prints the table and writes the JSON. A missed target is a finding, not a failure: 0 either way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--rounds", type=int, default=21, help="turns of each contender")
    parser.add_argument(
        "--quick", action="store_true", help="a ResNet-18, three turns: for a look and for the tests"
    )
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    where = environment()
    try:
        params = parameters("resnet18" if options.quick else "resnet50")
        found = measure(params, 3 if options.quick else options.rounds)
    finally:
        torch.set_num_threads(threads)
    count = sum(p.numel() for p in params)
    print(f"one step, {count / 1e6:.2f} M parameters in {len(params)} tensors, float32, one thread")
    show(found)
    targets = targets_of(found)
    print_targets(targets)
    size = {"parameters": count, "tensors": len(params)}
    write_json(
        options.json,
        {"tool": "bench_lars", "environment": where, **size, "points": found, "targets": targets},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
