"""Count and time what the Python thread does for the pixels of a step: plan, paths, feeding DALI, taking its tensors.

    python tools/bench/bench_host.py [--rounds R] [--json FILE] [--quick]

The step is that of configs/in1k_10pct.yaml on one of 64 processes and on one of 16, over an index of ImageNet's size.
The files are small pictures, and DALI decodes them in its own threads, so that the time of the Python thread remains:
"ms" is its processor time without a profiler, the other columns are shares of that under Python's profiler. Calls, of
Python and of C functions, are the same on every machine. What is launched on a GPU is not in it.
"""

import cProfile
import sys
import tempfile
import time
from collections.abc import Callable
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
from pipelines.sampling.step_plan import Plan
from tools.bench import harness

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "in1k_10pct.yaml"
HERE = Place(0, 1, 0, torch.device("cpu"))
IMAGENET, SMALL = (1000, 1281), (40, 200)  # classes, images of each
STEPS = {"44 + 40 images": (44, 2), "176 + 160 images": (176, 8)}  # unlabeled, labeled of each of 20 classes
COLUMNS: list[tuple[str, str, Callable[[Any], str]]] = [
    ("", "name", str),
    ("calls", "calls", "{:,.0f}".format),
    ("ms", "seconds", harness.scaled(1e3)),
    *((part, part, "{:.0%}".format) for part in ("plan", "paths", "feeding", "rest")),
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
    return ImageIndex(
        folder, Names.of(names[i] for i in labels), labels, tuple(map(str, range(classes))), sizes
    )


def open_stream(index: ImageIndex, unlabeled: int, per_class: int) -> PairedStream:
    """Return the stream of one process, with 10 % of the labels. The caller closes it."""
    labeled = np.arange(0, len(index), 10)
    words = f"unsupervised_batch_size={unlabeled} supervised_imgs_per_class={per_class}".split()
    words = [f"criterion.{word}" for word in words]
    words += ["data.augmentation.size=16", "data.decode_threads=1", "data.color_operator=graph"]
    config = load_config(CONFIG, [*words, "meta.device=cpu"])
    arithmetic = config.resolve(1, len(index), len(index.classes), len(labeled))
    return PairedStream(config, index, labeled, arithmetic, HERE)


def calls_and_shares(call: Callable[[], Any], times: int) -> dict[str, float]:
    """Return the calls of functions, Python's and C's, that one `call` makes in this thread, and its shares of time."""
    from nvidia.dali.pipeline import Pipeline

    from pipelines.dali.engine import FilePaths

    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    for _ in range(times):
        call()
    profiler.disable()
    spent = {entry.code: entry.totaltime for entry in profiler.getstats()}
    whole = spent[PairedStream.__call__.__code__]
    parts = {"plan": Plan.__call__, "paths": FilePaths.__call__, "feeding": Pipeline._feed_input}
    shares = {name: spent[function.__code__] / whole for name, function in parts.items()}
    calls = sum(entry.callcount for entry in profiler.getstats()) / times
    return {"calls": calls, **shares, "rest": 1 - sum(shares.values())}


def measure(index: ImageIndex, rounds: int) -> list[dict[str, Any]]:
    """Return one point per size of a step; both take turns."""
    streams = {name: open_stream(index, *size) for name, size in STEPS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    for step in range(5 + rounds):
        for name in harness.rotated(list(streams), step):
            began = time.thread_time()
            streams[name](step)
            seconds[name].append(time.thread_time() - began)
    points = []
    for name, stream in streams.items():
        steps = iter(range(5 + rounds, 5 + 2 * rounds))
        point = calls_and_shares(lambda stream=stream, steps=steps: stream(next(steps)), rounds)
        points.append({"name": name, "seconds": seconds[name][5:], **point})
        stream.close()
    return points


def main(arguments: list[str] | None = None) -> int:
    """Print the table and write the JSON."""
    parser = harness.parser(__doc__, rounds=50, quick="a small index, four steps", devices=())
    options = parser.parse_args(arguments)
    report = harness.Report("bench_host", options.json)
    with tempfile.TemporaryDirectory() as folder, harness.one_thread():
        index = small_pictures(Path(folder), *(SMALL if options.quick else IMAGENET))
        points = measure(index, 4 if options.quick else options.rounds)
    limits = zip(points, (8e-3, 15e-3))
    targets = [
        harness.target(f"seconds, {p['name']}", harness.spread(p["seconds"]), limit, at_least=False)
        for p, limit in limits
    ]
    title = "the Python thread's processor time for the pixels of a step"
    return report.finish([harness.table(title, points, COLUMNS)], points=points, targets=targets)


if __name__ == "__main__":
    harness.run(main)
