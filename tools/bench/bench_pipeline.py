"""SimCLR's two views from JPEG files: the DALI loader and its torchvision twin against torchvision's DataLoader.

    python tools/bench/bench_pipeline.py [FOLDER] [--json FILE] [--rounds R] [--images N] [--pack] [--quick]

FOLDER is any tree of images; without one, pictures are made up and written first. Everyone gets two threads or
two worker processes, reads the same files, decodes each once and gives two float32 views of 224 pixels in batches
of 32. Each contender lives in a process of its own; they take turns, and only the one whose turn it is works.

Colour, in the table: "exact" is torchvision's jitter (contrast about the image's mean grey, hue in HSV) in the
fixed order brightness, contrast, saturation, hue; "fast" is one linear twist in YIQ, another augmentation of about
the same strength; "stock" is torchvision's jitter in torchvision's random order. "own operator": exact colour by
`pipelines.dali.plugin`, the same pixels; it must have been built. Blur: Gaussian, 23 pixels wide,
or as wide as sigma asks for (2 ceil(3 sigma) + 1); "box" is PIL's approximation, which the authors used.

The same files are also read out of a pack (`fastsuncet data pack`). Both are in the page cache by then: this
tells what a pack costs or saves the processor, and nothing of a disk or a file server.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, `tools` is not importable yet

from pipelines.dali.plugin.build import kept
from pipelines.datasets.folders import image_tree
from pipelines.datasets.pack import open_pack, write_pack
from pipelines.loader import open_loader
from pipelines.sampling.augmentation import Augmentation, blur_windows
from pipelines.sampling.samplers import UnlabeledSampler
from pipelines.sampling.step_plan import Plan
from tools.bench.common import (
    end,
    environment,
    print_table,
    print_targets,
    ratios,
    spread,
    target,
    told,
    write_json,
)
from tools.bench.turns import in_turns

WORKERS, SIGMA = 2, (0.1, 2.0)
FILES, PACK = "read files", "read pack"


@dataclass(frozen=True)
class Contender:
    """Who makes the two views, and how."""

    # "dali", from files or from a "pack"; "plugin", with our own operator for colour; "twin"; "decode", "read files",
    # "read pack": a part of the work alone; or for the DataLoader what its transforms work on: "tensors", "PIL".
    engine: str
    color: str
    blur: str  # "23", "sigma" or "box"

    @property
    def name(self) -> str:
        """What the table calls it."""
        alone = {
            "decode": "limit: DALI, decoding alone",
            FILES: "reading alone, files",
            PACK: "reading alone, pack",
        }
        if self.engine in alone:
            return alone[self.engine]
        who = {
            "dali": "fastsuncet DALI",
            "plugin": "fastsuncet DALI, own operator",
            "pack": "fastsuncet DALI from a pack",
            "twin": "fastsuncet torchvision twin",
        }
        return f"{who.get(self.engine, f'DataLoader, v2 on {self.engine}')}, {self.color}, blur {self.blur}"

    @property
    def ours(self) -> bool:
        return self.engine in ("dali", "plugin", "pack", "twin")


CONTENDERS = (
    Contender("dali", "exact", "23"),
    Contender("dali", "exact", "sigma"),
    Contender("plugin", "exact", "23"),
    Contender("plugin", "exact", "sigma"),
    Contender("dali", "fast", "23"),
    Contender("dali", "fast", "sigma"),
    Contender("pack", "fast", "sigma"),
    Contender("twin", "exact", "23"),
    Contender("twin", "exact", "sigma"),
    Contender("tensors", "stock", "23"),
    Contender("PIL", "stock", "23"),
    Contender("tensors", "stock", "sigma"),
    Contender("PIL", "stock", "sigma"),
    Contender("PIL", "stock", "box"),
    Contender("decode", "-", "-"),
    Contender(FILES, "-", "-"),
    Contender(PACK, "-", "-"),
)
PACKED = (Contender("dali", "fast", "sigma"), *(c for c in CONTENDERS if c.engine in ("pack", FILES, PACK)))
QUICK = (Contender("dali", "fast", "23"), Contender("tensors", "stock", "23"), *CONTENDERS[-2:])


class SigmaBlur(nn.Module):
    """torchvision's Gaussian blur with a kernel as wide as its sigma asks for, which v2 itself does not offer."""

    def forward(self, image: Any) -> Any:
        sigma = float(torch.empty(()).uniform_(*SIGMA))
        window = int(blur_windows(np.array(sigma)))
        return v2.functional.gaussian_blur(image, [window, window], [sigma, sigma])


class BoxBlur(nn.Module):
    """PIL's GaussianBlur, an approximation by boxes."""

    def forward(self, image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(float(torch.empty(()).uniform_(*SIGMA))))


def stock_transform(kind: str, blur: str, size: int = 224) -> v2.Compose:
    """The recipe's augmentation in torchvision's own words, on uint8 tensors or on PIL images."""
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
    """A file -> two draws of one transform, the file decoded once."""

    def __init__(self, paths: list[Path], kind: str, blur: str):
        self.paths, self.kind, self.transform = paths, kind, stock_transform(kind, blur)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = Image.open(self.paths[i]).convert("RGB")
        if self.kind == "tensors":
            image = v2.functional.pil_to_tensor(image)
        return self.transform(image), self.transform(image)


class Endless(Sampler):
    """Epoch after epoch in fresh orders, so that workers never start anew."""

    def __init__(self, count: int):
        self.count = count

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self.count).tolist()


@dataclass(frozen=True)
class Stored:
    """The same images twice: a tree of files, and those packed."""

    folder: str
    pack: str


def batches(contender: Contender, stored: Stored, batch: int) -> Iterator[Any]:
    """Batch after batch of two views, without end."""
    index = open_pack(stored.pack) if contender.engine in ("pack", PACK) else image_tree(stored.folder)
    if contender.engine in ("tensors", "PIL"):
        paths = [index.path(i) for i in range(len(index))]
        data = TwoViews(paths, contender.engine, contender.blur)
        # drop_last in spirit: an endless sampler leaves no ragged batch.
        yield from DataLoader(
            data, batch, sampler=Endless(len(data)), num_workers=WORKERS, multiprocessing_context="fork"
        )
        return
    window = 23 if contender.blur == "23" else "auto"
    color = contender.color if contender.ours else "exact"
    views = (Augmentation(color=color, blur_window=window),) * 2
    plan = Plan(index, UnlabeledSampler(len(index), batch, 1, seed=0), views, seed=0, role="bench")
    if contender.engine == "decode":
        yield from decoded(plan)
        return
    if contender.engine in (FILES, PACK):
        yield from read(plan)
        return
    backend = "torchvision" if contender.engine == "twin" else "dali"
    operator = "plugin" if contender.engine == "plugin" else "graph"
    pace = {"threads": WORKERS, "prefetch": 2}
    loader = open_loader(index, plan, backend=backend, color_operator=operator, **pace)
    for step in itertools.count():
        yield loader(step)


def decoded(plan: Plan) -> Iterator[Any]:
    """The same files decoded and nothing done with them."""
    from pipelines.dali import graphs
    from pipelines.dali.engine import FilePaths, placement

    stored, steps = FilePaths(plan.index), itertools.count()
    pipeline = graphs.decoded(
        lambda: stored(plan.sampler.rows(next(steps), 0)),
        stored=stored.stored,
        batch_size=plan.batch,
        num_threads=WORKERS,
        prefetch_queue_depth=2,
        **placement("cpu", 0),
    )
    while True:
        yield pipeline.run()


def read(plan: Plan) -> Iterator[Any]:
    """The same files as bytes in DALI's memory, not decoded."""
    from nvidia.dali import fn, pipeline_def

    from pipelines.dali.engine import FilePaths, PackedBytes

    packed, steps = plan.index.pack is not None, itertools.count()
    stored = PackedBytes(plan.index.pack) if packed else FilePaths(plan.index)

    @pipeline_def(exec_dynamic=True)
    def encoded() -> Any:
        given = fn.external_source(lambda: stored(plan.sampler.rows(next(steps), 0)))
        return given if packed else fn.io.file.read(given)  # DALI copies what it is given: one copy each

    pipeline = encoded(batch_size=plan.batch, num_threads=WORKERS, prefetch_queue_depth=2, device_id=None)
    while True:
        yield pipeline.run()


def measure(
    contenders: tuple[Contender, ...], stored: Stored, batch: int, count: int, rounds: int
) -> list[dict[str, Any]]:
    """One row a contender: seconds of each turn over `count` batches, by the wall and by the CPU."""
    sources = {contender: (batches, (contender, stored, batch)) for contender in contenders}
    turns = in_turns(sources, count, rounds)
    images = count * batch
    return [
        {
            "name": contender.name,
            "engine": contender.engine,
            "color": contender.color,
            "blur": contender.blur,
            "images_per_second": [images / wall for wall, _ in turns[contender]],
            "cpu_ms_per_image": [1e3 * cpu / images for _, cpu in turns[contender]],
        }
        for contender in contenders
    ]


def peers(found: list[dict[str, Any]], blur: str) -> list[dict[str, Any]]:
    """The DataLoaders with one kind of blur, the fastest first."""
    rows = [row for row in found if row["engine"] in ("tensors", "PIL") and row["blur"] == blur]
    return sorted(rows, key=lambda row: -spread(row["images_per_second"])["median"])


def compare(found: list[dict[str, Any]]) -> None:
    """Adds to each row of ours how it stands to the fastest DataLoader with the same blur kernel; a pack, to files."""
    for row in found:
        same_blur = peers(found, row["blur"])
        if row["engine"] in ("dali", "plugin", "twin") and same_blur:
            row["peer"] = same_blur[0]["name"]
            row["speed_to_peer"] = ratios(row["images_per_second"], same_blur[0]["images_per_second"])
            row["cpu_of_peer"] = ratios(same_blur[0]["cpu_ms_per_image"], row["cpu_ms_per_image"])
    for one, other in ((PACK, FILES), ("pack", "dali")):
        for row in found:
            same = [
                x for x in found if (x["engine"], x["color"], x["blur"]) == (other, row["color"], row["blur"])
            ]
            if row["engine"] == one and same:
                row["peer"] = same[0]["name"]
                row["speed_to_peer"] = ratios(row["images_per_second"], same[0]["images_per_second"])
                row["cpu_of_peer"] = ratios(same[0]["cpu_ms_per_image"], row["cpu_ms_per_image"])


def targets_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked of the DALI loader on a CPU, for both blur kernels."""
    asked = []
    for row in found:
        if row["engine"] in ("dali", "plugin") and "peer" in row:
            limit = 1.5 if row["color"] == "fast" else 1.0
            asked.append(
                target(
                    f"{row['name']}: images/s over {row['peer']}", row["speed_to_peer"], limit, at_least=True
                )
            )
    return asked


def show(found: list[dict[str, Any]]) -> None:
    """The table."""
    head = ["", "images/s", "CPU ms/image", "x peer, wall", "x peer, CPU"]
    print_table(
        head,
        [
            [
                row["name"],
                told(spread(row["images_per_second"])),
                told(spread(row["cpu_ms_per_image"])),
                told(row["speed_to_peer"]) if "peer" in row else "",
                told(row["cpu_of_peer"]) if "peer" in row else "",
            ]
            for row in found
        ],
    )
    print("x peer: against the fastest DataLoader with the same blur kernel; a pack's against the files")
    print("files and pack were in the page cache: a cold disk is not measured\n")


def write_pictures(folder: Path, count: int, height: int = 375, width: int = 500) -> None:
    """JPEGs with the detail of photographs, roughly: waves of many lengths, and noise. Sizes of ImageNet's median."""
    y, x = np.mgrid[0:height, 0:width] / 100
    for number in range(count):
        rng = np.random.default_rng(number)
        pixels = np.full((height, width, 3), 128.0)
        for octave in range(8):
            fy, fx, phase = rng.normal(0, 2**octave, 3)
            pixels += np.sin(fy * y + fx * x + phase)[:, :, None] * rng.uniform(-50, 50, 3) / 1.3**octave
        pixels += rng.normal(0, 6, pixels.shape)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number:04}.jpg", quality=90)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table and writes the JSON. A missed target is a finding, not a failure: 0 either way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", nargs="?", help="a tree of images (default: 256 pictures made up for the run)"
    )
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--images", type=int, default=384, help="images in a turn")
    parser.add_argument(
        "--quick", action="store_true", help="two contenders, 8 pictures: for a look and for the tests"
    )
    parser.add_argument("--pack", action="store_true", help="only what is read from files and from a pack")
    options = parser.parse_args(arguments)
    batch, count, rounds, contenders = 32, max(1, options.images // 32), options.rounds, CONTENDERS
    if options.pack:
        contenders = tuple(c for c in CONTENDERS if c in PACKED)
    if options.quick:
        batch, count, rounds, contenders = 4, 2, 2, QUICK
    if kept() is None:
        print("left out: DALI with our own color operator, which `python -m pipelines.dali.plugin` builds")
        contenders = tuple(c for c in contenders if c.engine != "plugin")
    where = environment()
    with tempfile.TemporaryDirectory() as made_up:
        if options.folder is None:
            write_pictures(Path(made_up), 8 if options.quick else 256)
        index = image_tree(options.folder or made_up)
        with tempfile.TemporaryDirectory() as packed:
            stored = Stored(str(index.root), f"{packed}/shards")
            write_pack(index, Path(stored.pack))
            found = measure(contenders, stored, batch, count, rounds)
        files = len(index)
    compare(found)
    print(
        f"two views of 224 pixels from {files} files, batches of {batch}, {WORKERS} threads or workers each"
    )
    show(found)
    targets = targets_of(found)
    print_targets(targets)
    report = {
        "tool": "bench_pipeline",
        "environment": where,
        "files": files,
        "made_up": options.folder is None,
    }
    write_json(options.json, {**report, "points": found, "targets": targets})
    return 0


if __name__ == "__main__":
    end(main)
