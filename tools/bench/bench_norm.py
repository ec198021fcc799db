"""Time BatchNorm with its residual and ReLU, forward and backward, on the shapes of a ResNet-50's 53 layers.

    python tools/bench/bench_norm.py [--device cpu|cuda] [--images N] [--most K] [--rounds R] [--json FILE] [--quick]
    torchrun --nproc-per-node 8 tools/bench/bench_norm.py          # the same with the statistics of all ranks

Contenders take turns on the same activations, channels-last and in bf16: torch's three operators, torch.compile of
them, our kernels, and apex's two group BatchNorms where apex is installed. Each is first compared with float32; one
that differs is not timed, and if it is ours the exit code is 1. On a GPU each runs as a CUDA graph where it can, so
that the times are those of the kernels.

The limit is a copy of as many bytes as two passes forward and two backward must move. A layer that fits in the caches
can be faster than that, and on a CPU, where a copy also reads what it overwrites, every layer can.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from fastsuncet.distributed.launch import Place, join
from tools.bench import harness
from tools.bench.harness import format_spread, ratios, spread
from tools.bench.norm_contenders import COMPILED, CONTENDERS, OPERATORS, OURS, Pass, Unavailable, operators
from tools.bench.norm_layers import LayerShape, NormLayer, resnet50_shapes

LIMIT = "limit: a copy of as many bytes"
TOLERANCE = 0.02  # mean difference to float32 over the mean value: 16 bits cost less than half of it


def reference(layer: NormLayer) -> list[Tensor]:
    """Return y and the gradients by torch's operators in float32."""
    return operators(layer.to(torch.float32))()


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest mean difference of two lists of tensors, as a share of the mean value.

    A mean, because where y rounds to the other side of 0 its ReLU correctly passes another gradient.
    """
    return max(
        ((a.double() - b.double()).abs().mean() / b.double().abs().mean()).item()
        for a, b in zip(found, expected)
    )


def prepare(layer: NormLayer) -> tuple[dict[str, Pass], dict[str, str], float | None]:
    """Return the contenders that run and are right, notes on the others, and the seconds that torch.compile took."""
    calls: dict[str, Pass] = {}
    notes: dict[str, str] = {}
    compile_seconds = None
    # Over ranks some contenders return a weight's gradient of this rank's rows, some the mean of all: not compared.
    compared = [0, 1] if layer.place.world_size > 1 else [0, 1, 2, 3]
    compared += [4] if layer.residual is not None else []
    expected = reference(layer)
    for name, make in CONTENDERS.items():
        began = time.perf_counter()
        try:
            call = make(layer)
            found = call()
        except Unavailable as reason:
            notes[name] = str(reason)
            continue
        # A compiler, a kernel or the memory can fail in any way, and the other contenders are still wanted.
        except Exception as error:
            notes[name] = f"failed: {type(error).__name__}: {harness.first_line(error)}"
            continue
        if name == COMPILED:
            compile_seconds = time.perf_counter() - began
        off = difference([found[i] for i in compared], [expected[i] for i in compared])
        if not off <= TOLERANCE:
            notes[name] = f"WRONG: {100 * off:.1f} % off float32"
            continue
        if layer.place.device.type == "cuda" and layer.place.world_size == 1:
            call, why = harness.capture_graph(call)
            if why:
                notes[name] = f"not as a CUDA graph: {why}"
        calls[name] = call
    return calls, notes, compile_seconds


def measure(shape: LayerShape, images: int, place: Place, rounds: int, repeats: int) -> dict[str, Any]:
    """Return the seconds of one layer by contender and of the limit, and the notes on contenders."""
    calls, notes, compile_seconds = prepare(NormLayer(shape, images, place))
    device = place.device.type
    limit = harness.copy_of(shape.moved(images), device)
    seconds = harness.time_in_turns({**calls, LIMIT: limit}, device, rounds, repeats)
    if device == "cuda":
        # The graphs keep all of a layer's activations several times.
        del calls
        torch.cuda.empty_cache()
    facts = {"layer": str(shape), "layers": shape.layers, "bytes": shape.moved(images)}
    return {**facts, "seconds": seconds, "notes": notes, "compile_seconds": compile_seconds}


def totals(layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one point per contender: the seconds of all layers in each round, or why there is no such sum."""
    rounds = range(len(layers[0]["seconds"][LIMIT]))
    sums = {
        name: [sum(each["layers"] * each["seconds"][name][turn] for each in layers) for turn in rounds]
        for name in (*CONTENDERS, LIMIT)
        if all(name in each["seconds"] for each in layers)
    }
    first = next((name for name in (OURS, OPERATORS) if name in sums), LIMIT)
    points = []
    for name in (*CONTENDERS, LIMIT):
        point: dict[str, Any] = {"name": name, "compared_with": first}
        if name in sums:
            point |= {"seconds": sums[name], "time_to_limit": ratios(sums[name], sums[LIMIT])}
            point["time_to_first"] = ratios(sums[name], sums[first])
        notes = list(dict.fromkeys(each["notes"][name] for each in layers if name in each["notes"]))
        if name == COMPILED and name in sums:
            spent = sum(each["compile_seconds"] for each in layers)
            notes.append(f"{spent:.0f} s to compile {len(layers)} shapes")
        points.append(point | {"note": "; ".join(notes)})
    return points


def tables(layers: Sequence[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Return two tables: all layers together by contender, and each layer by contender."""
    points = totals(layers)
    columns = [
        ("", "name", str),
        harness.seconds_column(device),
        (f"time, x {points[0]['compared_with']}", "time_to_first", format_spread),
        ("time, x limit", "time_to_limit", format_spread),
        ("", "note", str),
    ]
    title = f"{sum(each['layers'] for each in layers)} layers, forward and backward"
    unit, _, form = harness.seconds_column(device)
    names = [("", "layer", str), ("layers", "layers", str), *((p["name"], p["name"], form) for p in points)]
    rows = [each | each["seconds"] for each in layers]
    return [harness.table(title, points, columns), harness.table(f"one layer, {unit}", rows, names)]


def main(arguments: list[str] | None = None) -> int:
    """Print the tables and write the JSON; return 1 if our own kernels are wrong."""
    parser = harness.parser(__doc__, rounds=7, quick="three small shapes, two turns")
    parser.add_argument("--images", type=int, help="on each rank (default: 256 on a GPU, 2 on a CPU)")
    parser.add_argument("--most", type=int, metavar="K", help="only the K shapes that move most bytes")
    options = parser.parse_args(arguments)
    shapes = resnet50_shapes()
    # The last shape of each kind is the smallest.
    shapes = (
        list({shape.kind: shape for shape in shapes}.values()) if options.quick else shapes[: options.most]
    )
    with join(options.device) as place:
        device = place.device.type
        images = options.images or (256 if device == "cuda" and not options.quick else 2)
        path = options.json if place.first else None
        report = harness.Report("bench_norm", path, device=device, images=images, ranks=place.world_size)
        layers: list[dict[str, Any]] = []
        for shape in shapes:
            rounds, repeats = 2 if options.quick else options.rounds, 20 if device == "cuda" else 1
            layers.append(measure(shape, images, place, rounds, repeats))
            report.save(tables=tables(layers, device), layers=layers)
    points = totals(layers)
    wrong = [p["note"] for p in points if p["name"] == OURS and "WRONG" in p["note"]]
    if not place.first:
        return 1 if wrong else 0
    clock = harness.CLOCK[device]
    print(f"{images} images a rank, {place.world_size} rank(s), 16 bits, channels-last, {clock}\n")
    timed = [point for point in points if "seconds" in point and point["name"] != LIMIT]
    best = min(timed, key=lambda point: spread(point["seconds"])["median"])
    return report.finish(
        tables(layers, device), notes=[f"fastest: {best['name']}"], wrong=wrong, points=points
    )


if __name__ == "__main__":
    harness.run(main)
