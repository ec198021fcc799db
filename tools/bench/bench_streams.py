"""The unlabeled and the labeled stream of a step: two DALI pipelines, as the trainer has them, against one for both.

    python tools/bench/bench_streams.py [FOLDER] [--json FILE] [--rounds R] [--batches N] [--threads T] [--color exact|fast]
        [--device cpu|cuda] [--quick]

FOLDER is any tree of images; without one, pictures are made up and written first. A step is the paper's on one of 64
GPUs: 44 unlabeled images of two views, and 2 images of each of 20 classes of one view. Everyone decodes each image
once, draws the same numbers and gives the same pixels, which is looked at before anything is timed.

One pipeline takes both batches as one, since DALI refuses inputs of different lengths ("Batch size clash"): the labeled
images ride behind the unlabeled ones, through the first view's operators, and past the second's, by a condition. The
outputs are slices without a copy.

What is fair is not obvious: two pipelines have two pools of threads. So they take part twice: with T threads each, as
`data.decode_threads: T` gives them, and with T in all, half each, where the smaller stream's half idles once it is
ahead. The machine's cores are the same for all.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, `tools` is not importable yet

from pipelines.datasets.folders import image_tree
from pipelines.loader import open_loader
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.samplers import ClassSampler, UnlabeledSampler
from pipelines.sampling.step_plan import Plan
from tools.bench.bench_pipeline import write_pictures
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

ONE, TWO, HALVES = "one pipeline", "two pipelines, T threads each", "two pipelines, T threads in all"
WORTH_IT = 1.05  # less would not pay for a second kind of batch in the loader
COMPARED = 3  # steps whose pixels must be the same before anything is timed


@dataclass(frozen=True)
class Setting:
    """What every contender is asked for."""

    folder: str
    device: str = "cpu"  # or "cuda"
    threads: int = 2
    color: str = "exact"
    unlabeled: int = 44
    classes: int = 20
    each: int = 2  # labeled images of a class
    size: int = 224


def plans(setting: Setting) -> tuple[Plan, Plan]:
    """Both streams over one folder, whose images are given classes by their order."""
    index, kinds = image_tree(setting.folder), 2 * setting.classes
    index = replace(index, labels=np.arange(len(index)) % kinds, classes=tuple(map(str, range(kinds))))
    view, rows = Augmentation(size=setting.size, color=setting.color), np.arange(len(index))
    unlabeled = UnlabeledSampler(len(index), setting.unlabeled, 1, seed=0)
    labeled = ClassSampler(rows, index.labels, setting.classes, setting.each, 1, seed=0)
    return (
        Plan(index, unlabeled, (view, view), seed=0, role="unlabeled"),
        Plan(index, labeled, (view,), seed=0, role="labeled"),
    )


def batches(contender: str, setting: Setting) -> Iterator[list[torch.Tensor]]:
    """Step after step without end: two views of the unlabeled images and one of the labeled ones."""
    unlabeled, labeled = plans(setting)
    device = "gpu" if setting.device == "cuda" else "cpu"
    if contender == ONE:
        yield from joined(unlabeled, labeled, setting.threads, device)
        return
    threads = setting.threads if contender == TWO else max(1, setting.threads // 2)
    streams = [
        open_loader(plan.index, plan, device=device, threads=threads, backend="dali")
        for plan in (unlabeled, labeled)
    ]
    for step in itertools.count():
        yield [view for stream in streams for view in stream(step)]


def joined(unlabeled: Plan, labeled: Plan, threads: int, device: str) -> Iterator[list[torch.Tensor]]:
    """Both streams out of one pipeline: its batch is the unlabeled images, then the labeled ones."""
    from nvidia.dali import fn, pipeline_def, types

    from pipelines.dali import graphs
    from pipelines.dali.engine import FilePaths, placement
    from pipelines.dali.plugin.use import choose

    view = unlabeled.augmentations[0]
    plugin = view.color == "exact" and choose("auto", device)  # as the two pipelines choose
    stored, rows = FilePaths(unlabeled.index), unlabeled.batch

    def images(step: int) -> list[np.ndarray]:
        return stored(np.concatenate([unlabeled(step).indices, labeled(step).indices]))

    def arrays(step: int) -> list[np.ndarray]:
        return [np.arange(rows + labeled.batch) < rows, *numbers(unlabeled, labeled, step)]

    def second(image: Any, shown: Any, drawn: SimpleNamespace) -> Any:
        if shown:
            image = graphs.augmented(image, view, drawn, plugin)
        else:
            shape = (view.size, view.size, 3)
            image = fn.constant(idata=0, shape=shape, dtype=types.UINT8, layout="HWC", device=device)
        return graphs.normalize(image, view, "float32", mirror=drawn.flip)

    @pipeline_def(enable_conditionals=True, exec_dynamic=True)
    def graph(decode: str) -> tuple:
        image = graphs.stored_images(images, decode, stored.stored)
        names = list(graphs.view_inputs(view))
        shown, *nodes = fn.external_source(arrays, num_outputs=1 + 2 * len(names))
        both, alone = (
            SimpleNamespace(**dict(zip(names, part))) for part in (nodes[: len(names)], nodes[len(names) :])
        )
        return graphs.one_view(image, view, both, "float32", plugin), second(image, shown, alone)

    pipeline = graph(
        batch_size=rows + labeled.batch,
        num_threads=threads,
        prefetch_queue_depth=2,
        **placement(device, 0),
    )
    stream = (torch.cuda.current_stream(0),) if device == "gpu" else ()  # by position: see `DaliEngine.run`
    while True:
        one, other = (
            torch.from_dlpack(output.as_tensor()).permute(0, 3, 1, 2) for output in pipeline.run(*stream)
        )
        yield [one[:rows], other[:rows], one[rows:]]


def numbers(unlabeled: Plan, labeled: Plan, step: int) -> list[np.ndarray]:
    """Both views' arrays over the joined rows: the labeled images' own in the first view's, zeros in the second's."""
    from pipelines.dali.graphs import view_arrays

    one, two = ([view] for view in unlabeled(step).views)
    views = unlabeled.augmentations[:1]
    first = zip(view_arrays(views, one), view_arrays(views, labeled(step).views))
    return [np.concatenate(parts) for parts in first] + [
        np.concatenate([array, np.zeros((labeled.batch, *array.shape[1:]), array.dtype)])
        for array in view_arrays(views, two)
    ]


def require_the_same_pixels(setting: Setting) -> None:
    """Raises AssertionError unless one pipeline gives the two's pixels to the bit."""
    ours, theirs = batches(ONE, setting), batches(TWO, setting)
    for step in range(COMPARED):
        pairs = list(zip(next(ours), next(theirs), strict=True))
        if not all(torch.equal(one, other) for one, other in pairs):
            raise AssertionError(f"step {step}: one pipeline gives other pixels than two")


def measure(setting: Setting, count: int, rounds: int) -> list[dict[str, Any]]:
    """One row a contender: seconds of each turn over `count` steps, and times the faster of the two-pipeline ones."""
    require_the_same_pixels(setting)
    sources = {name: (batches, (name, setting)) for name in (ONE, TWO, HALVES)}
    turns = in_turns(sources, count, rounds, setting.device)
    wall = {name: [seconds / count for seconds, _ in found] for name, found in turns.items()}
    cpu = {name: [seconds / count for _, seconds in found] for name, found in turns.items()}
    best = min((TWO, HALVES), key=lambda name: spread(wall[name])["median"])
    return [
        {
            "name": name.replace("T threads", f"{setting.threads} threads"),
            "seconds_a_step": wall[name],
            "cpu_seconds_a_step": cpu[name],
            "speed_to_two": ratios(wall[best], wall[name]),
            "cpu_to_two": ratios(cpu[name], cpu[best]),
        }
        for name in sources
    ]


def rows_of(found: list[dict[str, Any]]) -> list[list[str]]:
    """The table's rows, below `HEAD`."""
    return [
        [
            row["name"],
            told(spread([1e3 * each for each in row["seconds_a_step"]])),
            told(row["speed_to_two"]),
            told(spread([1e3 * each for each in row["cpu_seconds_a_step"]])),
            told(row["cpu_to_two"]),
        ]
        for row in found
    ]


HEAD = ["", "ms a step", "x two, speed", "CPU ms a step", "x two, CPU"]


def main(arguments: list[str] | None = None) -> int:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", nargs="?", help="a tree of images (default: 96 pictures made up for the run)"
    )
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--batches", type=int, default=4, help="steps in a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--color", choices=("exact", "fast"), default="exact")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--quick", action="store_true", help="8 pictures, two turns: for a look and for the tests"
    )
    options = parser.parse_args(arguments)
    where, count, rounds = environment(), options.batches, options.rounds
    with tempfile.TemporaryDirectory() as made_up:
        if options.folder is None:
            write_pictures(Path(made_up), 8 if options.quick else 96)
        setting = Setting(options.folder or made_up, options.device, options.threads, options.color)
        if options.quick:
            setting = replace(setting, unlabeled=4, classes=2, each=2, size=32)
            count, rounds = 1, 2
        found = measure(setting, count, rounds)
    print(
        f"{setting.unlabeled} images of two views and {setting.classes * setting.each} of one, {setting.size} pixels, "
        f"{setting.color} color, on the {setting.device}; the pixels of {COMPARED} steps are the same to the bit"
    )
    print_table(HEAD, rows_of(found))
    print("x two: against the faster of the two-pipeline contenders; above 1, one pipeline wins\n")
    asked = [
        target("one pipeline: steps a second over two", found[0]["speed_to_two"], WORTH_IT, at_least=True)
    ]
    print_targets(asked)
    report = {"tool": "bench_streams", "environment": where, "setting": asdict(setting)}
    write_json(options.json, {**report, "made_up": options.folder is None, "points": found, "targets": asked})
    return 0


if __name__ == "__main__":
    end(main)
