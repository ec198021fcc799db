"""Count and time what the Python thread does for the pixels of a step: plan, paths, feeding DALI, taking its tensors.

    python tools/bench/bench_host.py [--rounds R] [--json FILE] [--quick]

The step is that of configs/in1k_10pct.yaml on one of 64 processes and on one of 16, over an index of ImageNet's size.
The files are small pictures, and DALI decodes them in its own threads, so that the time of the Python thread remains:
"ms" is its processor time without a profiler. Calls, of Python and of C functions, are counted by Python's profiler and
are the same on every machine. What is launched on a GPU is not in it.
"""

import cProfile
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from fastsuncet.config import load_config
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed.launch import Place
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.string_table import Names
from tools.bench import harness

HERE = Place(0, 1, 0, torch.device("cpu"))
IMAGENET, SMALL = (1000, 1281), (40, 200)  # classes, images of each
STEPS = {"44 + 40 images": (44, 2), "176 + 160 images": (176, 8)}  # unlabeled, labeled of each of 20 classes
COLUMNS: list[harness.Column] = [
    ("", "name", str),
    ("calls", "calls", "{:,.0f}".format),
    ("ms", "seconds", partial(harness.spread, factor=1e3)),
]


def small_pictures(folder: Path, classes: int, images: int) -> ImageIndex:
    """Return an index of `images` entries in each of `classes`; those of a class are one file, 64 x 48 pixels."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8))
    names = [f"train/n{number:08}/n{number:08}_1234.JPEG" for number in range(classes)]
    for name in names:
        (folder / name).parent.mkdir(parents=True)
        picture.save(folder / name)
    labels = np.repeat(np.arange(classes), images)
    sizes = np.tile(np.array([48, 64], np.int32), (len(labels), 1))
    numbers = tuple(map(str, range(classes)))
    return ImageIndex(folder, Names.of(names[i] for i in labels), labels, numbers, sizes)


def open_stream(index: ImageIndex, unlabeled: int, per_class: int) -> PairedStream:
    """Return the stream of one process, with 10 % of the labels. The caller closes it."""
    labeled = np.arange(0, len(index), 10)
    words = f"""
        criterion.unsupervised_batch_size={unlabeled} criterion.supervised_imgs_per_class={per_class}
        data.augmentation.size=16 data.decode_threads=1 data.color_operator=graph meta.device=cpu
    """
    config = load_config("in1k_10pct", words.split())
    arithmetic = config.resolve(1, len(index), len(index.classes), len(labeled))
    return PairedStream(config, index, labeled, arithmetic, HERE)


def count_calls(call: Callable[[], Any], times: int) -> float:
    """Return the calls of functions, Python's and C's, that one `call` makes in this thread."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(times):
        call()
    profiler.disable()
    return sum(entry.callcount for entry in profiler.getstats()) / times


def measure(index: ImageIndex, rounds: int) -> list[dict[str, Any]]:
    """Return one point per size of a step; both take turns."""
    streams = {name: open_stream(index, *size) for name, size in STEPS.items()}
    steps = {name: iter(range(5 + 2 * rounds)) for name in streams}
    calls = {name: lambda name=name: streams[name](next(steps[name])) for name in streams}
    seconds = harness.time_in_turns(calls, "thread", rounds, warmup=5)
    points = []
    for name, call in calls.items():
        points.append({"name": name, "seconds": seconds[name], "calls": count_calls(call, rounds)})
        streams[name].close()
    return points


def main(arguments: list[str] | None = None) -> int:
    """Print the table and write the JSON."""
    parser = harness.parser(__doc__, rounds=50, quick="a small index, four steps")
    options = parser.parse_args(arguments)
    report = harness.Report("bench_host", options.json)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        index = small_pictures(Path(folder), *(SMALL if options.quick else IMAGENET))
        points = measure(index, 4 if options.quick else options.rounds)
    limits = zip(points, (8e-3, 15e-3))
    targets = [
        harness.target(f"seconds, {p['name']}", p["seconds"], limit, at_least=False) for p, limit in limits
    ]
    title = "the Python thread's processor time for the pixels of a step"
    return report.finish([harness.table(title, points, COLUMNS)], points=points, notes=targets)


if __name__ == "__main__":
    harness.run(main)
