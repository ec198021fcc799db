"""The lines that are printed when a run starts, and by --dry-run instead of starting."""

from dataclasses import replace

import numpy as np
import torch

from fastsuncet.config import Arithmetic, Config
from fastsuncet.data.dataset import Images
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed.place import Place
from fastsuncet.metrics.interval import memory_of
from fastsuncet.models.flops import (
    Memory,
    memory_estimate,
    norm_shapes,
    petaflops,
    run_macs,
    update_macs,
    view_macs,
)
from fastsuncet.training import methods
from fastsuncet.versions import dali
from pipelines.backend import dali_problem, processes_here
from pipelines.output import counted


def summary(
    config: Config,
    place: Place,
    images: Images | None,  # None where they could not be read
    arithmetic: Arithmetic,
    stream: PairedStream | None,  # None for a run that is not started
    why: str = "",  # the precision is as it is: the note of `resolve_precision`
) -> list[str]:
    """Return lines of "name    what", each a fact about this run."""
    a, c = arithmetic, config.criterion
    supervised, shared = a.supervised_steps > 0, config.model.sync_batchnorm
    method = methods.name(config) if supervised else f"{methods.name(config)}, without labels"
    if 0 < a.supervised_steps < a.steps:
        method += f" for the first {a.supervised_steps:,}"
    elif c.supervised_epochs == "plateau":
        method += " until that has plateaued"
    parts = [f"{a.views} x {a.global_unlabeled:,} unlabeled"] if a.views else []
    if a.small_views:
        parts = [f"({a.large_views} + {a.small_views} small) x {a.global_unlabeled:,} unlabeled"]
    if supervised:
        several = f" x {a.labeled_views} views" if a.labeled_views > 1 else ""
        parts.append(f"{a.classes_per_batch} classes x {a.global_images_per_class} labeled{several}")
    ranks = counted(a.world_size, "process")
    loss = [f"temperature {c.temperature:g}"] if c.instance != "none" or c.contrasts else ["cross-entropy"]
    loss += [f"keys {c.keys}"] * c.contrasts + [f"mean over anchors by {c.average}"] * c.contrasts_labels
    if c.instance == "paws":
        p = config.paws
        loss += [f"targets sharpened by {p.sharpen:g}", f"labels smoothed by {p.smoothing:g}"]
        loss += [f"me-max with a prior that is {p.prior}"] * p.me_max
    if place.on_gpu and c.contrasts and methods.tf32(config):
        loss.append("products in TF32")
    pieces = len(a.pieces(supervised))
    part, twice = "the whole batch", ""
    if pieces > 1:
        part = f"each of {pieces} pieces, at most {c.micro_batch:,} views (criterion.micro_batch)"
        twice = ", a quarter of it for a second forward pass"
    norm = f"statistics of {part}"
    if a.world_size > 1:
        own = f"statistics of each process's own images in {part}; the paper shares them"
        norm = f"{norm}, shared by {ranks} (RankBatchNorm)" if shared else own
    if not norm_shapes(config, a):
        norm = "no BatchNorm in this network"
    view = f"6 x {view_macs(config) / 1e9:.4g} GMAC a {'large ' if a.small_views else ''}view"
    update = petaflops(update_macs(config, a, supervised))
    epoch, whole = update * a.steps_per_epoch, petaflops(run_macs(config, a))
    lines = [
        ("run", f"{config.run_folder}"),
        ("data", f"{len(images.train):,} images; {images.split}" if images else "not checked"),
        ("batch", f"{' + '.join(parts)} = {a.update_views(supervised):,} views an update, on {ranks}"),
        ("steps", f"{a.steps_per_epoch:,} an epoch, {a.steps:,} in all; {method}"),
        ("loss", ", ".join(loss)),
        (
            "compute",
            f"{view}: {update:.4g} petaFLOPs an update{twice}, {epoch:.4g} an epoch, {whole:.4g} the run",
        ),
        ("memory", memory_note(config, place, a, None if images is None else images.train.sizes)),
        ("norm", norm),
        ("device", f"{device_name(config, place)}, {config.meta.precision}{why}, torch {torch.__version__}"),
    ]
    if stream is not None:
        where = "the GPU" if place.on_gpu else "the CPU"
        source, problem = f"DALI {dali() or ''} on {where}", f"DALI cannot be used here: {dali_problem()}"
        if stream.options.backend != "dali":
            configured = config.data.backend == "torchvision"
            source = f"torchvision on the CPU ({'as configured' if configured else problem})"
        operator = ", views in one operator" if stream.options.view_operator else ""
        lines.append(("pixels", f"{source}{operator}"))
    return [f"{name:<9}{text}" for name, text in lines]


def step_memory(config: Config, arithmetic: Arithmetic) -> Memory:
    """Return the bytes that one process needs for a step of its part of the batch."""
    m, a = config.model, arithmetic
    kinds = [a.pieces(supervised) for supervised in {False, a.supervised_steps > 0}]
    # The first piece of a step is its largest.
    (unlabeled, labeled), *more = max(kinds, key=lambda pieces: a.views * pieces[0][0] + pieces[0][1])
    small = a.small_views * unlabeled

    # Weights, gradients and momentum, of AdamW two. Under DDP the sum over pieces is a copy beside the buckets.
    copies = 3 + (config.optimization.optimizer == "adamw") + (bool(more) and a.world_size > 1)
    options = {"precision": config.meta.precision, "copies": copies}

    def estimate(size: int, views: int) -> Memory:
        return memory_estimate(m.name, m.stem, size, *m.head, views=views, **options)

    size = config.data.augmentation.size
    large = estimate(size, a.large_views * unlabeled + labeled)
    activations = estimate(config.swav.small_size, small).activations if small else 0
    # The pixels of all other pieces, in float32.
    waiting = sum(
        (a.large_views * images + labels) * size**2 + a.small_views * images * config.swav.small_size**2
        for images, labels in more
    )
    return replace(large, activations=activations + large.activations + 12 * waiting)


def feed_memory(config: Config, arithmetic: Arithmetic, sizes: np.ndarray | None) -> int:
    """Return about how many bytes one process's images take before the step, where they are decoded.

    `sizes` are the heights and widths of all images, (N, 2); None: ImageNet's mean. Each of the steps read ahead, and
    the one that is worked on, holds the decoded images and the views in uint8 and float32.
    """
    a, side = arithmetic, config.data.augmentation.size
    decoded = 3 * int(500 * 400 if sizes is None else sizes.prod(1, dtype=np.int64).mean())
    view = 15 * side**2
    views = a.large_views * view + a.small_views * 15 * config.swav.small_size**2
    labeled = a.local_labeled if a.supervised_steps else 0
    step = a.local_unlabeled * (decoded + views) + labeled // a.labeled_views * decoded + labeled * view
    return (config.data.prefetch + 1) * step


def memory_note(config: Config, place: Place, arithmetic: Arithmetic, sizes: np.ndarray | None) -> str:
    """Return what the step and the images read ahead take, how much memory there is, and what to do if it is less.

    Each process has a GPU of its own; on a CPU they share the machine's memory.
    """
    step, feed = step_memory(config, arithmetic), feed_memory(config, arithmetic, sizes)
    # A GPU holds what DALI decodes there, and nothing of what torchvision has read ahead.
    by_cpu = place.on_gpu and (config.data.backend == "torchvision" or dali_problem() is not None)
    memory, who = memory_of(place.device), "the GPU" if place.on_gpu else "this machine"
    here = 1 if place.on_gpu else processes_here(arithmetic.world_size)
    less = here * (step.total + (0 if by_cpu else feed)) > memory
    advice = ", WHICH IS LESS: set criterion.micro_batch, or lower the batch (docs/speed.md)" if less else ""
    return (
        f"about {step.total / 1e9:.3g} GB ({step.activations / 1e9:.3g} GB of it activations) a process for the step, "
        f"and {feed / 1e9:.3g} GB {'on the CPU ' if by_cpu else ''}for the images read ahead (estimates); {who} has "
        f"{memory / 1e9:.3g} GB{advice}"
    )


def check_memory(config: Config, arithmetic: Arithmetic, memory: int) -> None:
    """Raise ConfigError for a step that a card of `memory` bytes cannot hold, by far more than the estimate is off."""
    needed = step_memory(config, arithmetic).total
    if needed > 1.5 * memory:
        key = "unsupervised_batch_size" if arithmetic.views else "supervised_imgs_per_class"
        text = f"a step of one process needs about {needed / 1e9:,.0f} GB, and the GPU has {memory / 1e9:,.0f} GB"
        fix = "Set criterion.micro_batch=512 to pass the batch in pieces (docs/speed.md), use more GPUs, or lower it"
        raise config.error(f"criterion.{key}", f"{text}. {fix}")


def speed_on_cpu(config: Config) -> str:
    """Return the summary's line on fast paths of a run on a CPU, which has none (tuning/fast_paths.py)."""
    without = "; model.fused_batchnorm has no effect here" if config.model.fused_batchnorm is True else ""
    return f"PyTorch's operators, as on any CPU{without}"


def device_name(config: Config, place: Place) -> str:
    """Return the name of the GPU, or "CPU" with the number of threads that `config` takes there."""
    if place.device.type == "cuda":
        return torch.cuda.get_device_name(place.device)
    return f"CPU, {counted(config.meta.threads or torch.get_num_threads(), 'thread')}"
