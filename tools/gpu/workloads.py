"""The parts of the GPU suite that no other tool has: python -m tools.gpu.workloads PART --folder F --output PREFIX ...

    feed      how fast the loader alone is, by operator, JPEG engine and threads
    profile   our step under torch's profiler, on a fixed batch and end to end
    start     when the first run on a machine and another one print what, and the calls of the latter

The images are generated: a bare machine has no data sets. The exit code is 1 if a run fails.
"""

import os
import pstats
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, cycle, product, repeat
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from fastsuncet.config import load_config
from fastsuncet.distributed.place import join
from fastsuncet.training.cuda_graph import WARMUP
from pipelines.backend import LoaderOptions
from pipelines.data_errors import DataError
from pipelines.datasets.folders import image_folder
from pipelines.loader import Loader
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.samplers import UnlabeledSampler
from pipelines.sampling.step_plan import Plan
from tools.bench import harness
from tools.bench.harness import Call, Row
from tools.bench.pictures import write_picture
from tools.bench.step import END_TO_END, FIXED, StepBench

# Settings of a config, and the further ones of a rehearsal. The paper's step on generated pictures, 512 views a GPU:
IMAGENET = (
    "data.split.file=null criterion.unsupervised_batch_size=176 criterion.supervised_imgs_per_class=8 "
    "optimization.warmup=0",
    "model.name=resnet_tiny data.augmentation.size=32 data.augmentation.blur=0 data.prefetch=1 "
    "criterion.unsupervised_batch_size=8 criterion.supervised_imgs_per_class=2",
)
# A ResNet-50 with the CIFAR stem at 32 pixels:
CIFAR = (
    "data.split.fraction=null data.augmentation.size=32 "
    "model.name=resnet50 model.stem=cifar model.hidden=2048 model.output=128 "
    "criterion.unsupervised_batch_size=512 criterion.supervised_imgs_per_class=10 "
    "meta.precision=bf16 meta.threads=null optimization.warmup=0",
    "model.name=resnet_tiny model.hidden=64 "
    "criterion.unsupervised_batch_size=16 criterion.supervised_imgs_per_class=2",
)
# The paper's share of one of 64 GPUs, 128 views, which has every fast path:
START = (
    "data.split.file=null criterion.unsupervised_batch_size=44 criterion.supervised_imgs_per_class=2 "
    "optimization.warmup=0 optimization.steps=40 logging.log_every=20 checkpoint.every_epochs=null",
    "model.name=resnet_tiny data.augmentation.size=32 data.augmentation.blur=0 "
    "criterion.unsupervised_batch_size=8 criterion.supervised_imgs_per_class=2 optimization.steps=4",
)
PICTURES = (
    "data.kind=image_folder data.train=pictures data.validation=null data.split.kind=all "
    "evaluation.knn_every_epochs=null"
)


def overrides(settings: tuple[str, str], folder: Path, device: str, small: bool) -> list[str]:
    """Return the changes of configs/in1k_10pct.yaml (IMAGENET) or configs/digits_demo.yaml (the others)."""
    words = [f"meta.device={device}", f"logging.folder={folder}/runs", f"data.root={folder}"]
    return [*words, *f"{PICTURES} {settings[0]} {settings[1] if small else ''}".split()]


def generate_images(folder: Path, small: bool) -> None:
    """Write JPEGs of ImageNet's usual size to folder/pictures, in 20 classes."""
    height, width, count = (60, 80, 40) if small else (375, 500, 520)
    paths = [folder / "pictures" / f"class_{number % 20:02}" / f"{number:03}.jpg" for number in range(count)]
    with ProcessPoolExecutor() as pool:
        # Of several heights, because the hardware decoder sorts a batch by area.
        heights = cycle(range(height, height + 20))
        list(pool.map(write_picture, paths, range(count), heights, repeat(width)))


def feed(options: Namespace) -> int:
    """Time the loader of SimCLR's two views of 224 pixels without a network, by the settings that it could have."""
    gpu = options.device == "cuda"
    batch, steps = (8, 2) if options.quick else (256, 12)
    index = image_folder(options.folder / "pictures")
    plan = Plan(index, UnlabeledSampler(len(index), batch, 1, 0), (Augmentation(),) * 2, seed=0, role="feed")
    threads, shares = ((8, 16), (0.0, 0.65, 1.0)) if gpu else ((1, 2), (0.0,))
    plans = [*product((True,), shares, threads), (False, 0.0, threads[-1])]
    rows: list[Row] = []
    first: dict[float, torch.Tensor] = {}
    for operator, share, count in plans:
        settings = {"view_operator": operator, "hw_decoder_share": share, "threads": count}
        try:
            loader = Loader(plan, LoaderOptions(device="gpu" if gpu else "cpu", backend="dali", **settings))
            (view, _), *_ = loader(0), loader(1), loader(2)
        except (DataError, RuntimeError) as error:
            print(f"left out: {settings}: {error}\n", flush=True)
            continue
        first.setdefault(share, view.cpu())
        began = time.perf_counter()
        for step in range(3, 3 + steps):
            loader(step)
        if gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        loader.close()
        row = {name: str(value) for name, value in settings.items()}
        rows.append(row | {"views/s": f"{2 * batch * steps / seconds:,.0f}"})
        print(rows[-1], flush=True)  # the next one can end the process
    print()
    title = f"the loader alone, two views of 224 pixels, batches of {batch}, {steps} steps after three"
    harness.show(title, rows)
    if {0.0, 1.0} <= first.keys():
        apart = (first[0.0].float() - first[1.0].float()).abs().max().item()
        print(f"the largest difference of a batch's views at share 1.0 from those at 0.0: {apart:.4f} of 1\n")
    return 0


CLOCKS = {
    "cuda": "ms a step, CUDA events",
    "cpu": "CPU ms a step, all threads of the process",
    "host": "ms until the host has launched a step",
}


def profile(options: Namespace) -> int:
    """Time our step and record it, on a fixed batch and end to end. CUDA records DALI's streams too.

    Each way leaves a chrome trace: its gaps are the card's idle time.
    """
    device, small = options.device, options.quick
    config = load_config("in1k_10pct", overrides(IMAGENET, options.folder, device, small))
    # Batches that were prepared while the profiler started are used up by its first steps. A trace has few steps more:
    # its file has to be small enough to be copied from a lent machine.
    steps, ahead = 1 if small else 5, config.data.prefetch + 1
    # The CPU's operators are left out on a GPU: to record them slows the host down.
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with join(config.meta.device) as place:
        bench, stream = StepBench.open(config, place)
        calls = {FIXED: bench.ours(lambda _: bench.batch), END_TO_END: bench.ours(stream)}
        for way, call in calls.items():
            for _ in range(WARMUP + 1 + ahead):
                call()
            row = {"": way}
            for clock in dict.fromkeys((device, "cpu")):
                row[CLOCKS[clock]] = f"{1e3 * harness.seconds_of(call, clock, 2 * steps):,.4g}"
            row[CLOCKS["host"]] = f"{1e3 * seconds_until_launched(call, device, 2 * steps):,.4g}"
            harness.show(f"{2 * steps} steps without the profiler", [row])
            with torch.profiler.profile(activities=[activity]) as recorded:
                for _ in range(ahead + steps):
                    call()
                if device == "cuda":
                    torch.cuda.synchronize()
            trace = options.output.with_name(f"{options.output.name}_{way.replace(' ', '_')}.json.gz")
            recorded.export_chrome_trace(str(trace))
            rows = recorded.key_averages().table(
                sort_by=f"self_{activity.name.lower()}_time_total", row_limit=25, max_name_column_width=100
            )
            print(f"{way}, {ahead + steps} steps, {trace.name}:\n\n```\n{rows}\n```\n", flush=True)
        stream.close()
    print(
        f"{END_TO_END}: the first {ahead} recorded steps have batches that were prepared before.",
        *bench.notes,
    )
    return 0


def seconds_until_launched(call: Call, device: str, repeats: int) -> float:
    """Return the mean seconds until a call returns. On a GPU the calls before it have ended: its queue is empty.

    With calls queued, the driver holds the host up once about a thousand launches wait, and the time is the GPU's.
    """
    seconds = 0.0
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        seconds += time.perf_counter() - start
    return seconds / repeats


def start(options: Namespace) -> int:
    """Run `fastsuncet train` with an empty cache, then again under Python's profiler; time what it prints."""
    words, codes = overrides(START, options.folder, options.device, options.quick), []
    calls = options.folder / "start.pstats"
    cache = {} if options.quick else {"FASTSUNCET_CACHE": str(options.folder / "cache")}
    runs = {"first": (), "second": ("-m", "cProfile", "-o", str(calls))}
    if options.quick:
        del runs["first"]  # the cache is not empty: a rehearsal does not compile the view operator anew
    for name, profiler in runs.items():
        command = [sys.executable, "-u", *profiler, "-m", "fastsuncet", "train", "in1k_10pct", *words]
        settings: dict[str, Any] = {"env": {**os.environ, **cache}, "text": True, "stderr": subprocess.STDOUT}
        print(f"the {name} run:\n\n```", flush=True)
        began, before = time.perf_counter(), 0.0
        command.append(f"logging.write_tag={name}")
        with subprocess.Popen(command, stdout=subprocess.PIPE, **settings) as process:
            for line in chain(process.stdout or (), ["the end"]):
                seconds = time.perf_counter() - began
                if seconds - before > 0.1:  # of lines that come together the first
                    print(f"{seconds:6.1f} s  {line.strip()[:100]}", flush=True)
                before = seconds
        print(f"```\n\nexit code {process.returncode}\n", flush=True)
        codes.append(process.returncode)
    if calls.exists():  # else the second run was killed
        print("```")
        pstats.Stats(str(calls)).sort_stats("cumulative").print_stats("fastsuncet|pipelines|torch", 40)
        print("```\n")
    return int(any(codes))


PARTS = {part.__name__: part for part in (feed, profile, start)}


def main(arguments: list[str] | None = None) -> int:
    """Run one part; return its exit code."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--folder", type=Path, required=True, help="holds the images of `generate_images`")
    parser.add_argument("--output", type=Path, required=True, help="first letters of the traces' paths")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small networks and pictures")
    options = parser.parse_args(arguments)
    return PARTS[options.part](options)


if __name__ == "__main__":
    harness.run(main)
