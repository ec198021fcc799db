"""Time SuNCEt, NT-Xent and PAWS, forward and backward, against dense formulas and pytorch-metric-learning.

    python tools/bench/bench_loss.py [--loss L ...] [--device cpu|cuda] [--rows N ...] [--json FILE] [--rounds R]
                                     [--quick]

The rows of PAWS are its anchors, 8 views of each image; it has 105 supports for 512 anchors, as on ImageNet.

Contenders take turns: CPU time on one thread, or time between two CUDA events. Memory is how far a pass lets it rise:
on a CPU resident memory (RSS), in a fresh process for each figure; on a GPU what torch allocates.

pytorch-metric-learning is optional (pip install -e ".[bench]"); without it its rows are left out.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from fastsuncet.distributed.launch import pick_device
from fastsuncet.losses import nt_xent, paws, suncet
from fastsuncet.losses.tf32 import products
from tools.bench import harness
from tools.bench.dispatch_counter import counts
from tools.bench.harness import ratios, spread, target
from tools.bench.processes import PROCESSES, memory_growth

WIDTH, TEMPERATURE, IMAGES_PER_CLASS = 128, 0.1, 8
OURS, TF32, AUTHORS = "fastsuncet", "fastsuncet, TF32 products", "dense, as the authors"
LOSSES = ("suncet", "nt_xent", "paws")
NCA = "metric-learning NCALoss"
Loss = Callable[[Tensor], Tensor]  # z (N, D) -> scalar
# ids (N,) int64 -> the loss, with the constants that it keeps from step to step
Prepare = Callable[[Tensor], Loss]


def ours(loss: str, tf32: bool = False) -> Prepare:
    """Return our loss; it keeps nothing between steps. `tf32`: as a bf16 run on a GPU computes it."""

    def value(ids: Tensor, z: Tensor) -> Tensor:
        with products(tf32=tf32):
            return suncet(z, ids, TEMPERATURE) if loss == "suncet" else nt_xent(z, TEMPERATURE)

    return lambda ids: partial(value, ids)


def exponentials(z: Tensor, others: Tensor) -> Tensor:
    """Return exp of all N x N cosines over the temperature, without the anchor itself and without a maximum."""
    unit = z / z.norm(dim=1, keepdim=True)
    return torch.exp(unit @ unit.T / TEMPERATURE) * others


def paws_given(labels: Tensor, views: int = 8) -> tuple[Tensor, Tensor]:
    """Return the targets (2 B, D) and target supports (S, D) of PAWS, which carry no gradient."""
    generator = torch.Generator().manual_seed(1)
    sizes = 2 * (len(labels) * 512 // 105) // views, len(labels)
    targets, supports = (torch.randn(n, WIDTH, generator=generator).to(labels.device) for n in sizes)
    return targets, supports


def our_paws(labels: Tensor) -> Loss:
    """Return our PAWS: `z` holds the anchors, then the supports."""
    targets, target_supports = paws_given(labels)
    settings = {"views": 8, "classes": len(labels) // 7}  # as the trainer, which knows their number

    def loss(z: Tensor) -> Tensor:
        anchors, supports = z[: -len(labels)], z[-len(labels) :]
        return sum(paws(anchors, supports, labels, targets, target_supports, **settings), z.new_zeros(()))

    return loss


def dense_paws(labels: Tensor) -> Loss:
    """Return the authors' PAWS, with all probabilities at once."""
    targets, target_supports = paws_given(labels)
    rows = 0.9 * F.one_hot(labels).float()
    rows += 0.1 / rows.shape[1]

    def snn(query: Tensor, supports: Tensor) -> Tensor:
        return torch.softmax(F.normalize(query) @ F.normalize(supports).T / TEMPERATURE, dim=1) @ rows

    def sharpen(p: Tensor) -> Tensor:
        return p**4 / (p**4).sum(dim=1, keepdim=True)

    def loss(z: Tensor) -> Tensor:
        with torch.no_grad():
            large = sharpen(snn(targets, target_supports))
            wanted = torch.cat([large, *[sum(large.chunk(2)) / 2] * 6])
            wanted[wanted < 1e-4] = 0
        p = snn(z[: -len(labels)], z[-len(labels) :])
        mean = sharpen(p).mean(dim=0)
        return (p**-wanted).log().sum(dim=1).mean() - (mean**-mean).log().sum()

    return loss


def off_diagonal(ids: Tensor) -> Tensor:
    """Return (N, N): 0 on the diagonal, else 1."""
    return 1 - torch.eye(len(ids), device=ids.device)


def two_masks(ids: Tensor) -> Loss:
    """Return the authors' NT-Xent: the exponentials times a mask of others and a mask of positives, summed.

    With classes of more than two it is the leanest dense SuNCEt, leaner than the authors' own.
    """
    others = off_diagonal(ids)
    positives = others * (ids[:, None] == ids[None, :])

    def loss(z: Tensor) -> Tensor:
        exps = exponentials(z, others)
        return -torch.log((exps * positives).sum(dim=1) / exps.sum(dim=1)).mean()

    return loss


def class_probabilities(ids: Tensor) -> Loss:
    """Return the authors' SuNCEt in its later form: each class's probability, by a product with one-hot labels.

    It costs N x N x C more multiply-adds each way, but has no loop. -t log p is the log of a power, as they write it.
    """
    others, targets = off_diagonal(ids), F.one_hot(ids).float()

    def loss(z: Tensor) -> Tensor:
        exps = exponentials(z, others)
        probabilities = exps / exps.sum(dim=1, keepdim=True) @ targets
        return torch.log(probabilities**-targets).sum(dim=1).mean()

    return loss


def log_sum_exp(ids: Tensor) -> Loss:
    """Return the careful dense form: two log-sum-exps of masked logits."""
    negatives = ids[:, None] != ids[None, :]

    def loss(z: Tensor) -> Tensor:
        unit = F.normalize(z)
        logits = (unit @ unit.T / TEMPERATURE).fill_diagonal_(-torch.inf)
        return (logits.logsumexp(dim=1) - logits.masked_fill(negatives, -torch.inf).logsumexp(dim=1)).mean()

    return loss


def metric_learning() -> Prepare | None:
    """Return pytorch-metric-learning's NCALoss, which over cosines is SuNCEt; None where it is not installed.

    Its NTXentLoss is no peer: it compares every positive pair with every negative pair, N x N(N - 2) of them.
    """
    try:
        from pytorch_metric_learning.distances import CosineSimilarity
        from pytorch_metric_learning.losses import NCALoss
    except ImportError:
        return None
    nca = NCALoss(softmax_scale=1 / TEMPERATURE, distance=CosineSimilarity())
    return lambda ids: lambda z: nca(z, ids)


def contenders(loss: str, device: str = "cpu") -> dict[str, Prepare]:
    """Return all that compute `loss` ("suncet", "nt_xent" or "paws"), ours first, equal in value and gradient."""
    if loss == "paws":
        return {OURS: our_paws, AUTHORS: dense_paws}
    found = {OURS: ours(loss)}
    if device == "cuda":
        found[TF32] = ours(loss, tf32=True)
    found[AUTHORS] = class_probabilities if loss == "suncet" else two_masks
    if loss == "suncet":
        found["dense, two masks"] = two_masks
    found["dense, log-sum-exp"] = log_sum_exp
    nca = metric_learning()
    return found if nca is None else {**found, NCA: nca}


def inputs(loss: str, rows: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return z (N, D), which requires a gradient, and ids (N,): classes of 8, or two views of N/2 images.

    Of PAWS z are N anchors and S supports (N + S, D), and ids the labels of the supports (S,), 7 of each class.
    """
    if loss == "paws":
        supports = rows * 105 // 512
        z = torch.randn(rows + supports, WIDTH, generator=torch.Generator().manual_seed(rows)).to(device)
        return z.requires_grad_(), torch.arange(supports, device=device) % max(1, supports // 7)
    z = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)).to(device).requires_grad_()
    classes = rows // (IMAGES_PER_CLASS if loss == "suncet" else 2)
    return z, torch.arange(rows, device=device) % classes


def forward_backward(function: Loss, z: Tensor) -> Tensor:
    """Compute one value and its gradient, without the previous gradient."""
    z.grad = None
    value = function(z)
    value.backward()
    return value.detach()


def memory(loss: str, name: str, rows: int, device: str = "cpu") -> int:
    """Return the bytes of one contender's pass, its constants included. On a CPU, call it in a fresh process."""
    torch.set_num_threads(1)
    prepare = contenders(loss, device)[name]
    # A first call loads libraries, which is not the loss's memory.
    z, ids = inputs(loss, 512 if loss == "paws" else 64, device)
    forward_backward(prepare(ids), z)
    z, ids = inputs(loss, rows, device)
    return memory_growth(lambda: forward_backward(prepare(ids), z), device)


def measure(loss: str, rows: int, rounds: int, device: str = "cpu") -> list[dict[str, Any]]:
    """Return one point per contender, ours first: time in turns, counts, memory.

    On a CPU memory is measured in half as many fresh processes as there are turns.
    """
    z, ids = inputs(loss, rows, device)
    calls = {
        name: partial(forward_backward, prepare(ids), z) for name, prepare in contenders(loss, device).items()
    }
    seconds = harness.time_in_turns(calls, device, rounds, 10 if device == "cuda" else 1)
    points = harness.points_of(seconds, OURS)
    with PROCESSES.Pool(1, maxtasksperchild=1) as pool:
        for point in points:
            point |= {"loss": loss, "rows": rows} | counts(calls[point["name"]])
            case = (loss, point["name"], rows, device)
            if device == "cuda":
                point["bytes"] = [memory(*case)]
            else:
                point["bytes"] = pool.starmap(memory, [case] * ((rounds + 1) // 2), chunksize=1)
            point["bytes_to_ours"] = ratios(point["bytes"], [max(1, size) for size in points[0]["bytes"]])
    return points


def table_of(device: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table of one loss at one N."""
    thread = ", one thread" if device == "cpu" else ""
    loss, rows = points[0]["loss"], points[0]["rows"]
    title = f"{loss}, N = {rows}, D = {WIDTH}, forward and backward, float32{thread}"
    columns = [
        *harness.time_columns(device),
        ("memory, MB", "bytes", partial(spread, factor=1e-6)),
        ("memory, x ours", "bytes_to_ours", spread),
        *harness.COUNTS,
    ]
    return harness.table(title, points, columns)


def targets_of(device: str, points: list[dict[str, Any]]) -> list[str]:
    """Return the targets of suncet at 4,096 rows on a CPU, where that was measured."""
    rows = {p["name"]: p for p in points if p["loss"] == "suncet" and p["rows"] == 4096}
    if not rows or device != "cpu":
        return []
    authors, waits = rows[AUTHORS], [rows[OURS]["host_waits"]]
    found = [
        target("suncet at N=4096, times faster than dense", authors["time_to_ours"], 5, at_least=True),
        target("suncet at N=4096, times smaller (RSS)", authors["bytes_to_ours"], 15, at_least=True),
        target("suncet at N=4096, host waits", waits, 0, at_least=False),
    ]
    if NCA in rows:
        nca = rows[NCA]["time_to_ours"]
        found.append(target("suncet at N=4096, times faster than NCALoss", nca, 2.5, at_least=True))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the tables and write the JSON."""
    # Not "auto": the figures of BENCHMARKS.md are of a CPU, and --device cuda has no resident memory.
    parser = harness.parser(__doc__, rounds=5, quick="N = 512, two turns", device="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="values of N")
    parser.add_argument(
        "--loss", nargs="+", choices=LOSSES, default=LOSSES, help="of suncet, nt_xent and paws"
    )
    options = parser.parse_args(arguments)
    device = pick_device(options.device, 0).type
    rows, rounds = ([512], 2) if options.quick else (options.rows, options.rounds)
    torch.set_num_threads(1)
    report = harness.Report("bench_loss", options.json, device=device)
    points, tables = [], []
    for loss in options.loss:
        for n in rows:
            found = measure(loss, n, rounds, device)
            points += found
            tables.append(table_of(device, found))
            report.save(tables=tables, points=points)
    missing = "pytorch-metric-learning is not installed: its rows are left out (pip install -e '.[bench]')"
    notes = [missing] if metric_learning() is None else []
    return report.finish(tables, notes=notes + targets_of(device, points))


if __name__ == "__main__":
    harness.run(main)
