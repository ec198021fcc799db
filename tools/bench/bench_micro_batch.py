"""Measure the memory of a step against its batch, whole and in pieces (criterion.micro_batch).

    python tools/bench/bench_micro_batch.py [--batches 64 128 256] [--micro-batch 32] [--json FILE] [--quick]

SimCLR with a ResNet-18 at 64 pixels in float32, on a CPU with one thread: an update has two views of each image of the
batch. Each figure is how far the resident memory of a fresh process rises during a step, its pixels included, after a
step of eight images has loaded the libraries and made the momentum.
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from fastsuncet.config import load_config
from fastsuncet.data.paired_stream import Batch
from fastsuncet.distributed.launch import Place
from fastsuncet.training.step import build, train_step
from tools.bench import harness
from tools.bench.processes import PROCESSES, memory_growth


def memory(size: int, images: int, micro_batch: int | None) -> int:
    """Return the bytes of one step of two views of `images` images of `size` pixels. For a fresh process."""
    torch.set_num_threads(1)
    pieces = f"criterion.micro_batch={'null' if micro_batch is None else micro_batch}"
    words = ["model.name=resnet18", "model.stem=imagenet", "meta.precision=fp32", pieces]
    here = Place(0, 1, 0, torch.device("cpu"))
    _, network, optimizer, setting = build(load_config("cifar10_simclr", words), here, 10)

    def step(count: int = images) -> None:
        views = tuple(torch.rand(count, 3, size, size) for _ in range(2))
        batch = Batch(0, views, views[0][:0], torch.empty(0, dtype=torch.int64))
        train_step(network, optimizer, batch, 1e-3, setting)

    step(8)
    return memory_growth(step)


def measure(size: int, batches: list[int], micro_batch: int) -> list[dict[str, Any]]:
    """Return one point for each batch, whole and in pieces."""
    cases = [(size, images, most) for images in batches for most in (None, micro_batch)]
    with PROCESSES.Pool(2, maxtasksperchild=1) as pool:
        growth = pool.starmap(memory, cases, chunksize=1)
    points = []
    for number, (_, images, most) in enumerate(cases):
        name, whole = "whole" if most is None else f"pieces of {most}", growth[number - number % 2]
        point = {"name": name, "images": images, "resident_bytes": growth[number]}
        points.append({**point, "to_whole": growth[number] / whole})
    return points


def main(arguments: list[str] | None = None) -> int:
    """Print the table and write the JSON."""
    parser = harness.parser(__doc__, quick="16 pixels, 8 images")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256], help="images an update")
    parser.add_argument("--micro-batch", type=int, default=32, help="views of a piece (default: %(default)s)")
    options = parser.parse_args(arguments)
    report = harness.Report("bench_micro_batch", options.json)
    points = measure(*((16, [8], 4) if options.quick else (64, options.batches, options.micro_batch)))
    columns = [
        ("images an update", "images", str),
        ("", "name", str),
        ("RSS MB", "resident_bytes", lambda size: f"{size / 1e6:.0f}"),
        ("x whole", "to_whole", "{:.2f}".format),
    ]
    title = "SimCLR, ResNet-18, 64 pixels, float32, one thread: memory of a step"
    return report.finish([harness.table(title, points, columns)], points=points)


if __name__ == "__main__":
    harness.run(main)
