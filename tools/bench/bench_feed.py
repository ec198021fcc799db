"""Time how fast images are read from a slow file server and from the page cache, against what this project did before.

    python tools/bench/bench_feed.py [--rounds R] [--json FILE] [--quick]

The server is simulated: a library that is loaded before all others waits 3 ms when a file is opened, and 2 ms when an
image is read from a pack (tools/bench/slow_files.c). Contenders run in processes of their own, in turns.

"files" is the loader of training with 8 threads on small images, so that reading is what takes the time: reading files,
or mapping them into memory, DALI's default. "256 images" is reading alone, of larger images, for a graph that does
nothing else: from a pack in threads and a step ahead, or one after the other when they are asked for; from files.
"""

import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from pipelines.backend import LoaderOptions
from pipelines.datasets.folders import image_tree
from pipelines.datasets.pack import open_pack, write_pack
from pipelines.loader import Loader
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.samplers import UnlabeledSampler
from pipelines.sampling.step_plan import Plan
from tools.bench import harness
from tools.bench.pictures import write_pictures
from tools.bench.processes import rates, time_batches_in_turns
from tools.bench.slow_files import preloaded

OPEN_US, PREAD_US, THREADS, BATCH, STEP = 3000, 2000, 8, 32, 256
# More than a loader prepares while others have their turns.
DISCARDED = 4
FILES = {"files, mapped (before)": False, "files, read": True}
PACK = ("pack, one after the other (before)", "pack, read ahead")
COLUMNS: list[harness.Column] = [
    ("", "name", str),
    ("images/s", "per_second", harness.spread),
    ("ms for 256 images", "step_ms", harness.spread),
    ("Python thread, CPU ms for 256", "thread_ms", harness.spread),
    ("CPU ms/image", "cpu_ms", harness.spread),
    ("images/s, x before", "speed_to_before", harness.spread),
]


def views_of_files(folder: str, plain: bool) -> Iterator[Any]:
    """Yield batches of training's loader without end; `plain`: whether files are read and not mapped."""
    from nvidia.dali import fn

    read = fn.io.file.read
    fn.io.file.read = lambda paths, dont_use_mmap: read(paths, dont_use_mmap=plain)
    index = image_tree(folder)
    plan = Plan(
        index,
        UnlabeledSampler(len(index), BATCH, 1, seed=0),
        (Augmentation(size=16, jitter=0, gray=0, blur=0),),
        seed=0,
        role="bench",
    )
    options = LoaderOptions(backend="dali", view_operator=False, threads=THREADS)
    yield from map(Loader(plan, options), itertools.count())


def encoded_images(folder: str, how: str) -> Iterator[Any]:
    """Yield the bytes of 256 images in DALI's memory, without end: from the files or from the pack in `folder`."""
    from nvidia.dali import fn, pipeline_def

    from pipelines.dali.engine import FilePaths, PackedImages

    index = image_tree(f"{folder}/pictures") if how == "files" else open_pack(f"{folder}/pack")

    def indices(iteration: int) -> np.ndarray:
        return np.random.default_rng(iteration).integers(0, len(index), STEP)

    @pipeline_def(exec_dynamic=True, batch_size=STEP, num_threads=2, prefetch_queue_depth=2, device_id=None)
    def graph() -> Any:
        if index.pack is None:
            paths = FilePaths(index)
            return fn.io.file.read(fn.external_source(lambda i: paths(indices(i))), dont_use_mmap=True)
        if how == PACK[1]:
            return fn.external_source(PackedImages(index.pack, indices), no_copy=True)
        fetch = index.pack.fetch
        return fn.external_source(lambda i: fetch(indices(i)))

    pipeline = graph()
    while True:
        yield pipeline.run()


def measure_files(folder: str, rounds: int) -> list[dict[str, Any]]:
    """Return one point per way to read files: images per wall second and CPU ms per image in each turn."""
    sources = {name: (views_of_files, (folder, plain)) for name, plain in FILES.items()}
    turns = time_batches_in_turns(sources, 2 * DISCARDED, rounds, DISCARDED)
    before, now = ({"name": name, **rates(turns[name], 2 * DISCARDED * BATCH)} for name in sources)
    now["speed_to_before"] = harness.ratios(now["per_second"], before["per_second"])
    return [before, now]


def measure_reading(slow: str, fast: str, rounds: int) -> list[dict[str, Any]]:
    """Return one point per way to read 256 images: from a slow pack, from the page cache's, and from its files."""
    places = {"2 ms a read": slow, "warm": fast}
    ways = [*itertools.product(PACK, places), ("files", "warm")]
    sources = {(how, where): (encoded_images, (places[where], how)) for how, where in ways}
    turns = time_batches_in_turns(sources, 2 * DISCARDED, rounds, DISCARDED)
    points = []
    for (how, where), found in turns.items():
        point = {"name": f"{how}, {where}", **rates(found, 2 * DISCARDED * STEP)}
        point |= {
            key: [1e3 * getattr(turn, of) / (2 * DISCARDED) for turn in found]
            for key, of in (("step_ms", "wall"), ("thread_ms", "thread"))
        }
        if how == PACK[1]:
            before = points[len(points) - len(places)]["per_second"]
            point["speed_to_before"] = harness.ratios(point["per_second"], before)
        points.append(point)
    return points


def main(arguments: list[str] | None = None) -> int:
    """Print the tables and write the JSON."""
    options = harness.parser(__doc__, rounds=5, quick="two turns").parse_args(arguments)
    report = harness.Report("bench_feed", options.json)
    rounds = 2 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as scratch:
        slow, fast, small = (Path(scratch, name) for name in ("slow", "fast", "slow/small"))
        write_pictures(small, count=256, classes=1, side=48)
        write_pictures(fast / "pictures", count=8 if options.quick else 256, classes=1, side=375)
        write_pack(image_tree(fast / "pictures"), fast / "pack")
        for name in ("pictures", "pack"):
            # Another name of the same files: only those below `slow` are slow.
            shutil.copytree(fast / name, slow / name)
        # The processes start with these variables; what runs already is not slowed down.
        settings = {"SLOW_FOLDER": slow, "SLOW_OPEN_US": OPEN_US, "SLOW_PREAD_US": PREAD_US}
        with mock.patch.dict(os.environ, preloaded(Path(scratch), **settings)):
            files = measure_files(str(small), rounds)
            reading = measure_reading(str(slow), str(fast), rounds)
    slow_pack, warm_pack, warm_files = reading[2:]
    thread = harness.ratios(warm_pack["thread_ms"], warm_files["thread_ms"])
    notes = [
        harness.target("images/s of files, x mapped", files[1]["speed_to_before"], 5, at_least=True),
        harness.target("ms for 256 packed images, 2 ms a read", slow_pack["step_ms"], 80, at_least=False),
        harness.target("images/s of a warm pack, x before", warm_pack["speed_to_before"], 1, at_least=True),
        harness.target("the Python thread's time for a warm pack, x files", thread, 1, at_least=False),
    ]
    title = f"{OPEN_US / 1e3:g} ms to open a file, {THREADS} threads, batches of {BATCH}"
    tables = [
        harness.table(title, files, COLUMNS),
        harness.table("reading alone, 256 images a step", reading, COLUMNS),
    ]
    return report.finish(tables, notes=notes, points=[*files, *reading])


if __name__ == "__main__":
    harness.run(main)
