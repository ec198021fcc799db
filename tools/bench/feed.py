"""Time how fast images are read from a slow file server and from the page cache.

The server is simulated: a library that is loaded before all others waits 3 ms when a file is opened, and 2 ms when an
image is read from a pack (tools/bench/slow_files.c). Contenders run in processes of their own.

"loader" is that of training with 8 threads, on small images, so that reading is what takes the time. The others are
reading alone, of larger images, 256 a step, for a graph that does nothing else: from a pack in threads and a step
ahead, or from files.
"""

import itertools
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from pipelines.backend import LoaderOptions
from pipelines.datasets.folders import image_tree
from pipelines.datasets.pack import open_pack, write_pack
from pipelines.loader import Loader
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.samplers import UnlabeledSampler
from pipelines.sampling.step_plan import Plan
from tools.bench import harness
from tools.bench.harness import ratios, target
from tools.bench.pictures import write_pictures
from tools.bench.processes import rates, time_batches_in_turns
from tools.bench.slow_files import preloaded

THREADS, STEP = 8, 256
DISCARDED = 4  # more than a loader prepares while others have their turns
COLUMNS = {
    "per_second": "images/s",
    "step_ms": "ms a step",
    "thread_ms": "Python thread, CPU ms a step",
    "cpu_ms": "CPU ms/image",
}


def views(folder: str) -> Iterator[Any]:
    """Yield batches of training's loader without end."""
    index, view = image_tree(folder), Augmentation(size=16, jitter=0, gray=0, blur=0)
    plan = Plan(index, UnlabeledSampler(len(index), STEP, 1, seed=0), (view,), seed=0, role="bench")
    options = LoaderOptions(backend="dali", view_operator=False, threads=THREADS)
    yield from map(Loader(plan, options), itertools.count())


def encoded_images(folder: str, packed: bool) -> Iterator[Any]:
    """Yield the bytes of 256 images in DALI's memory, without end: from the pack or from the files in `folder`."""
    from nvidia.dali import fn, pipeline_def

    from pipelines.dali.engine import FilePaths, PackedImages

    index = open_pack(f"{folder}/pack") if packed else image_tree(f"{folder}/pictures")

    def indices(iteration: int) -> np.ndarray:
        return np.random.default_rng(iteration).integers(0, len(index), STEP)

    @pipeline_def(exec_dynamic=True, batch_size=STEP, num_threads=2, prefetch_queue_depth=2, device_id=None)
    def graph() -> Any:
        if index.pack is not None:
            return fn.external_source(PackedImages(index.pack, indices), no_copy=True)
        paths = FilePaths(index)
        return fn.io.file.read(fn.external_source(lambda i: paths(indices(i))), dont_use_mmap=True)

    pipeline = graph()
    while True:
        yield pipeline.run()


def measure(options: Namespace, report: harness.Report) -> dict[str, Any]:
    """Time both, with files and packs of generated pictures."""
    rounds = 2 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as scratch:
        slow, fast, small = (Path(scratch, name) for name in ("slow", "fast", "slow/small"))
        write_pictures(small, count=256, classes=1, side=48)
        write_pictures(fast / "pictures", count=8 if options.quick else 256, classes=1, side=375)
        write_pack(image_tree(fast / "pictures"), fast / "pack")
        # Another name of the same pack: only what is below `slow` is slow.
        shutil.copytree(fast / "pack", slow / "pack")
        sources = {
            "loader, files, 3 ms to open": (views, (str(small),)),
            "pack, 2 ms a read": (encoded_images, (str(slow), True)),
            "pack, warm": (encoded_images, (str(fast), True)),
            "files, warm": (encoded_images, (str(fast), False)),
        }
        # The processes start with these variables; what runs already is not slowed down.
        settings = {"SLOW_FOLDER": slow, "SLOW_OPEN_US": 3000, "SLOW_PREAD_US": 2000}
        with mock.patch.dict(os.environ, preloaded(Path(scratch), **settings)):
            turns = time_batches_in_turns(sources, 2 * DISCARDED, rounds, DISCARDED)
    points = [{"name": name, **rates(found, 2 * DISCARDED * STEP)} for name, found in turns.items()]
    for point, found in zip(points, turns.values()):
        for key, of in (("step_ms", "wall"), ("thread_ms", "thread")):
            point[key] = [1e3 * getattr(turn, of) / (2 * DISCARDED) for turn in found]
    _, slow_pack, warm_pack, warm_files = points
    thread = ratios(warm_pack["thread_ms"], warm_files["thread_ms"])
    notes = [
        target("ms for 256 packed images, 2 ms a read", slow_pack["step_ms"], 80, at_least=False),
        target("the Python thread's time for a warm pack, x files", thread, 1, at_least=False),
    ]
    tables = [harness.table("256 images a step", points, harness.spread_columns(COLUMNS))]
    return {"tables": tables, "notes": notes, "points": points}


CASE = harness.Case(measure, rounds=5, quick="two turns")
