"""Time SimCLR's two views from JPEG files: the DALI loader against torchvision's DataLoader.

FOLDER is any tree of images; without one, pictures are generated first. All contenders have two threads or two worker
processes, read the same files, decode each once and return two float32 views of 224 pixels in batches of 16. A turn
starts with more batches than a contender can have prepared before it, which are not counted, and counts twice as many.

"view operator" is `pipelines.dali.view_operator`, with the same values. Blur is Gaussian, 23 pixels wide or as wide as
sigma needs (2 ceil(3 sigma) + 1). The peer is the fastest DataLoader with the same blur.
"""

import itertools
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler, default_collate

from pipelines.backend import LoaderOptions
from pipelines.dali.view_operator import use
from pipelines.datasets.folders import image_tree
from pipelines.loader import Loader
from pipelines.sampling.augmentation import Augmentation, blur_windows
from pipelines.sampling.samplers import UnlabeledSampler
from pipelines.sampling.step_plan import Plan
from tools.bench import harness
from tools.bench.harness import Call, Row, ratios, spread
from tools.bench.pictures import write_pictures

WORKERS, SIGMA = 2, (0.1, 2.0)
ROUNDS = 3
# More than a contender can prepare while others have their turns: a DataLoader two batches for each worker, DALI two.
DISCARDED = 2 * WORKERS + 2
DATA_LOADERS = {"tensors": "DataLoader, v2 on tensors", "PIL": "DataLoader, v2 on PIL"}
# The workers of the first are forked before the others have threads.
ENGINES = DATA_LOADERS | {"view_operator": "fastsuncet DALI, view operator", "dali": "fastsuncet DALI"}
# Of images a second over the peer's, by blur, on a CPU.
TARGETS = {"23": 4.0, "sigma": 2.5}


def data_loader(folder: str, views: Callable[[Image.Image], Any], batch: int) -> DataLoader:
    """Return torchvision's way to read a tree of images: batches of what `views` makes, without end."""
    index = image_tree(folder)
    paths = [index.path(i) for i in range(len(index))]

    def decoded(batch: list[Path]) -> Any:
        return default_collate([views(Image.open(path).convert("RGB")) for path in batch])

    # Epoch after epoch in new orders, so that workers start only once and no batch is ragged.
    order = RandomSampler(paths, num_samples=10**12)
    # Forked, so that `views` can be any function.
    workers = {"num_workers": WORKERS, "multiprocessing_context": "fork", "collate_fn": decoded}
    return DataLoader(paths, batch, sampler=order, **workers)


def two_views(kind: str, blur: str) -> Callable[[Image.Image], tuple[Any, Any]]:
    """Return two draws of the recipe's augmentation by torchvision's own transforms, on "tensors" (uint8) or "PIL".

    `blur`: "23", or "sigma" for a kernel as wide as its sigma needs, which v2 itself does not offer.
    """

    from torchvision.transforms import v2  # takes three seconds

    def sigma_blur(image: Any) -> Any:
        sigma = float(torch.empty(()).uniform_(*SIGMA))
        window = int(blur_windows(np.array(sigma)))
        return v2.functional.gaussian_blur(image, [window, window], [sigma, sigma])

    transform = v2.Compose(
        [
            *([v2.PILToTensor()] if kind == "tensors" else []),
            v2.RandomResizedCrop(224, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.RandomApply([v2.GaussianBlur(23, SIGMA) if blur == "23" else v2.Lambda(sigma_blur)], p=0.5),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    return lambda image: (transform(image), transform(image))


def batches(engine: str, blur: str, folder: str, batch: int) -> Iterator[Any]:
    """Return batches of two views without end."""
    if engine in DATA_LOADERS:
        return iter(data_loader(folder, two_views(engine, blur), batch))
    index = image_tree(folder)
    views = (Augmentation(blur_window=23 if blur == "23" else "auto"),) * 2
    plan = Plan(index, UnlabeledSampler(len(index), batch, 1, seed=0), views, seed=0, role="bench")
    options = LoaderOptions(backend="dali", view_operator=engine != "dali", threads=WORKERS)
    return map(Loader(plan, options), itertools.count())


def compare(calls: dict[tuple[str, str], Call], batch: int, rounds: int) -> None:
    """Time the contenders, by engine and blur, and print the table and the targets."""
    count = 2 * DISCARDED
    wall, cpu = harness.wall_and_cpu_in_turns(calls, count, rounds, DISCARDED)
    rows, reached = [], []
    for engine, blur in calls:
        way, images = (engine, blur), count * batch
        row: Row = {
            "": f"{ENGINES[engine]}, blur {blur}",
            "images/s": spread([images / each for each in wall[way]]),
        }
        row["CPU ms/image"] = spread(cpu[way], 1e3 / images)
        loaders = [(name, blur) for name in DATA_LOADERS if (name, blur) in calls]
        if loaders and engine not in DATA_LOADERS:
            peer = min(loaders, key=lambda each: median(wall[each]))
            speed = ratios(wall[peer], wall[way])
            row |= {"x peer, wall": spread(speed), "x peer, CPU": spread(ratios(cpu[peer], cpu[way]))}
            if engine == "view_operator":
                reached.append((f"images/s over {ENGINES[peer[0]]}, blur {blur}", speed, TARGETS[blur]))
        rows.append(row)
    harness.show(f"two views of 224 pixels, batches of {batch}, {WORKERS} threads or workers each", rows)
    for each in reached:
        harness.show_target(*each, at_least=True)


def measure(options: Namespace) -> int:
    """Time all engines with both blurs."""
    torch.set_num_threads(1)
    engines = [name for name in ENGINES if name in (options.engines or ENGINES)]
    blurs, batch, rounds = list(TARGETS), 16, options.rounds
    if options.quick:
        engines, blurs, batch, rounds = ["tensors", "view_operator"], ["23"], 1, 2
    if (reason := use.unavailable()) is not None and use.kept() is None:
        print(f"left out: the view operator, which cannot be built here: {reason}\n")
        engines = [engine for engine in engines if engine != "view_operator"]
    else:
        use.built()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or f"{scratch}/pictures")
        if options.folder is None:
            write_pictures(folder, count=8 if options.quick else 256, classes=1, side=375)
        print(f"{len(image_tree(folder))} files, in the page cache\n")
        sources = {way: batches(*way, str(folder), batch) for way in itertools.product(engines, blurs)}
        compare({way: partial(next, source) for way, source in sources.items()}, batch, rounds)
    return 0


def add_arguments(add: Callable) -> None:
    add("folder", nargs="?", help="a tree of images; without one, pictures are generated")
    add("--engines", nargs="+", choices=ENGINES, help="only these")
