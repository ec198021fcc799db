"""The parts of `gpu_suite.py` that run whole steps: the table, the ladder from a plain step to ours, the profile."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fastsuncet.config import Config, load_config
from fastsuncet.data.paired_stream import Batch
from fastsuncet.distributed.launch import join
from fastsuncet.losses import nt_xent
from fastsuncet.training.cuda_graph import WARMUP
from fastsuncet.training.determinism import set_determinism
from tools.bench import bench_step
from tools.bench.common import spread, told
from tools.bench.device_clock import seconds_of, settled
from tools.gpu.speed import CONFIGS, Found, Options, peak_mb, pictures, small_images, table


def imagenet_config(options: Options) -> Config:
    """The paper's ImageNet step on made-up pictures: 512 views a card."""
    changed = [
        f"data.root={pictures(options).parent}",
        f"data.train={options.pictures.name}",
        "data.validation=null",
        "data.split.kind=all",
        "data.split.file=null",
        "data.decode_threads=12",
        "data.prefetch=3",
        "criterion.unsupervised_batch_size=176",
        "criterion.supervised_imgs_per_class=8",
        "evaluation.knn_every_epochs=null",
        f"meta.device={options.device}",
        f"logging.folder={options.scratch}",
        "optimization.warmup=0",
    ]
    if options.small:
        changed += [
            "model.name=resnet_tiny",
            "data.augmentation.size=32",
            "data.augmentation.blur=0",
            "criterion.unsupervised_batch_size=8",
            "criterion.supervised_imgs_per_class=2",
            "data.decode_threads=2",
        ]
    return load_config(CONFIGS / "in1k_10pct.yaml", changed)


def cifar_config(options: Options) -> Config:
    """ResNet-50 with the CIFAR stem at 32 pixels; the digits stand in for CIFAR-10's images, in memory as those are."""
    changed = [
        "model.name=resnet50",
        "model.stem=cifar",
        "model.hidden=2048",
        "model.output=128",
        "data.augmentation.size=32",
        "criterion.unsupervised_batch_size=512",
        "criterion.supervised_imgs_per_class=10",
        "meta.precision=bf16",
        "meta.threads=null",
        "optimization.warmup=0",
        f"meta.device={options.device}",
        f"logging.folder={options.scratch}",
        *small_images(options)[1],
    ]
    if options.small:
        changed += [
            "model.name=resnet_tiny",
            "model.hidden=64",
            "criterion.unsupervised_batch_size=16",
            "criterion.supervised_imgs_per_class=2",
        ]
    return load_config(CONFIGS / "digits_demo.yaml", changed)


def whole_step(make: Callable[[Options], Config], options: Options) -> Found:
    """bench_step's contenders on one config."""
    config = make(options)
    rounds, steps = (2, 1) if options.small else (5, 20)
    with join(config.meta.device) as place:
        set_determinism(config, place)
        found = bench_step.bench(config, place, rounds, steps)
    rows = [
        [
            row["name"],
            row["views"],
            told(spread([1e3 * each for each in row["seconds"]])),
            told(spread(row["views_per_second"]), 4),
            told(row["speed_to_fixed"]),
            row.get("operators", ""),
            row.get("host_waits", ""),
        ]
        for row in found["points"]
    ]
    head = ["", "views", "ms a step", "views/s", "speed, x one fixed batch", "operators", "host waits"]
    waits, wrong = found["cuda_says_of_waits"], []
    if waits is not None:
        rows.append(["what CUDA says of waits", "", "", "", "", "", waits or "none"])
        wrong += [waits] if waits else []
    if found["pixels"] != "dali":  # a step end to end would be torchvision's, and nobody wants to know that
        wrong.append(f"pixels by {found['pixels']}")
    data = config.data
    pace = (
        f", {data.decode_threads} threads a stream, {data.prefetch} steps ahead"
        if data.decode_threads
        else ""
    )
    return table(f"a step, pixels by {found['pixels']}{pace}", head, rows) | found | {"wrong": wrong}


def rungs(config: Config, bench: bench_step.Bench) -> dict[str, Callable[[], Callable[[], Any]]]:
    """From the step of a tutorial to ours, one change a rung; each makes its step when it is asked to."""

    def changed(**values: Any) -> bench_step.Bench:
        sections = config.canonical()
        for name, value in values.items():
            sections["model" if name in sections["model"] else "meta"][name] = value
        return bench_step.Bench.like(bench, Config.from_values(sections))

    def tutorial(loss: Callable, **values: Any) -> Callable[[], Callable[[], Any]]:
        return lambda: changed(**values).plain(loss, tf32=True)

    def whole(batch: Batch, **values: Any) -> Callable[[], Callable[[], Any]]:
        return lambda: changed(precision="bf16", **values).ours(lambda _: batch)

    def ours(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return nt_xent(torch.cat([first, second]), config.criterion.temperature)

    dense = partial(bench_step.dense_nt_xent, temperature=config.criterion.temperature)
    fused, batch = {"fused_batchnorm": True}, bench.batch
    steps = {
        "plain PyTorch: float32 with its TF32, NCHW, SGD": tutorial(
            dense, precision="fp32", channels_last=False
        ),
        "+ bf16": tutorial(dense, precision="bf16", channels_last=False),
        "+ channels-last": tutorial(dense, precision="bf16"),
        "+ our NT-Xent": tutorial(ours, precision="bf16"),
        "+ LARS: our step, SimCLR alone": whole(bench.alone()),
        "+ SuNCEt: our whole step": whole(batch),
    }
    if bench.place.device.type == "cuda":
        steps["+ fused BatchNorm"] = whole(batch, **fused)
        steps["+ CUDA graph"] = whole(batch, **fused, cuda_graph=True)
        steps["not deterministic: cuDNN's search"] = whole(batch, deterministic=False)
        steps["CUDA graph, BatchNorm not fused"] = whole(batch, cuda_graph=True)
        steps["torch.compile, BatchNorm not fused"] = whole(batch, compile=True)
        steps["torch.compile and CUDA graph"] = whole(batch, compile=True, cuda_graph=True)
    return steps


def ladder(options: Options) -> Found:
    """Each rung's step on one fixed batch, alone on the device."""
    config = imagenet_config(options)
    rows, medians = [], []
    head = [
        "",
        "ms a step",
        "views/s",
        "speed, x the rung before",
        "speed, x the first",
        "MB, or what failed",
    ]
    with join(config.meta.device) as place:
        set_determinism(config, place)
        bench = bench_step.Bench(config, place)
        bench.stream.close()
        for name, make in rungs(config, bench).items():
            times, note = climbed(make, options)
            if bench.said:  # a graph that could not be captured: the rung ran without it
                note = bench.said.pop()
            if times:
                median = spread(times)["median"]
                medians.append(median)
                gains = [f"{medians[i] / median:.2f}" for i in (-2, 0)] if medians[1:] else ["", ""]
                speed = [told(spread([1e3 * each for each in times])), f"{bench.views / median:.0f}"]
                rows.append([name, *speed, *gains, note])
            else:
                rows.append([name, "", "", "", "", note])
            options.keep(table("one trick at a time", head, rows))
    return table("one trick at a time", head, rows)


def climbed(make: Callable[[], Callable[[], Any]], options: Options) -> tuple[list[float], str]:
    """Seconds of a rung's steps and its memory; no seconds, and why, of one that fails: others are wanted too."""
    rounds, repeats = (2, 1) if options.small else (5, 10)
    try:
        step = make()
        for _ in range(WARMUP + 2):
            step()
        return [seconds_of(step, options.device, repeats) for _ in range(rounds)], peak_mb(
            step, options.device
        )
    except Exception as error:  # a compiler, a kernel, the memory: anything can
        return [], f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        step = None
        if options.device == "cuda":
            torch.cuda.empty_cache()


def profile(options: Options) -> Found:
    """Our step on one fixed batch: its kernels by time, its layout conversions, and what the host waited for."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    config = imagenet_config(options)
    cuda = options.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    count = 1 if options.small else 5
    with join(config.meta.device) as place:
        set_determinism(config, place)
        bench = bench_step.Bench(config, place)
        bench.stream.close()
        step = bench.ours(lambda _: bench.batch)
        for _ in range(3):
            step()
        settled(options.device)
        with profiler(activities=activities) as seen:
            for _ in range(count):
                step()
            settled(options.device)
    events = seen.key_averages()
    spent = {e.key: (e.self_device_time_total if cuda else e.self_cpu_time_total) for e in events}
    calls = {e.key: e.count for e in events}
    kernels = [e.key for e in events if not cuda or e.device_type == torch.autograd.DeviceType.CUDA]
    total = sum(spent[key] for key in kernels) or 1.0
    top = sorted(kernels, key=lambda key: -spent[key])[:25]
    rows = [
        [
            key.replace("|", "/")[:90],
            f"{100 * spent[key] / total:.1f}",
            f"{spent[key] / count / 1e3:.3f}",
            calls[key] // count,
        ]
        for key in top
    ]
    layout = [
        key
        for key in kernels
        if any(word in key.lower() for word in ("nchwtonhwc", "nhwctonchw", "transpose"))
    ]
    # A copy that is not Async is a wait; of the waits for the whole device, one is this profile's own end.
    waits = [key for key in calls if "Synchronize" in key or key == "cudaMemcpy"]
    facts = [
        ["kernels or operators a step", sum(calls[key] for key in kernels) // count],
        ["layout conversions a step", sum(calls[key] for key in layout) / count],
        *([key, calls[key] / count] for key in waits),
    ]
    return {
        "tables": [
            {"title": "where the time goes", "head": ["", "%", "ms a step", "calls a step"], "rows": rows},
            {"title": "what it starts, converts and waits for", "head": ["", "a step"], "rows": facts},
        ]
    }
