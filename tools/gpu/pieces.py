"""The parts of `gpu_suite.py` that are a bench tool of their own: LARS, and BatchNorm with what follows it."""

from typing import Any

from fastsuncet.distributed.launch import join
from tools.bench import bench_lars, bench_norm
from tools.gpu.speed import Found, Options, table


def lars(options: Options) -> Found:
    """Every implementation and its peers over one ResNet-50's gradients, and a copy of as many bytes."""
    device, small = options.device, options.small
    params = bench_lars.parameters("resnet_tiny" if small else "resnet50", device)
    found, said = bench_lars.measure(params, 2 if small else 9, repeats=20 if device == "cuda" else 1)
    head, rows = bench_lars.table(found, device)
    rows += [[line, *[""] * (len(head) - 1)] for line in said]
    return table("one step", head, rows) | {
        "points": found,
        "targets": bench_lars.targets_of(found),
        "said": said,
    }


def norm(options: Options) -> Found:
    """BatchNorm, residual and ReLU on the shapes of a ResNet-50 that move most bytes, by each contender."""

    def told(found: list[dict[str, Any]]) -> Found:
        return {"tables": bench_norm.tables(found, options.device), "layers": found}

    with join(options.device) as place:
        _, found = bench_norm.bench(
            place, None, 6, 5, quick=options.small, keep=lambda found: options.keep(told(found))
        )
    return told(found)
