"""The parts of the GPU suite that no other tool has: python -m tools.gpu.workloads PART --json FILE --folder F ...

    resume    a run that is continued from a checkpoint ends as the whole run does, to the bit
    feed      how fast the loader alone is, by operator, JPEG engine and threads
    profile   our step under torch's profiler, on a fixed batch and end to end
    start     when the first run on a machine and another one print what, and the calls of the latter

The images are generated: a bare machine has no data sets. The exit code is 1 if results are wrong.
"""

import os
import pstats
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, cycle, product, repeat
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.profiler import ProfilerActivity

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

import fastsuncet
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
from tools.bench.harness import Report
from tools.bench.pictures import texture
from tools.bench.step import END_TO_END, FIXED
from tools.bench.step_bench import StepBench
from tools.same_runs import assert_equal_to_the_bit, final_state

# Settings of a config, and the further ones of a rehearsal. The paper's step on generated pictures, 512 views a GPU:
IMAGENET = (
    "data.split.file=null criterion.unsupervised_batch_size=176 criterion.supervised_imgs_per_class=8 "
    "optimization.warmup=0",
    "model.name=resnet_tiny data.augmentation.size=32 data.augmentation.blur=0 "
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
RESUME = (
    "data.split.fraction=null optimization.steps=10 optimization.warmup=0 "
    "checkpoint.every=5 checkpoint.every_epochs=null checkpoint.keep=9",
    "criterion.unsupervised_batch_size=16 criterion.supervised_imgs_per_class=2",
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


def write_picture(path: Path, number: int, height: int, width: int) -> None:
    """Write a JPEG with roughly the detail of a photograph."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(texture(number, height, width)).save(path, quality=92)


def open_feed(folder: Path, device: str, batch: int, **options: Any) -> Loader:
    """Open a loader of SimCLR's two views of 224 pixels of the generated pictures."""
    index = image_folder(folder / "pictures")
    plan = Plan(index, UnlabeledSampler(len(index), batch, 1, 0), (Augmentation(),) * 2, seed=0, role="feed")
    where = "gpu" if device == "cuda" else "cpu"
    return Loader(plan, LoaderOptions(device=where, backend="dali", **options))


def feed(report: Report, folder: Path, device: str, small: bool) -> int:
    """Time the loader without a network, by the settings that it could have."""
    gpu = device == "cuda"
    batch, steps = (8, 2) if small else (256, 12)
    threads, shares = ((8, 16), (0.0, 0.65, 1.0)) if gpu else ((1, 2), (0.0,))
    plans = [*product((True,), shares, threads), (False, 0.0, threads[-1])]
    points, notes = [], []
    first: dict[float, torch.Tensor] = {}
    for operator, share, count in plans:
        settings = {"view_operator": operator, "hw_decoder_share": share, "threads": count}
        try:
            loader = open_feed(folder, device, batch, **settings)
            (view, _), *_ = loader(0), loader(1), loader(2)
        except (DataError, RuntimeError) as error:
            notes.append(f"left out: {settings}: {error}")
            continue
        first.setdefault(share, view.cpu())
        began = time.perf_counter()
        for step in range(3, 3 + steps):
            loader(step)
        if gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        loader.close()
        points.append({**settings, "views": 2 * batch * steps / seconds})
        report.save(points=points)  # the next one can end the process
    if {0.0, 1.0} <= first.keys():
        apart = (first[0.0].float() - first[1.0].float()).abs().max().item()
        notes.append(
            f"the largest difference of a batch's views at share 1.0 from those at 0.0: {apart:.4f} of 1"
        )
    columns = [
        ("view operator", "view_operator", str),
        ("JPEG engine's share", "hw_decoder_share", str),
        ("threads", "threads", str),
        ("views/s", "views", "{:,.0f}".format),
    ]
    title = f"the loader alone, two views of 224 pixels, batches of {batch}, {steps} steps after three"
    return report.finish([harness.table(title, points, columns)], notes=notes, points=points)


def resume(report: Report, folder: Path, device: str, small: bool) -> int:
    """Train ten steps, and continue the same run from its checkpoint at step five, in both precisions."""
    points = []
    for precision in ("fp32", "bf16"):
        words = [*overrides(RESUME, folder, device, small), f"meta.precision={precision}"]
        whole, continued = (
            load_config("digits_demo", [*words, f"logging.folder={folder}/{precision}_{name}"])
            for name in ("whole", "continued")
        )
        fastsuncet.train(whole)
        shutil.copytree(whole.run_folder, continued.run_folder)
        for checkpoint in (continued.run_folder / "checkpoints").glob("step_*"):
            if int(checkpoint.name.removeprefix("step_")) > 5:
                shutil.rmtree(checkpoint)
        fastsuncet.train(continued)
        try:
            assert_equal_to_the_bit(final_state(continued), final_state(whole))
            result = "equal to the bit"
        except AssertionError as error:
            result = f"DIFFERENT: {str(error).splitlines()[0]}"
        points.append({"name": precision, "result": result})
    title = "weights, statistics, momentum and metrics after ten steps, continued at five"
    table = harness.table(title, points, [("", "name", str), ("", "result", str)])
    different = [p["name"] for p in points if p["result"].startswith("DIFFERENT")]
    wrong = [f"a continued run in {name} does not end as the whole one" for name in different]
    return report.finish([table], wrong=wrong, points=points)


CLOCKS = {
    "cuda": "ms a step, CUDA events",
    "cpu": "CPU ms a step, all threads of the process",
    "host": "ms until the host has launched a step",
}


def profile(report: Report, folder: Path, device: str, small: bool) -> int:
    """Time our step and record it, on a fixed batch and end to end. CUDA records DALI's streams too.

    Each way leaves a chrome trace beside the report: its gaps are the card's idle time.
    """
    config = load_config(
        "in1k_10pct", [*overrides(IMAGENET, folder, device, small), "model.fused_batchnorm=true"]
    )
    # Batches that were prepared while the profiler started are used up by its first steps. A trace has few steps more:
    # its file has to be small enough to be copied from a lent machine.
    steps, ahead = 2 if small else 5, config.data.prefetch + 1
    # The CPU's operators are left out on a GPU: to record them slows the host down.
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    beside, points = report.path or folder / "profile.json", []
    with join(config.meta.device) as place:
        bench, stream = StepBench.open(config, place)
        calls = {FIXED: bench.ours(lambda _: bench.batch), END_TO_END: bench.ours(stream)}
        for way, call in calls.items():
            for _ in range(WARMUP + 1 + ahead):
                call()
            clocks = {
                clock: 1e3 * harness.seconds_of(call, clock, 2 * steps)
                for clock in dict.fromkeys((device, "cpu"))
            }
            host = 1e3 * harness.seconds_until_launched(call, device, 2 * steps)
            points.append({"name": way, **clocks, "host": host})
            report.save(points=points)  # the next one can end the process
            with torch.profiler.profile(activities=[activity]) as recorded:
                for _ in range(ahead + steps):
                    call()
                if device == "cuda":
                    torch.cuda.synchronize()
            trace = beside.with_name(f"{beside.stem}_{way.replace(' ', '_')}.json.gz")
            recorded.export_chrome_trace(str(trace))
            rows = recorded.key_averages().table(
                sort_by=f"self_{activity.name.lower()}_time_total", row_limit=25, max_name_column_width=100
            )
            print(f"{way}, {ahead + steps} steps, {trace.name}:\n\n```\n{rows}\n```\n", flush=True)
        stream.close()
    columns = [("", "name", str), *((head, clock, "{:,.4g}".format) for clock, head in CLOCKS.items())]
    table = harness.table(f"{2 * steps} steps without the profiler", points, columns)
    note = f"{END_TO_END}, the first {ahead} recorded steps have batches that were prepared before"
    return report.finish([table], notes=[note, *bench.notes], points=points)


def start(report: Report, folder: Path, device: str, small: bool) -> int:
    """Run `fastsuncet train` with an empty cache, then again under Python's profiler; time what it prints."""
    words, points, wrong, calls = overrides(START, folder, device, small), [], [], folder / "start.pstats"
    # A rehearsal does not compile the view operator anew.
    cache = {} if small else {"FASTSUNCET_CACHE": str(folder / "cache")}
    for name, profiler in (("first", ()), ("second", ("-m", "cProfile", "-o", str(calls)))):
        command = [sys.executable, "-u", *profiler, "-m", "fastsuncet", "train", "in1k_10pct", *words]
        options: dict[str, Any] = {"env": {**os.environ, **cache}, "text": True, "stderr": subprocess.STDOUT}
        began, before = time.perf_counter(), 0.0
        command.append(f"logging.write_tag={name}")
        with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as process:
            for line in chain(process.stdout or (), ["the end"]):
                seconds = time.perf_counter() - began
                if seconds - before > 0.1:  # of lines that come together the first
                    points.append({"name": name, "seconds": seconds, "line": line.strip()[:100]})
                before = seconds
        report.save(points=points)
        if process.returncode:
            wrong.append(f"the {name} run ended with exit code {process.returncode}")
    if calls.exists():  # else the second run was killed
        print("```")
        pstats.Stats(str(calls)).sort_stats("cumulative").print_stats("fastsuncet|pipelines|torch", 40)
        print("```\n")
    columns = [("run", "name", str), ("seconds", "seconds", "{:.1f}".format), ("line", "line", str)]
    table = harness.table("what two runs print, the second one under cProfile", points, columns)
    return report.finish([table], wrong=wrong, points=points)


PARTS = {part.__name__: part for part in (feed, resume, profile, start)}


def main(arguments: list[str] | None = None) -> int:
    """Run one part; return 1 if results are wrong."""
    parser = harness.parser(__doc__, device="cuda", quick="small networks and pictures")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--folder", type=Path, required=True, help="holds the images of `generate_images`")
    options = parser.parse_args(arguments)
    report = Report(f"gpu suite, {options.part}", options.json, device=options.device)
    return PARTS[options.part](report, options.folder, options.device, options.quick)


if __name__ == "__main__":
    harness.run(main)
