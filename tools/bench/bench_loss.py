"""SuNCEt and NT-Xent, forward and backward, against the dense formulas and pytorch-metric-learning.

    python tools/bench/bench_loss.py [--json FILE] [--rows N ...] [--rounds R] [--quick]

Time is CPU time on one thread, contenders in turns. Memory is asked in a fresh process for each point, twice: as
resident memory that the system saw grow, and as bytes of live tensors. The last row is three matrix products
and nothing else: what the sweep over ranks is made of, and more than a process alone has to do.
`pip install -e ".[bench]"` brings pytorch-metric-learning; without it its rows are left out.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, `tools` is not importable yet

from fastsuncet.losses import nt_xent, suncet
from fastsuncet.losses.contrast import ROWS_PER_CHUNK
from tools.bench.common import (
    PROCESSES,
    Counter,
    environment,
    interleaved,
    print_table,
    print_targets,
    ratios,
    resident_growth,
    spread,
    target,
    told,
    write_json,
)

WIDTH, TEMPERATURE, IMAGES_PER_CLASS = 128, 0.1, 8
LISTING_ROWS = 1024  # each class's slice has an N x N gradient: a minute a call at 4,096
OURS, AUTHORS, NCA = "fastsuncet", "dense, as the authors", "metric-learning NCALoss"
LISTING, LIMIT = "Listing 2, by class", "3 matrix products alone"
Loss = Callable[[Tensor], Tensor]  # z (N, D) -> scalar
Prepared = Callable[
    [Tensor], Loss
]  # ids (N,) int64 -> the loss, with the constants it keeps from step to step


def ours(loss: str) -> Prepared:
    """Our loss; nothing is kept between steps."""
    if loss == "suncet":
        return lambda ids: lambda z: suncet(z, ids, TEMPERATURE)
    return lambda ids: lambda z: nt_xent(z, TEMPERATURE)


def exponentials(z: Tensor, others: Tensor) -> Tensor:
    """exp of all N x N cosines over the temperature, the anchor itself multiplied away, no maximum taken out."""
    unit = z / z.norm(dim=1, keepdim=True)
    return torch.exp(unit @ unit.T / TEMPERATURE) * others


def two_masks(ids: Tensor) -> Loss:
    """The authors' NT-Xent: the exponentials times a mask of others and a mask of positives, summed.

    With classes of more than two it is the leanest dense SuNCEt, leaner than their own.
    """
    others = 1 - torch.eye(len(ids))
    positives = others * (ids[:, None] == ids[None, :])

    def loss(z: Tensor) -> Tensor:
        exps = exponentials(z, others)
        return -torch.log((exps * positives).sum(dim=1) / exps.sum(dim=1)).mean()

    return loss


def class_probabilities(ids: Tensor) -> Loss:
    """The authors' SuNCEt in its later form: a probability of each class, by a product with one-hot labels.

    N x N x C multiply-adds more each way, but no loop. -t log p is written as the log of a power, as they do.
    """
    others, targets = 1 - torch.eye(len(ids)), F.one_hot(ids).float()

    def loss(z: Tensor) -> Tensor:
        exps = exponentials(z, others)
        probabilities = exps / exps.sum(dim=1, keepdim=True) @ targets
        return torch.log(probabilities**-targets).sum(dim=1).mean()

    return loss


def by_class(ids: Tensor) -> Loss:
    """Listing 2 of the paper to the letter, a loop over the classes (its `fill_diag(0)` as a product)."""
    others = 1 - torch.eye(len(ids))

    def loss(z: Tensor) -> Tensor:
        exps, total, classes = exponentials(z, others), torch.zeros(()), set(ids.tolist())
        for label in classes:
            rows = ids == label
            above, below = exps[rows][:, rows].sum(dim=1), exps[rows].sum(dim=1)
            total = total - torch.log(above / below).sum() / rows.sum()
        return total / len(classes)

    return loss


def log_sum_exp(ids: Tensor) -> Loss:
    """The careful dense way: two log-sum-exps of masked logits."""
    negatives = ids[:, None] != ids[None, :]

    def loss(z: Tensor) -> Tensor:
        unit = F.normalize(z)
        logits = (unit @ unit.T / TEMPERATURE).fill_diagonal_(-torch.inf)
        return (logits.logsumexp(dim=1) - logits.masked_fill(negatives, -torch.inf).logsumexp(dim=1)).mean()

    return loss


def metric_learning() -> Prepared | None:
    """pytorch-metric-learning's NCALoss, which over cosines is SuNCEt; None where it is not installed.

    Its NTXentLoss is no peer: it compares every positive pair with every negative pair, N x N(N - 2) of them.
    """
    try:
        from pytorch_metric_learning.distances import CosineSimilarity
        from pytorch_metric_learning.losses import NCALoss
    except ImportError:
        return None
    nca = NCALoss(softmax_scale=1 / TEMPERATURE, distance=CosineSimilarity())
    return lambda ids: lambda z: nca(z, ids)


def contenders(loss: str, rows: int) -> dict[str, Prepared]:
    """Everyone who computes `loss` ("suncet" or "nt_xent"), ours first. All agree in value and gradient."""
    found = {OURS: ours(loss), AUTHORS: class_probabilities if loss == "suncet" else two_masks}
    if loss == "suncet":
        found["dense, two masks"] = two_masks
    found["dense, log-sum-exp"] = log_sum_exp
    if loss == "suncet" and rows <= LISTING_ROWS:
        found[LISTING] = by_class
    nca = metric_learning()
    return found if nca is None else {**found, NCA: nca}


def inputs(loss: str, rows: int) -> tuple[Tensor, Tensor]:
    """(z (N, D) that asks for a gradient, ids (N,)): interleaved classes of 8, or two views of N/2 images."""
    z = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)).requires_grad_()
    return z, torch.arange(rows) % (rows // (IMAGES_PER_CLASS if loss == "suncet" else 2))


def forward_backward(function: Loss, z: Tensor) -> Tensor:
    """One value and its gradient, the gradient of before let go."""
    z.grad = None
    value = function(z)
    value.backward()
    return value.detach()


def three_products(rows: int) -> Callable[[], None]:
    """What no exact sweep over ranks can do without: the N x N logits and the gradients of both factors, by chunks."""
    z, _ = inputs("suncet", rows)
    keys = z.detach()
    chunk = min(ROWS_PER_CHUNK, rows)
    logits, d_queries, d_keys = torch.empty(chunk, rows), torch.empty(chunk, WIDTH), torch.zeros(rows, WIDTH)

    def run() -> None:
        for start in range(0, rows, chunk):
            queries = keys[start : start + chunk]
            torch.mm(queries, keys.T, out=logits[: len(queries)])
            torch.mm(logits[: len(queries)], keys, out=d_queries[: len(queries)])
            d_keys.addmm_(logits[: len(queries)].T, queries)

    return run


def point(loss: str, name: str, rows: int) -> dict[str, int]:
    """Memory and counts of one contender, constants that it keeps counted in. For a process of its own."""
    torch.set_num_threads(1)
    prepare = contenders(loss, rows)[name]
    z, ids = inputs(loss, 64)
    forward_backward(prepare(ids), z)  # what a first call loads is not the loss's
    z, ids = inputs(loss, rows)
    resident = resident_growth(lambda: forward_backward(prepare(ids), z))
    z.grad = None
    with Counter() as memory:
        forward_backward(prepare(ids), z)
    function = prepare(ids)
    with Counter() as step:
        forward_backward(function, z)
    return {
        "resident_bytes": resident,
        "live_bytes": memory.peak,
        "operators": step.operators,
        "host_waits": step.waits,
    }


def measure(loss: str, rows: int, rounds: int, processes: int) -> list[dict[str, Any]]:
    """One row a contender: time in turns, then memory in `processes` fresh processes each."""
    z, ids = inputs(loss, rows)
    calls: dict[str, Callable[[], Any]] = {
        name: partial(forward_backward, prepare(ids), z) for name, prepare in contenders(loss, rows).items()
    }
    seconds = interleaved({**calls, LIMIT: three_products(rows)}, rounds)
    with PROCESSES.Pool(1, maxtasksperchild=1) as pool:
        memory = {
            name: pool.starmap(point, [(loss, name, rows)] * processes, chunksize=1)
            for name in contenders(loss, rows)
        }
    ours = memory[OURS]
    found = []
    for name, times in seconds.items():
        row = {
            "loss": loss,
            "rows": rows,
            "name": name,
            "cpu_seconds": times,
            "time_to_ours": ratios(times, seconds[OURS]),
        }
        if name in memory:
            resident = [p["resident_bytes"] for p in memory[name]]
            row |= memory[name][0] | {"resident_bytes": spread(resident)}
            row["resident_to_ours"] = ratios(resident, [max(1, p["resident_bytes"]) for p in ours])
            row["live_to_ours"] = row["live_bytes"] / ours[0]["live_bytes"]
        found.append(row)
    return found


def show(loss: str, rows: int, found: list[dict[str, Any]]) -> None:
    """One table a point."""
    print(f"{loss}, N = {rows}, D = {WIDTH}, forward and backward, float32, one thread")
    head = ["", "CPU ms", "x ours", "RSS MB", "x ours", "tensors MB", "x ours", "operators", "host waits"]
    lines = []
    for row in found:
        milliseconds = spread([1e3 * s for s in row["cpu_seconds"]])
        line = [row["name"], told(milliseconds), told(row["time_to_ours"])]
        if "operators" in row:
            resident = {key: value / 1e6 for key, value in row["resident_bytes"].items()}
            line += [told(resident), told(row["resident_to_ours"])]
            line += [f"{row['live_bytes'] / 1e6:.1f}", f"{row['live_to_ours']:.1f}"]
            line += [f"{row['operators']:,}", f"{row['host_waits']:,}"]
        lines.append(line + [""] * (len(head) - len(line)))
    print_table(head, lines)


def targets_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked of suncet at 4,096 rows, where that was measured."""
    rows = {row["name"]: row for row in found if row["loss"] == "suncet" and row["rows"] == 4096}
    asked = []
    if rows:
        authors = rows[AUTHORS]
        asked += [
            target("suncet at N=4096, times faster than dense", authors["time_to_ours"], 5, at_least=True),
            target("suncet at N=4096, times smaller (RSS)", authors["resident_to_ours"], 15, at_least=True),
            target("suncet at N=4096, host waits", spread([rows[OURS]["host_waits"]]), 0, at_least=False),
        ]
    if NCA in rows:
        nca = rows[NCA]["time_to_ours"]
        asked.append(target("suncet at N=4096, times faster than NCALoss", nca, 2.5, at_least=True))
    return asked


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables and writes the JSON. A missed target is a finding, not a failure: 0 either way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="values of N")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument(
        "--quick", action="store_true", help="N = 256, two turns: for a look and for the tests"
    )
    options = parser.parse_args(arguments)
    rows, rounds, processes = (
        ([256], 2, 1) if options.quick else (options.rows, options.rounds, min(3, options.rounds))
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    where, found = environment(), []
    try:
        for loss in ("suncet", "nt_xent"):
            for n in rows:
                found += measure(loss, n, rounds, processes)
                show(loss, n, [row for row in found if (row["loss"], row["rows"]) == (loss, n)])
    finally:
        torch.set_num_threads(threads)
    if metric_learning() is None:
        print("pytorch-metric-learning is not installed: its rows are left out (pip install -e '.[bench]')\n")
    targets = targets_of(found)
    print_targets(targets)
    write_json(
        options.json, {"tool": "bench_loss", "environment": where, "points": found, "targets": targets}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
