"""Time SimCLR's two views from JPEG files: the DALI loader against torchvision's DataLoader.

    python tools/bench/bench_pipeline.py [FOLDER] [--engines E ...] [--rounds R] [--json FILE] [--quick]

FOLDER is any tree of images; without one, pictures are generated first. All contenders have two threads or two worker
processes, read the same files, decode each once and return two float32 views of 224 pixels in batches of 16. Each runs
in its own process; they take turns, and only the one whose turn it is works. A turn starts with more batches than a
contender can have prepared before it, which are not counted, and counts twice as many.

"view operator" is `pipelines.dali.view_operator`, with the same values. Blur is Gaussian, 23 pixels wide or as wide as
sigma needs (2 ceil(3 sigma) + 1); "box" is PIL's approximation, which the authors used. "only" are parts of the work,
each with the one above it: what the processor's time of an image is spent on.
"""

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from pipelines.backend import LoaderOptions
from pipelines.dali.view_operator import use
from pipelines.datasets.folders import image_tree
from pipelines.loader import Loader
from pipelines.sampling.augmentation import Augmentation, blur_windows
from pipelines.sampling.samplers import UnlabeledSampler
from pipelines.sampling.step_plan import Plan
from tools.bench import harness
from tools.bench.harness import ratios, spread, target
from tools.bench.pictures import write_pictures
from tools.bench.processes import rates, time_batches_in_turns

WORKERS, SIGMA, BATCH = 2, (0.1, 2.0), 16
# More than a contender can prepare while others have their turns: a DataLoader two batches for each worker, DALI two.
DISCARDED = 2 * WORKERS + 2
# Name in the table -> what makes the views, or a part of the work alone; and the blur.
CONTENDERS = {
    "fastsuncet DALI, blur 23": ("dali", "23"),
    "fastsuncet DALI, blur sigma": ("dali", "sigma"),
    "fastsuncet DALI, view operator, blur 23": ("view_operator", "23"),
    "fastsuncet DALI, view operator, blur sigma": ("view_operator", "sigma"),
    "DataLoader, v2 on tensors, blur 23": ("tensors", "23"),
    "DataLoader, v2 on tensors, blur sigma": ("tensors", "sigma"),
    "DataLoader, v2 on PIL, blur 23": ("PIL", "23"),
    "DataLoader, v2 on PIL, blur sigma": ("PIL", "sigma"),
    "DataLoader, v2 on PIL, blur box": ("PIL", "box"),
    "only DALI's decoding": ("decode", ""),
    "only that, two crops and their normalization": ("crops", ""),
    "only that, and color": ("colors", ""),
}
ENGINES = tuple(dict.fromkeys(engine for engine, _ in CONTENDERS.values()))
DATA_LOADERS = ("tensors", "PIL")
# Of an augmentation, what the parts of the work leave out.
LEFT_OUT = {"crops": {"jitter": 0, "gray": 0, "flip": 0, "blur": 0}, "colors": {"blur": 0}}


def sigma_blur(image: Any) -> Any:
    """Blur by torchvision's Gaussian with a kernel as wide as its sigma needs, which v2 itself does not offer."""
    sigma = float(torch.empty(()).uniform_(*SIGMA))
    window = int(blur_windows(np.array(sigma)))
    return v2.functional.gaussian_blur(image, [window, window], [sigma, sigma])


def box_blur(image: Image.Image) -> Image.Image:
    """Blur by PIL's GaussianBlur, an approximation by boxes."""
    return image.filter(ImageFilter.GaussianBlur(float(torch.empty(()).uniform_(*SIGMA))))


def stock_transform(kind: str, blur: str, size: int = 224) -> v2.Compose:
    """Return the recipe's augmentation by torchvision's own transforms, for uint8 tensors or PIL images."""
    blurs = {"23": v2.GaussianBlur(23, SIGMA), "sigma": v2.Lambda(sigma_blur), "box": v2.Lambda(box_blur)}
    return v2.Compose(
        [
            v2.RandomResizedCrop(size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.RandomApply([blurs[blur]], p=0.5),
            *([v2.ToImage()] if kind == "PIL" else []),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )


class Files(Dataset):
    """A file -> what `views` makes of it; the file is decoded once."""

    def __init__(self, paths: list[Path], views: Callable[[Image.Image], Any]):
        self.paths, self.views = paths, views

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        return self.views(Image.open(self.paths[i]).convert("RGB"))


def data_loader(folder: str, views: Callable[[Image.Image], Any], batch: int) -> DataLoader:
    """Return torchvision's way to read a tree of images: batches of what `views` makes, without end."""
    index = image_tree(folder)
    data = Files([index.path(i) for i in range(len(index))], views)
    # Epoch after epoch in new orders, so that workers start only once and no batch is ragged.
    order = RandomSampler(data, num_samples=10**12)
    # Forked, so that `views` can be any function.
    return DataLoader(data, batch, sampler=order, num_workers=WORKERS, multiprocessing_context="fork")


def two_views(kind: str, blur: str) -> Callable[[Image.Image], tuple[torch.Tensor, torch.Tensor]]:
    """Return two draws of `stock_transform(kind, blur)` from an image."""
    transform = stock_transform(kind, blur)

    def views(image: Any) -> tuple[torch.Tensor, torch.Tensor]:
        decoded = v2.functional.pil_to_tensor(image) if kind == "tensors" else image
        return transform(decoded), transform(decoded)

    return views


def batches(engine: str, blur: str, folder: str, batch: int) -> Iterator[Any]:
    """Yield batches of two views without end."""
    if engine in DATA_LOADERS:
        yield from data_loader(folder, two_views(engine, blur), batch)
        return
    index = image_tree(folder)
    window = 23 if blur == "23" else "auto"
    views = (Augmentation(blur_window=window, **LEFT_OUT.get(engine, {})),) * 2
    plan = Plan(index, UnlabeledSampler(len(index), batch, 1, seed=0), views, seed=0, role="bench")
    if engine == "decode":
        yield from decoded_images(plan)
        return
    options = LoaderOptions(backend="dali", view_operator=engine != "dali", threads=WORKERS)
    yield from map(Loader(plan, options), itertools.count())


def decoded_images(plan: Plan) -> Iterator[Any]:
    """Yield the plan's images decoded and nothing else."""
    from pipelines.dali import graphs
    from pipelines.dali.engine import FilePaths, placement

    paths, steps = FilePaths(plan.index), itertools.count()
    pipeline = graphs.decoded(
        lambda: paths(plan.sampler.rows(next(steps), 0)),
        stored="files",
        batch_size=plan.batch,
        num_threads=WORKERS,
        prefetch_queue_depth=2,
        **placement("cpu", 0),
    )
    while True:
        yield pipeline.run()


def measure(
    contenders: Mapping[str, tuple[str, str]], folder: str, batch: int, rounds: int
) -> list[dict[str, Any]]:
    """Return one point per contender: images per wall second, CPU ms per image and memory in each turn.

    Speed and CPU time also relative to the peer: the fastest DataLoader with the same blur.
    """
    sources = {name: (batches, (*what, folder, batch)) for name, what in contenders.items()}
    count = 2 * DISCARDED
    turns = time_batches_in_turns(sources, count, rounds, DISCARDED)
    points: list[dict[str, Any]] = [
        {"name": name, "engine": engine, "blur": blur, **rates(turns[name], count * batch)}
        for name, (engine, blur) in contenders.items()
    ]
    for point in points:
        peers = [p for p in points if p["engine"] in DATA_LOADERS and p["blur"] == point["blur"]]
        if peers and point["engine"] not in DATA_LOADERS:
            peer = max(peers, key=lambda p: median(p["per_second"]))
            point["peer"] = peer["name"]
            point["speed_to_peer"] = ratios(point["per_second"], peer["per_second"])
            point["cpu_of_peer"] = ratios(peer["cpu_ms"], point["cpu_ms"])
    return points


COLUMNS: list[harness.Column] = [
    ("", "name", str),
    ("images/s", "per_second", spread),
    ("CPU ms/image", "cpu_ms", spread),
    ("x peer, wall", "speed_to_peer", spread),
    ("x peer, CPU", "cpu_of_peer", spread),
]


def main(arguments: list[str] | None = None) -> int:
    """Print the table and write the JSON."""
    parser = harness.parser(__doc__, rounds=3, quick="five contenders, 8 pictures")
    parser.add_argument("folder", nargs="?", help="a tree of images (default: generated pictures)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="only contenders of these names")
    options = parser.parse_args(arguments)
    engines, batch, rounds = options.engines or ENGINES, BATCH, options.rounds
    if options.quick:
        engines, batch, rounds = [e for e in engines if e not in ("dali", "PIL")], 2, 2
    notes = [
        "x peer: against the fastest DataLoader with the same blur",
        "Files were in the page cache: a cold disk is not measured.",
    ]
    if (reason := use.unavailable()) is not None and use.kept() is None:
        notes.append(f"left out: the view operator, which cannot be built here: {reason}")
        engines = [engine for engine in engines if engine not in ("view_operator", *LEFT_OUT)]
    else:
        use.built()
    contenders = {
        name: (engine, blur)
        for name, (engine, blur) in CONTENDERS.items()
        if engine in engines and not (options.quick and blur == "sigma")
    }
    report = harness.Report("bench_pipeline", options.json)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or f"{scratch}/pictures")
        if options.folder is None:
            write_pictures(folder, count=8 if options.quick else 256, classes=1, side=375)
        index = image_tree(folder)
        points = measure(contenders, str(folder), batch, rounds)
    # The targets on a CPU, for both blur kernels.
    limits = {"23": 4.0, "sigma": 2.5}
    notes += [
        target(
            f"{p['name']}: images/s over {p['peer']}", p["speed_to_peer"], limits[p["blur"]], at_least=True
        )
        for p in points
        if p["engine"] == "view_operator" and "peer" in p
    ]
    where = f"{len(index)} files, batches of {batch}, {WORKERS} threads or workers each"
    table = harness.table(f"two views of 224 pixels, {where}", points, COLUMNS)
    return report.finish([table], notes=notes, points=points)


if __name__ == "__main__":
    harness.run(main)
