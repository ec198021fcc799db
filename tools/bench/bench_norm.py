"""BatchNorm, the residual behind it and its ReLU, forward and backward, on the shapes of a ResNet-50's 53 layers.

    python tools/bench/bench_norm.py [--device cpu|cuda] [--images N] [--most K] [--rounds R] [--json FILE] [--quick]
    torchrun --nproc-per-node 8 tools/bench/bench_norm.py          # the same with the statistics of all ranks

Contenders take turns on the same activations, channels-last and in bf16: torch's three operators, torch.compile of
them, our kernels, and apex's two group BatchNorms where apex is installed. Each is first held against float32; one that
differs is no contender. On a GPU each is a CUDA graph where it can be one, so that the times are the kernels'.

The limit is a copy of as many bytes as two passes forward and two backward must move. A layer that fits in the caches
may be faster than that, and on a CPU, where a copy also reads what it overwrites, any may be.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, `tools` is not importable yet

from fastsuncet.distributed.launch import Place, join
from tools.bench.common import end, environment, print_table, ratios, spread, told, write_json
from tools.bench.device_clock import CLOCK, captured, copying, turns
from tools.bench.norm_contenders import (
    COMPILED,
    CONTENDERS,
    OPERATORS,
    OURS,
    Absent,
    Pass,
    operators,
)
from tools.bench.norm_layers import Case, Layer, cases

LIMIT = "limit: a copy of as many bytes"
TOLERANCE = 0.02  # mean difference to float32 beside the mean value: what 16 bits cost is under half of it


def truth(layer: Layer) -> list[Tensor]:
    """y and gradients by torch's operators in float32."""
    return operators(layer.to(torch.float32))()


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest mean difference of two lists of tensors, as a share of the mean value.

    A mean, because where y rounds to the other side of 0 its ReLU rightly hands on another gradient.
    """
    return max(
        ((a.double() - b.double()).abs().mean() / b.double().abs().mean()).item()
        for a, b in zip(found, expected)
    )


def prepared(layer: Layer) -> tuple[dict[str, Pass], dict[str, str], float | None]:
    """The contenders that are here and right, why the others are not, and how long torch.compile took."""
    calls: dict[str, Pass] = {}
    said: dict[str, str] = {}
    compiling = None
    # Over ranks some give a weight's gradient of this rank's rows, some the mean of all.
    compared = [
        0,
        1,
        *([4] if layer.residual is not None else []),
        *([2, 3] if layer.place.world_size == 1 else []),
    ]
    expected = truth(layer)
    for name, make in CONTENDERS.items():
        began = time.perf_counter()
        try:
            call = make(layer)
            found = call()
        except Absent as reason:
            said[name] = str(reason)
            continue
        except (
            Exception
        ) as error:  # a compiler, a kernel, the memory: anything can, and the others are wanted too
            said[name] = f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            continue
        off = difference([found[i] for i in compared], [expected[i] for i in compared])
        if name == COMPILED:
            compiling = time.perf_counter() - began
        if not off <= TOLERANCE:
            said[name] = f"WRONG: {100 * off:.1f} % off float32"
            continue
        if layer.place.device.type == "cuda" and layer.place.world_size == 1:
            call, why = captured(call)
            if why:
                said[name] = f"not as a CUDA graph: {why}"
        calls[name] = call
    return calls, said, compiling


def measure(case: Case, images: int, place: Place, rounds: int, repeats: int) -> dict[str, Any]:
    """Seconds of one layer by contender, and the limit's; what there is to say of each."""
    calls, said, compiling = prepared(Layer(case, images, place))
    device = place.device.type
    seconds = turns({**calls, LIMIT: copying(case.moved(images), device)}, device, rounds, repeats)
    if device == "cuda":
        del calls
        torch.cuda.empty_cache()  # the graphs' memory, which is all of a layer's activations several times
    shape = {"layer": str(case), "layers": case.layers, "bytes": case.moved(images)}
    return {**shape, "seconds": seconds, "said": said, "compile_seconds": compiling}


def totals(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a contender: all layers together, round by round, or why there is no such sum."""
    rounds = range(len(found[0]["seconds"][LIMIT]))
    sums = {
        name: [sum(each["layers"] * each["seconds"][name][turn] for each in found) for turn in rounds]
        for name in (*CONTENDERS, LIMIT)
        if all(name in each["seconds"] for each in found)
    }
    first = OURS if OURS in sums else OPERATORS
    rows = []
    for name in (*CONTENDERS, LIMIT):
        row: dict[str, Any] = {"name": name}
        if name in sums:
            row |= {"seconds": sums[name], "time_to_limit": ratios(sums[name], sums[LIMIT])}
            row["compared_with"], row["time_to_first"] = (
                first,
                ratios(sums[name], sums.get(first, sums[LIMIT])),
            )
        reasons = dict.fromkeys(each["said"][name] for each in found if name in each["said"])
        if name == COMPILED and name in sums:
            spent = sum(each["compile_seconds"] for each in found)
            reasons[f"{spent:.0f} s to compile {len(found)} shapes"] = None
        rows.append(row | {"said": "; ".join(reasons)})
    return rows


def tables(found: Sequence[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Two tables, each {"title", "head", "rows"}: all layers by contender, and each layer by contender."""
    unit, scale = ("us", 1e6) if device == "cuda" else ("CPU ms", 1e3)
    rows = totals(found)
    layers = sum(each["layers"] for each in found)
    first = next((row["compared_with"] for row in rows if "compared_with" in row), OPERATORS)
    above = [
        [
            row["name"],
            told(spread([scale * each for each in row["seconds"]])) if "seconds" in row else "",
            told(row["time_to_first"]) if "seconds" in row else "",
            told(row["time_to_limit"]) if "seconds" in row else "",
            row["said"],
        ]
        for row in rows
    ]
    names = [row["name"] for row in rows if any(row["name"] in each["seconds"] for each in found)]
    below = [
        [
            each["layer"],
            str(each["layers"]),
            *(
                told(spread([scale * s for s in each["seconds"][name]])) if name in each["seconds"] else ""
                for name in names
            ),
        ]
        for each in found
    ]
    return [
        {
            "title": f"{layers} layers, forward and backward",
            "head": ["", unit, f"time, x {first}", "time, x limit", ""],
            "rows": above,
        },
        {"title": f"one layer, {unit}", "head": ["", "layers", *names], "rows": below},
    ]


def chosen(most: int | None, quick: bool) -> list[Case]:
    """All cases, or those that move most bytes; `quick`: the smallest of each kind."""
    every = cases()
    if quick:
        return list({case.kind: case for case in every}.values())  # the last of a kind stays: the smallest
    return every[:most]


def bench(
    place: Place,
    images: int | None,
    most: int | None,
    rounds: int,
    *,
    quick: bool = False,
    keep: Callable[[list[dict[str, Any]]], None] = lambda found: None,
) -> tuple[int, list[dict[str, Any]]]:
    """The number of images, and what was found of each case; `keep` is handed what there is after each.

    Every rank must call it alike.
    """
    cuda = place.device.type == "cuda"
    images = images or (256 if cuda and not quick else 2)
    repeats = 20 if cuda else 1
    found: list[dict[str, Any]] = []
    for case in chosen(most, quick):
        found.append(measure(case, images, place, 2 if quick else rounds, repeats))
        keep(found)
    return images, found


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables and writes the JSON; 1 where a contender of ours is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="auto")
    parser.add_argument("--images", type=int, help="a rank's; default 256 on a GPU, 2 on a CPU")
    parser.add_argument("--most", type=int, metavar="K", help="only the K shapes that move most bytes")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument(
        "--quick", action="store_true", help="three small shapes, two turns: for a look and for the tests"
    )
    options = parser.parse_args(arguments)
    where = environment()
    with join(options.device) as place:
        images, found = bench(place, options.images, options.most, options.rounds, quick=options.quick)
    rows, device = totals(found), place.device.type
    if place.first:
        print(f"{images} images a rank, {place.world_size} rank(s), 16 bits, channels-last, {CLOCK[device]}")
        for table in tables(found, device):
            print(table["title"])
            print_table(table["head"], table["rows"])
        measured = [row for row in rows if "seconds" in row and row["name"] != LIMIT]
        best = min(measured, key=lambda row: spread(row["seconds"])["median"])
        print(f"fastest: {best['name']}")
        report = {"tool": "bench_norm", "environment": where, "device": device, "images": images}
        report |= {"ranks": place.world_size, "points": rows, "layers": found, "targets": []}
        write_json(options.json, report)
    return 1 if any(row["name"] == OURS and "WRONG" in row["said"] for row in rows) else 0


if __name__ == "__main__":
    end(main)
