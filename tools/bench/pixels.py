"""Time SimCLR's two views from JPEG files: the DALI loader against torchvision's DataLoader.

FOLDER is any tree of images; without one, pictures are generated first. All contenders have two threads or two worker
processes, read the same files, decode each once and return two float32 views of 224 pixels in batches of 16. Each runs
in its own process. A turn starts with more batches than a contender can have prepared before it, which are not counted,
and counts twice as many.

"view operator" is `pipelines.dali.view_operator`, with the same values. Blur is Gaussian, 23 pixels wide or as wide as
sigma needs (2 ceil(3 sigma) + 1).
"""

import itertools
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pipelines.backend import LoaderOptions
from pipelines.dali.view_operator import use
from pipelines.datasets.folders import image_tree
from pipelines.loader import Loader
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.samplers import UnlabeledSampler
from pipelines.sampling.step_plan import Plan
from tools.bench import harness
from tools.bench.data_loader import WORKERS, data_loader, two_views
from tools.bench.harness import ratios, target
from tools.bench.pictures import write_pictures
from tools.bench.processes import rates, time_batches_in_turns

BATCH = 16
# More than a contender can prepare while others have their turns: a DataLoader two batches for each worker, DALI two.
DISCARDED = 2 * WORKERS + 2
DATA_LOADERS = {"tensors": "DataLoader, v2 on tensors", "PIL": "DataLoader, v2 on PIL"}
ENGINES = {"dali": "fastsuncet DALI", "view_operator": "fastsuncet DALI, view operator"} | DATA_LOADERS
# Of images a second over the peer's, by blur, on a CPU.
TARGETS = {"23": 4.0, "sigma": 2.5}
COLUMNS = {
    "per_second": "images/s",
    "cpu_ms": "CPU ms/image",
    "speed_to_peer": "x peer, wall",
    "cpu_of_peer": "x peer, CPU",
}


def batches(engine: str, blur: str, folder: str, batch: int) -> Iterator[Any]:
    """Yield batches of two views without end."""
    if engine in DATA_LOADERS:
        yield from data_loader(folder, two_views(engine, blur), batch)
        return
    index = image_tree(folder)
    views = (Augmentation(blur_window=23 if blur == "23" else "auto"),) * 2
    plan = Plan(index, UnlabeledSampler(len(index), batch, 1, seed=0), views, seed=0, role="bench")
    options = LoaderOptions(backend="dali", view_operator=engine != "dali", threads=WORKERS)
    yield from map(Loader(plan, options), itertools.count())


def compare(engines: Sequence[str], blurs: Sequence[str], folder: str, batch: int, rounds: int) -> list[dict]:
    """Return one point per contender: images per wall second, CPU ms per image and memory in each turn.

    Speed and CPU time also relative to the peer: the fastest DataLoader with the same blur.
    """
    ways = list(itertools.product(engines, blurs))
    sources = {way: (batches, (*way, folder, batch)) for way in ways}
    turns = time_batches_in_turns(sources, 2 * DISCARDED, rounds, DISCARDED)
    points: list[dict[str, Any]] = [
        {"name": f"{ENGINES[engine]}, blur {blur}", "engine": engine, "blur": blur}
        | rates(turns[engine, blur], 2 * DISCARDED * batch)
        for engine, blur in ways
    ]
    for point in points:
        peers = [p for p in points if p["engine"] in DATA_LOADERS and p["blur"] == point["blur"]]
        if peers and point["engine"] not in DATA_LOADERS:
            peer = max(peers, key=lambda p: median(p["per_second"]))
            point["peer"] = peer["name"]
            point["speed_to_peer"] = ratios(point["per_second"], peer["per_second"])
            point["cpu_of_peer"] = ratios(peer["cpu_ms"], point["cpu_ms"])
    return points


def measure(options: Namespace, report: harness.Report) -> dict[str, Any]:
    """Time all engines with both blurs."""
    engines, blurs, batch, rounds = options.engines or list(ENGINES), list(TARGETS), BATCH, options.rounds
    if options.quick:
        engines, blurs, batch, rounds = ["view_operator", "tensors"], ["23"], 2, 2
    notes = ["x peer: against the fastest DataLoader with the same blur", "Files were in the page cache."]
    if (reason := use.unavailable()) is not None and use.kept() is None:
        notes.append(f"left out: the view operator, which cannot be built here: {reason}")
        engines = [engine for engine in engines if engine != "view_operator"]
    else:
        use.built()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or f"{scratch}/pictures")
        if options.folder is None:
            write_pictures(folder, count=8 if options.quick else 256, classes=1, side=375)
        files = len(image_tree(folder))
        points = compare(engines, blurs, str(folder), batch, rounds)
    for p in points:
        if p["engine"] == "view_operator" and "peer" in p:
            what = f"{p['name']}: images/s over {p['peer']}"
            notes.append(target(what, p["speed_to_peer"], TARGETS[p["blur"]], at_least=True))
    where = f"{files} files, batches of {batch}, {WORKERS} threads or workers each"
    tables = [harness.table(f"two views of 224 pixels, {where}", points, harness.spread_columns(COLUMNS))]
    return {"tables": tables, "notes": notes, "points": points}


def add_arguments(add: Callable) -> None:
    add("folder", nargs="?", help="a tree of images; without one, pictures are generated")
    add("--engines", nargs="+", choices=ENGINES, help="only these")


CASE = harness.Case(measure, rounds=3, quick="two contenders, 8 pictures", add_arguments=add_arguments)
