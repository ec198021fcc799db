"""Time SuNCEt, NT-Xent and PAWS, forward and backward, against the dense forms of their authors.

The rows of PAWS are its anchors, 8 views of each image; it has 105 supports for 512 anchors, as on ImageNet. Memory is
the largest sum of the tensors that are alive at any time in a pass. On a GPU each contender is timed as a CUDA graph
where it can be captured: launched one by one, small kernels wait for the host.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import fastsuncet
from fastsuncet.distributed.place import pick_device
from fastsuncet.training.methods import tf32_products
from tools.bench import dense_forms, harness
from tools.bench.dense_forms import TEMPERATURE, WIDTH, Loss, forward_backward, inputs, paws_targets
from tools.bench.harness import target

LOSSES = ("suncet", "nt_xent", "paws")
OURS, TF32, AUTHORS = "fastsuncet", "fastsuncet, TF32 products", "dense, as the authors"


def ours(loss: str, ids: Tensor, tf32: bool = False) -> Loss:
    """Return our loss of z, for PAWS of anchors and then supports. `tf32`: as a bf16 run on a GPU has it."""
    targets = paws_targets(ids) if loss == "paws" else ()
    settings = {"views": 8, "classes": len(ids) // 7}  # as the trainer, which knows their number

    def value(z: Tensor) -> Tensor:
        with tf32_products(tf32):
            if loss == "paws":
                return sum(fastsuncet.paws(*z.tensor_split([-len(ids)]), ids, *targets, **settings))
            if loss == "suncet":
                return fastsuncet.suncet(z, ids, TEMPERATURE)
            return fastsuncet.nt_xent(z, TEMPERATURE)

    return value


def contenders(loss: str, device: str = "cpu") -> dict[str, Callable[[Tensor], Loss]]:
    """Return all that compute `loss`, ours first, equal in value and gradient; each takes the ids (N,)."""
    found: dict[str, Callable[[Tensor], Loss]] = {OURS: partial(ours, loss)}
    if loss == "paws":
        return found | {AUTHORS: lambda labels: dense_forms.paws(labels, *paws_targets(labels))}
    found |= {TF32: partial(ours, loss, tf32=True)} if device == "cuda" else {}
    return found | {AUTHORS: dense_forms.suncet if loss == "suncet" else dense_forms.nt_xent}


def compare(loss: str, rows: int, rounds: int, device: str = "cpu") -> tuple[list[dict[str, Any]], list[str]]:
    """Return one point per contender, ours first, and a note on each that is no CUDA graph on a GPU."""
    z, ids = inputs(loss, rows, device)
    prepared = contenders(loss, device).items()
    calls = {name: partial(forward_backward, prepare(ids), z) for name, prepare in prepared}
    timed, notes = dict(calls), []
    if device == "cuda":
        for name, call in calls.items():
            timed[name], why = harness.capture_graph(call)
            notes += [f"{loss}, N = {rows}: not as a CUDA graph: {name}: {why}"] if why else []
    seconds = harness.time_in_turns(timed, device, rounds, 10 if device == "cuda" else 1)
    points = harness.points_of(seconds, OURS)
    # A graph's operators are not dispatched again.
    harness.add_counts(points, calls, device)
    return [{"loss": loss, "rows": rows, **point} for point in points], notes


def measure(options: Namespace, report: harness.Report) -> dict[str, Any]:
    """Time and count each loss at each number of rows."""
    device = pick_device(options.device, 0).type
    rows, rounds = ([512], 2) if options.quick else (options.rows, options.rounds)
    torch.set_num_threads(1)
    memory = ("memory, MB", "peak", lambda peak: f"{1e-6 * peak:.3g}")
    columns = [*harness.time_columns(device), memory, *harness.COUNTS]
    points, tables, notes = [], [], []
    for loss, n in product(options.loss, rows):
        found, launched = compare(loss, n, rounds, device)
        points += found
        notes += launched
        title = f"{loss}, N = {n}, D = {WIDTH}, forward and backward, float32, {harness.CLOCK[device]}"
        tables.append(harness.table(title, found, columns))
        report.save(tables=tables, points=points, notes=notes)
    waits = [point["host_waits"] for point in points if point["name"] == OURS]
    notes.append(target("host waits of ours", waits, 0, at_least=False))
    return {"tables": tables, "points": points, "notes": notes}


def add_arguments(add: Callable) -> None:
    add("--rows", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="N (default: %(default)s)")
    add("--loss", nargs="+", choices=LOSSES, default=LOSSES)


# Not "auto": the figures of BENCHMARKS.md are of a CPU, and on a GPU there is no resident memory.
CASE = harness.Case(measure, 5, "N = 512, two turns", device="cpu", add_arguments=add_arguments)
