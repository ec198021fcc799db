"""Time BatchNorm with its residual and ReLU, forward and backward, on the shapes of a ResNet-50's 53 layers.

    torchrun --nproc-per-node 8 tools/bench/run.py norm          # the same with the statistics of all ranks

Contenders take turns on the same activations, channels-last and in bf16: torch's three operators, torch.compile of
them, and our kernels. Each is first compared with float32; one that differs is not timed, and if it is ours the exit
code is 1. On a GPU each runs as a CUDA graph where it can, so that the times are those of the kernels.

The limit is a copy of as many bytes as two passes forward and two backward must move. A layer that fits in the caches
can be faster than that, and on a CPU, where a copy also reads what it overwrites, every layer can.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastsuncet.distributed.place import Place, join
from fastsuncet.models.norm_kernel import prove
from fastsuncet.training.cuda_graph import first_message
from tools.bench import harness
from tools.bench.layers import LayerShape, NormLayer, Pass, difference, kernels, operators, resnet50_shapes

OPERATORS, COMPILED, OURS = "torch, three operators", "torch.compile of them", "fastsuncet kernels"
LIMIT = "limit: a copy of as many bytes"
TOLERANCE = 0.02  # mean difference to float32 over the mean value: 16 bits cost less than half of it
CONTENDERS: dict[str, Callable[[NormLayer], Pass]] = {
    OPERATORS: operators,
    COMPILED: partial(operators, compile=True),
    OURS: kernels,
}


def prepare(name: str, layer: NormLayer, expected: Sequence[Tensor]) -> tuple[Pass | None, str]:
    """Return a contender, None if it does not run or is far from `expected`, and a note on it or ""."""
    device, ranks = layer.place.device, layer.place.world_size
    if name == OURS and (why := harness.kernel_problem("norm.cu", device, prove)):
        return None, why
    try:
        call = CONTENDERS[name](layer)
        found = call()
    # A compiler, a kernel or the memory can fail in any way, and the other contenders are still wanted.
    except Exception as error:
        return None, f"failed: {type(error).__name__}: {first_message(error)}"
    # Over ranks some contenders return a weight's gradient of this rank's rows, some the mean of all: not compared.
    compared = [i for i in range(len(found)) if ranks == 1 or i not in (2, 3)]
    off = difference([found[i] for i in compared], [expected[i] for i in compared])
    if not off <= TOLERANCE:
        return None, f"WRONG: {100 * off:.1f} % off float32"
    if device.type == "cpu" or ranks > 1:
        return call, ""
    call, why = harness.capture_graph(call)
    return call, why and f"not as a CUDA graph: {why}"


def time_layer(shape: LayerShape, images: int, place: Place, rounds: int) -> tuple[dict, dict[str, str]]:
    """Return the seconds by round of all layers of a shape, by contender and of the limit; notes on contenders."""
    layer, device = NormLayer(shape, images, place), place.device.type
    # The same layer with activations in float32.
    expected = operators(NormLayer(shape, images, place, torch.float32))()
    prepared = {name: prepare(name, layer, expected) for name in CONTENDERS}
    calls = {name: call for name, (call, _) in prepared.items() if call is not None}
    calls[LIMIT] = harness.copy_of(shape.moved(images), device)
    seconds = harness.time_in_turns(calls, device, rounds, 20 if device == "cuda" else 1)
    notes = {name: note for name, (_, note) in prepared.items() if note}
    if device == "cuda":
        # The graphs keep all of a layer's activations several times.
        del calls, prepared
        torch.cuda.empty_cache()
    every = {name: [shape.layers * each for each in found] for name, found in seconds.items()}
    return every, notes


def measure(options: Namespace, report: harness.Report) -> dict[str, Any]:
    """Add up the seconds of all layers by contender; a contender that misses one of them has no sum."""
    shapes, rounds = resnet50_shapes()[: options.most], options.rounds
    if options.quick:
        # The last shape of each kind is the smallest.
        shapes, rounds = list({shape.kind: shape for shape in resnet50_shapes()}.values()), 2
    with join(options.device) as place:
        device = place.device.type
        images = 256 if device == "cuda" and not options.quick else 2
        what = f"{images} images on each of {place.world_size} rank(s), 16 bits, channels-last"
        found = []
        for shape in shapes:
            found.append(time_layer(shape, images, place, rounds))
            timed = [name for name in (*CONTENDERS, LIMIT) if all(name in seconds for seconds, _ in found)]
            sums = {name: [sum(turn) for turn in zip(*(each[name] for each, _ in found))] for name in timed}
            points = harness.points_of(sums, timed[0], LIMIT)
            notes = {f"{name}: {note}": None for _, said in found for name, note in said.items()}
            count = sum(each.layers for each in shapes[: len(found)])
            title = f"{count} layers, forward and backward, {what}, {harness.CLOCK[device]}"
            tables = [harness.table(title, points, harness.time_columns(device, timed[0]))]
            report.save(tables=tables, points=points, notes=list(notes))  # the next shape can end the process
    wrong = [note for note in notes if note.startswith(f"{OURS}: WRONG")]
    return {"tables": tables, "points": points, "notes": list(notes), "wrong": wrong}


CASE = harness.Case(
    measure,
    rounds=7,
    quick="three small shapes, two turns",
    device="auto",
    add_arguments=lambda add: add("--most", type=int, metavar="K", help="the K shapes that move most bytes"),
)
