"""The parts of the GPU suite that no other tool has: python -m tools.gpu.workloads PART --json FILE --folder F ...

    pixels    DALI reads a batch on the device
    resume    a run that is continued from a checkpoint ends as the whole run does, to the bit
    feed      how fast the loader alone is, by operator, JPEG engine and threads
    profile   where the time of our step goes, on a fixed batch and end to end

The images are generated: a bare machine has no data sets. The exit code is 1 if results are wrong.
"""

import json
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle, pairwise, product, repeat
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from torch.profiler import ProfilerActivity

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from fastsuncet.commands import train
from fastsuncet.commands.ranks import as_rank
from fastsuncet.config import Config, load_config
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

NO_DALI = "no_dali"  # a file beside the images, where DALI cannot read them
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
RESUME = (
    "data.split.fraction=null optimization.steps=10 optimization.warmup=0 "
    "checkpoint.every=5 checkpoint.every_epochs=null checkpoint.keep=9",
    "criterion.unsupervised_batch_size=16 criterion.supervised_imgs_per_class=2",
)
PICTURES = (
    "data.kind=image_folder data.train=pictures data.validation=null data.split.kind=all "
    "evaluation.knn_every_epochs=null"
)


def backend(folder: Path) -> str:
    """Return the override that reads images by DALI, or by torchvision where the part `pixels` failed."""
    return f"data.backend={'torchvision' if (folder / NO_DALI).exists() else 'dali'}"


def overrides(settings: tuple[str, str], folder: Path, device: str, small: bool) -> list[str]:
    """Return the changes of configs/in1k_10pct.yaml (IMAGENET) or configs/digits_demo.yaml (the others)."""
    words = [backend(folder), f"meta.device={device}", f"logging.folder={folder}/runs", f"data.root={folder}"]
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


def pixels(report: Report, folder: Path, device: str, small: bool) -> int:
    """Read the first batch of the ImageNet step. The other parts use torchvision where this fails."""
    config = load_config("in1k_10pct", overrides(IMAGENET, folder, device, small))
    with join(config.meta.device) as place:
        bench, stream = StepBench.open(config, place)
        stream.close()
    batch = bench.batch
    points = [
        {"name": f"{len(view)} images", "mean": float(view.float().mean()), "std": float(view.float().std())}
        for view in (*batch.views, batch.labeled)
    ]
    columns = [("", "name", str), ("mean", "mean", "{:.3f}".format), ("deviation", "std", "{:.3f}".format)]
    # Normalized pixels of pictures, or of noise.
    wrong = [f"{p['name']} are no pixels" for p in points if not (abs(p["mean"]) < 2 and 0.1 < p["std"] < 4)]
    return report.finish([harness.table("the views of a step", points, columns)], wrong=wrong, points=points)


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


def train_to_end(config: Config) -> None:
    """Start or continue a run and train it to its end."""
    with as_rank(config) as place:
        train.train(config, place)


def resume(report: Report, folder: Path, device: str, small: bool) -> int:
    """Train ten steps, and continue the same run from its checkpoint at step five, in both precisions."""
    points = []
    for precision in ("fp32", "bf16"):
        words = [*overrides(RESUME, folder, device, small), f"meta.precision={precision}"]
        whole, continued = (
            load_config("digits_demo", [*words, f"logging.folder={folder}/{precision}_{name}"])
            for name in ("whole", "continued")
        )
        train_to_end(whole)
        shutil.copytree(whole.run_folder, continued.run_folder)
        for checkpoint in (continued.run_folder / "checkpoints").glob("step_*"):
            if int(checkpoint.name.removeprefix("step_")) > 5:
                shutil.rmtree(checkpoint)
        train_to_end(continued)
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


WAYS = (FIXED, END_TO_END)  # the columns of the part `profile`
CLOCKS = {
    "cuda": "ms a step without the profiler, CUDA events",
    "cpu": "CPU ms a step, all threads of the process",
    "thread": "CPU ms a step, the thread that starts it",
}


def profile(report: Report, folder: Path, device: str, small: bool) -> int:
    """Record where the time of our step goes, on a fixed batch and end to end. CUDA traces DALI's streams too."""
    config = load_config(
        "in1k_10pct", [*overrides(IMAGENET, folder, device, small), "model.fused_batchnorm=true"]
    )
    # Batches that were prepared while the profiler started are used up before the steps that count.
    steps, edge = 2 if small else 10, config.data.prefetch + 1
    # The CPU's operators are left out on a GPU: to record them slows the host down.
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    trace, found = folder / "trace.json", {}
    with join(config.meta.device) as place:
        bench, stream = StepBench.open(config, place)
        calls = (bench.ours(lambda _: bench.batch), bench.ours(stream))
        for way, call in zip(WAYS, calls):
            for _ in range(WARMUP + 1 + edge):
                call()
            clocks = {
                CLOCKS[clock]: 1e3 * harness.seconds_of(call, clock, steps)
                for clock in dict.fromkeys((device, "cpu", "thread"))
            }
            with torch.profiler.profile(activities=[activity]) as recorded:
                for _ in range(edge + steps + edge):
                    call()
                if device == "cuda":
                    torch.cuda.synchronize()
            recorded.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
            found[way] = where_time_goes(events, steps, edge)
            found[way]["figures"] = clocks | found[way]["figures"]
            report.save(points=found)  # the next one can end the process
        stream.close()
    return report.finish(profile_tables(found), notes=[f"{steps} steps", *bench.notes], points=found)


Tally = dict[str, list[float]]  # name -> how often, ms and MB a step
LAYOUTS = ("nchwtonhwc", "nhwctonchw", "transpose")


def where_time_goes(events: Sequence[Mapping[str, Any]], steps: int, edge: int) -> dict[str, dict]:
    """Return what the events of a chrome trace say about `steps` steps, with `edge` more before and after them.

    "figures": {name: number}. "work" of the GPU, "calls" of CUDA and "kernels": a Tally each. All are empty without
    kernels. Training's stream is the one with the most kernel time, and all of its steps have as many kernels.
    """
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=start_of)
    if not kernels:
        return {"figures": {}, "work": {}, "calls": {}, "kernels": {}}
    streams: Counter[int] = Counter()
    for kernel in kernels:
        streams[kernel["args"]["stream"]] += kernel["dur"]
    ((training, _),) = streams.most_common(1)
    own = [kernel for kernel in kernels if kernel["args"]["stream"] == training]
    each = len(own) / (edge + steps + edge)
    starts = [start_of(own[round(each * step)]) for step in range(edge, edge + steps + 1)]
    begin, end = starts[0], starts[-1]

    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = {call["args"].get("correlation"): call for call in calls}
    launched = [launches.get(kernel["args"].get("correlation")) for kernel in own]
    threads = {launch["tid"] for launch in launched if launch}
    # Between two kernels the stream first waits for the launch of the second, then for other streams or the GPU.
    free, late, queued, leads = begin, 0.0, 0.0, []
    for kernel, launch in zip(own, launched):
        start = start_of(kernel)
        if not begin <= start <= end:
            continue
        ready = start if launch is None else min(start, end_of(launch))
        late += max(0.0, ready - free)
        queued += max(0.0, start - max(ready, free))
        free = max(free, end_of(kernel))
        leads += [start - start_of(launch)] if launch else []

    def within(chosen: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [e for e in chosen if begin <= start_of(e) < end]

    def tally(chosen: Iterable[Mapping[str, Any]], name_of: Callable[[Mapping[str, Any]], str]) -> Tally:
        sums: Tally = {}
        for e in within(chosen):
            total = sums.setdefault(name_of(e), [0, 0, 0])
            for i, value in enumerate((1, e["dur"] / 1e3, e["args"].get("bytes", 0) / 1e6)):
                total[i] += value / steps
        return sums

    def stream_of(kernel: Mapping[str, Any]) -> str:
        number = kernel["args"]["stream"]
        return f"kernels of {'training' if number == training else f'stream {number}'}"

    def idle(chosen: Iterable[Mapping[str, Any]]) -> float:
        return 100 * (1 - covered(within(chosen), end) / (end - begin))

    lengths = [(after - before) / 1e3 for before, after in pairwise(starts)]
    return {
        "figures": {
            "ms a step, median": median(lengths),
            "ms a step, longest": max(lengths),
            "% of the time without a kernel": idle(kernels),
            "% of the time without a kernel of training": idle(own),
            "ms a step that training's stream waits for the host's launch": late / steps / 1e3,
            "ms a step that a launched kernel of training waits on an idle stream": queued / steps / 1e3,
            "ms from a launch to its kernel, median": median(leads) / 1e3 if leads else 0.0,
        },
        "work": tally(kernels, stream_of)
        | tally((e for e in events if e.get("cat") in ("gpu_memcpy", "gpu_memset")), itemgetter("name"))
        | tally(
            (e for e in kernels if any(word in e["name"].lower() for word in LAYOUTS)),
            lambda _: "layout conversions, among the kernels",
        ),
        "calls": tally(
            calls, lambda e: f"{e['name']}, {'training' if e['tid'] in threads else 'other'} threads"
        ),
        "kernels": tally(kernels, itemgetter("name")),
    }


def start_of(event: Mapping[str, Any]) -> float:
    return event["ts"]


def end_of(event: Mapping[str, Any]) -> float:
    return event["ts"] + event["dur"]


def covered(events: Iterable[Mapping[str, Any]], end: float) -> float:
    """Return the microseconds up to `end` in which at least one of the events, ordered by their start, runs."""
    total, free = 0.0, -math.inf
    for event in events:
        total += max(0.0, min(end, end_of(event)) - max(free, start_of(event)))
        free = max(free, end_of(event))
    return total


def profile_tables(found: Mapping[str, Mapping[str, dict]]) -> list[dict[str, Any]]:
    """Return the tables on what `where_time_goes` returns for both of WAYS; none without rows."""

    def ms(group: str, way: str, name: str) -> float:
        return found[way][group].get(name, (0, 0, 0))[1]

    def longest(group: str) -> Callable[[str], float]:
        return lambda name: -max(ms(group, way, name) for way in WAYS)

    def difference(name: str) -> float:
        return -abs(ms("kernels", FIXED, name) - ms("kernels", END_TO_END, name))

    def cell(total: Sequence[float]) -> str:
        times, milliseconds, megabytes = total
        return f"{milliseconds:.3f} ms, {times:,.1f} x" + (f", {megabytes:,.1f} MB" if megabytes else "")

    def table(
        title: str, group: str, order: Callable | None, form: Callable, most: int | None = None
    ) -> dict:
        names = dict.fromkeys(name for way in WAYS for name in found[way][group])
        chosen = (sorted(names, key=order) if order else list(names))[:most]
        points = [{"name": name, **{way: found[way][group].get(name) for way in WAYS}} for name in chosen]
        # The names of some kernels fill a screen.
        columns = [("", "name", lambda name: name[:100]), *((way, way, form) for way in WAYS)]
        return harness.table(title, points, columns)

    tables = [
        table("where the time goes", "figures", None, "{:,.4g}".format),
        table("the GPU's work, a step", "work", longest("work"), cell),
        table("CUDA calls, a step", "calls", longest("calls"), cell),
        table("the kernels that differ most, a step", "kernels", difference, cell, 10),
        table("the kernels that take longest, a step", "kernels", longest("kernels"), cell, 15),
    ]
    return [each for each in tables if each["rows"]]


PARTS = {part.__name__: part for part in (pixels, feed, resume, profile)}


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
