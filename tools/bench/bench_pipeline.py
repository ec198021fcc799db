"""Time SimCLR's two views from JPEG files: the DALI loader against torchvision's DataLoader.

    python tools/bench/bench_pipeline.py [FOLDER] [--pack] [--engines E ...] [--images N] [--rounds R] [--quick]

FOLDER is any tree of images; without one, pictures are generated first. All contenders have two threads or two worker
processes, read the same files, decode each once and return two float32 views of 224 pixels in batches of 16. Each runs
in its own process; they take turns, and only the one whose turn it is works. A turn starts with more batches than a
contender can have prepared before it, which are not counted.

"own operator" is `pipelines.dali.plugin`, with the same values. Blur is Gaussian, 23 pixels wide or as wide as
sigma needs (2 ceil(3 sigma) + 1); "box" is PIL's approximation, which the authors used. "only" are parts of the work,
each with the one above it: what the processor's time of an image is spent on.

The same files are also read from a pack (`fastsuncet data pack`). Both are in the page cache by then: this shows what a
pack costs or saves the processor, and says nothing about a disk or a file server.
"""

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from pipelines.dali.plugin import use
from pipelines.datasets.folders import image_tree
from pipelines.datasets.pack import open_pack, write_pack
from pipelines.loader import open_loader
from pipelines.sampling.augmentation import Augmentation, blur_windows
from pipelines.sampling.samplers import UnlabeledSampler
from pipelines.sampling.step_plan import Plan
from tools.bench import harness
from tools.bench.harness import format_spread, ratios, spread, target
from tools.bench.processes import time_batches_in_turns

WORKERS, SIGMA, BATCH = 2, (0.1, 2.0), 16
# More than a contender can prepare while others have their turns: a DataLoader two batches for each worker, DALI two.
DISCARDED = 2 * WORKERS + 2
# What makes the views, or a part of the work alone, and how the table calls it.
ENGINES = {
    "dali": "fastsuncet DALI",
    "plugin": "fastsuncet DALI, own operator",
    "pack": "fastsuncet DALI from a pack",
    "tensors": "DataLoader, v2 on tensors",
    "PIL": "DataLoader, v2 on PIL",
    "decode": "only DALI's decoding",
    "crops": "only that, two crops and their normalization",
    "colors": "only that, and color",
    "read files": "reading alone, files",
    "read pack": "reading alone, pack",
}
DATA_LOADERS = ("tensors", "PIL")


@dataclass(frozen=True)
class Contender:
    """What makes the two views, and how."""

    engine: str  # a key of ENGINES
    blur: str = ""  # "23", "sigma" or "box"

    @property
    def name(self) -> str:
        """Return the name in the table."""
        return ENGINES[self.engine] + (f", blur {self.blur}" if self.blur else "")


CONTENDERS = (
    *(Contender(engine, blur) for engine in ("dali", "plugin", *DATA_LOADERS) for blur in ("23", "sigma")),
    Contender("PIL", "box"),
    *map(Contender, ("decode", "crops", "colors", "read files", "read pack")),
)
PACKED = (Contender("plugin", "sigma"), Contender("pack", "sigma"), *CONTENDERS[-2:])
QUICK = (Contender("plugin", "23"), Contender("tensors", "23"), *CONTENDERS[-5:])
# Of an augmentation, what the parts of the work leave out.
LEFT_OUT = {"crops": {"jitter": 0, "grey": 0, "flip": 0, "blur": 0}, "colors": {"blur": 0}}


class SigmaBlur(nn.Module):
    """torchvision's Gaussian blur with a kernel as wide as its sigma needs, which v2 itself does not offer."""

    def forward(self, image: Any) -> Any:
        sigma = float(torch.empty(()).uniform_(*SIGMA))
        window = int(blur_windows(np.array(sigma)))
        return v2.functional.gaussian_blur(image, [window, window], [sigma, sigma])


class BoxBlur(nn.Module):
    """PIL's GaussianBlur, an approximation by boxes."""

    def forward(self, image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(float(torch.empty(()).uniform_(*SIGMA))))


def stock_transform(kind: str, blur: str, size: int = 224) -> v2.Compose:
    """Return the recipe's augmentation by torchvision's own transforms, for uint8 tensors or PIL images."""
    blurs = {"23": lambda: v2.GaussianBlur(23, SIGMA), "sigma": SigmaBlur, "box": BoxBlur}
    return v2.Compose(
        [
            v2.RandomResizedCrop(size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.RandomApply([blurs[blur]()], p=0.5),
            *([v2.ToImage()] if kind == "PIL" else []),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )


class TwoViews(Dataset):
    """A file -> two draws of one transform; the file is decoded once."""

    def __init__(self, paths: list[Path], kind: str, blur: str):
        self.paths, self.kind, self.transform = paths, kind, stock_transform(kind, blur)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        image: Any = Image.open(self.paths[i]).convert("RGB")
        if self.kind == "tensors":
            image = v2.functional.pil_to_tensor(image)
        return self.transform(image), self.transform(image)


class Endless(Sampler):
    """Epoch after epoch in new orders, so that workers start only once and no batch is ragged."""

    def __init__(self, count: int):
        self.count = count

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self.count).tolist()


def batches(contender: Contender, folder: str, pack: str, batch: int) -> Iterator[Any]:
    """Yield batches of two views without end; `pack` holds the images of `folder`."""
    engine, window = contender.engine, 23 if contender.blur == "23" else "auto"
    index = open_pack(pack) if engine in ("pack", "read pack") else image_tree(folder)
    if engine in DATA_LOADERS:
        data = TwoViews([index.path(i) for i in range(len(index))], engine, contender.blur)
        order = Endless(len(data))
        yield from DataLoader(data, batch, sampler=order, num_workers=WORKERS, multiprocessing_context="fork")
        return
    views = (Augmentation(blur_window=window, **LEFT_OUT.get(engine, {})),) * 2
    plan = Plan(index, UnlabeledSampler(len(index), batch, 1, seed=0), views, seed=0, role="bench")
    if engine in ("decode", "read files", "read pack"):
        yield from part_of_the_work(plan, engine)
        return
    operator = "graph" if engine == "dali" else "plugin"
    loader = open_loader(index, plan, backend="dali", color_operator=operator, threads=WORKERS)
    yield from map(loader, itertools.count())


def part_of_the_work(plan: Plan, engine: str) -> Iterator[Any]:
    """Yield the plan's images decoded and nothing else, or only their bytes in DALI's memory."""
    from nvidia.dali import fn, pipeline_def

    from pipelines.dali import graphs
    from pipelines.dali.engine import FilePaths, PackedBytes, placement

    pack, steps = plan.index.pack, itertools.count()
    stored = FilePaths(plan.index) if pack is None else PackedBytes(pack)
    pace = {"batch_size": plan.batch, "num_threads": WORKERS, "prefetch_queue_depth": 2}

    def rows() -> Any:
        return stored(plan.sampler.rows(next(steps), 0))

    @pipeline_def(exec_dynamic=True)
    def encoded() -> Any:
        # DALI copies what a source returns, so both cost one copy.
        source = fn.external_source(rows)
        return fn.io.file.read(source) if pack is None else source

    if engine == "decode":
        pipeline = graphs.decoded(rows, stored=stored.stored, **pace, **placement("cpu", 0))
    else:
        pipeline = encoded(**pace, device_id=None)
    while True:
        yield pipeline.run()


def measure(
    contenders: Sequence[Contender], folder: str, pack: str, batch: int, images: int, rounds: int
) -> list[dict[str, Any]]:
    """Return one point per contender: images per wall second and CPU ms per image in each turn of `images`, or more."""
    sources = {contender: (batches, (contender, folder, pack, batch)) for contender in contenders}
    count = max(images // batch, 2 * DISCARDED)
    turns = time_batches_in_turns(sources, count, rounds, DISCARDED)
    images = count * batch
    return [
        {
            "name": contender.name,
            **vars(contender),
            "images_per_second": [images / turn.wall for turn in turns[contender]],
            "cpu_ms_per_image": [1e3 * turn.cpu / images for turn in turns[contender]],
        }
        for contender in contenders
    ]


def add_comparisons(points: list[dict[str, Any]]) -> None:
    """Add each point's speed and CPU time relative to its peer.

    The peer is the fastest DataLoader with the same blur; for a pack, the same work on files.
    """
    from_files = {"pack": "plugin", "read pack": "read files"}
    for point in points:
        engine, same = point["engine"], [p for p in points if p["blur"] == point["blur"]]
        peers = [p for p in same if p["engine"] in DATA_LOADERS]
        if engine in from_files:
            peers = [p for p in same if p["engine"] == from_files[engine]]
        if not peers or engine in DATA_LOADERS:
            continue
        peer = max(peers, key=lambda p: spread(p["images_per_second"])["median"])
        point["peer"] = peer["name"]
        point["speed_to_peer"] = ratios(point["images_per_second"], peer["images_per_second"])
        point["cpu_of_peer"] = ratios(peer["cpu_ms_per_image"], point["cpu_ms_per_image"])


def write_pictures(folder: Path, count: int, height: int = 375, width: int = 500) -> None:
    """Write JPEGs with roughly the detail of photographs: waves of many lengths, and noise."""
    y, x = np.mgrid[0:height, 0:width] / 100
    for number in range(count):
        rng = np.random.default_rng(number)
        pixels = np.full((height, width, 3), 128.0)
        for octave in range(8):
            fy, fx, phase = rng.normal(0, 2**octave, 3)
            pixels += np.sin(fy * y + fx * x + phase)[:, :, None] * rng.uniform(-50, 50, 3) / 1.3**octave
        pixels += rng.normal(0, 6, pixels.shape)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number:04}.jpg", quality=90)


COLUMNS: list[tuple[str, str, Callable[[Any], str]]] = [
    ("", "name", str),
    ("images/s", "images_per_second", harness.scaled(1)),
    ("CPU ms/image", "cpu_ms_per_image", harness.scaled(1)),
    ("x peer, wall", "speed_to_peer", format_spread),
    ("x peer, CPU", "cpu_of_peer", format_spread),
]


def main(arguments: list[str] | None = None) -> int:
    """Print the table and write the JSON."""
    parser = harness.parser(__doc__, rounds=3, quick="seven contenders, 8 pictures", devices=())
    parser.add_argument("folder", nargs="?", help="a tree of images (default: 256 generated pictures)")
    fewest, what = 2 * DISCARDED * BATCH, "images in a turn, at least and by default %(default)s"
    parser.add_argument("--images", type=int, default=fewest, help=what)
    parser.add_argument("--pack", action="store_true", help="only what is read from files and from a pack")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, metavar="ENGINE", help="only those of these names"
    )
    options = parser.parse_args(arguments)
    batch, rounds = BATCH, options.rounds
    contenders: Sequence[Contender] = PACKED if options.pack else CONTENDERS
    if options.quick:
        batch, rounds, contenders = 2, 2, QUICK
    if options.engines:
        contenders = [contender for contender in contenders if contender.engine in options.engines]
    notes = [
        "x peer: against the fastest DataLoader with the same blur; for a pack, against files",
        "Files and pack were in the page cache: a cold disk is not measured.",
    ]
    if (reason := use.unavailable()) is not None and use.kept() is None:
        notes.append(f"left out: our own operator, which cannot be built here: {reason}")
        contenders = [c for c in contenders if c.engine not in ("plugin", "pack", *LEFT_OUT)]
    else:
        use.built()
    report = harness.Report("bench_pipeline", options.json, made_up=options.folder is None)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or f"{scratch}/pictures")
        if options.folder is None:
            folder.mkdir()
            write_pictures(folder, 8 if options.quick else 256)
        index, pack = image_tree(folder), f"{scratch}/shards"
        write_pack(index, Path(pack))
        points = measure(contenders, str(folder), pack, batch, options.images * batch // BATCH, rounds)
    add_comparisons(points)
    # The targets on a CPU, for both blur kernels.
    targets = [
        target(
            f"{p['name']}: images/s over {p['peer']}",
            p["speed_to_peer"],
            {"23": 4.0, "sigma": 2.5}[p["blur"]],
            at_least=True,
        )
        for p in points
        if p["engine"] == "plugin" and "peer" in p
    ]
    title = (
        f"two views of 224 pixels, {len(index)} files, batches of {batch}, {WORKERS} threads or workers each"
    )
    table = harness.table(title, points, COLUMNS)
    return report.finish([table], notes=notes, targets=targets, points=points, files=len(index))


if __name__ == "__main__":
    harness.run(main)
