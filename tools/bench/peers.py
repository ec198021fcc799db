"""Train SimCLR end to end by this project and by lightly, in turns: the same network, files, views and batch.

FOLDER is any tree of images. Both train a network of the same weights on a CPU in float32, from files, with one thread
for the network and two threads or workers for the pixels. lightly makes views with its SimCLRTransform (torchvision
on PIL images) in a DataLoader, and trains with its NTXentLoss and LARS, as its examples do. Views are SimCLR's; below
64 pixels without blur and with half the color strength, as SimCLR has them for CIFAR-10.

Processor time and memory are those of all processes of a contender.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fastsuncet.config import Config, load_config
from fastsuncet.distributed.place import Place
from fastsuncet.errors import FastSuncetError
from fastsuncet.models.resnet import build_model
from pipelines.dali.view_operator.build import kept, unavailable
from tools.bench import harness
from tools.bench.data_loader import WORKERS, data_loader
from tools.bench.harness import ratios, target
from tools.bench.processes import rates, time_batches_in_turns
from tools.bench.step_bench import StepBench

OURS, LIGHTLY = "fastsuncet", "lightly, DataLoader"
COLUMNS = {
    "per_second": "views/s",
    "per_second_to_peer": "views/s, x peer",
    "cpu_ms": "CPU ms/view",
    "cpu_ms_to_peer": "CPU, x peer",
    "memory": "memory, MB",
    "memory_to_peer": "memory, x peer",
}
HERE, SMALL = Place(0, 1, torch.device("cpu")), 64


def config_of(folder: str, size: int, network: str, batch: int) -> Config:
    """Return SimCLR's config on all images below `folder`."""
    words = f"""
        data.kind=images data.validation=null data.augmentation.size={size} data.decode_threads={WORKERS}
        model.name={network} model.stem={"cifar" if size < SMALL else "imagenet"}
        criterion.unsupervised_batch_size={batch} evaluation.knn_every_epochs=null meta.device=cpu meta.precision=fp32
    """.split()
    small = ["data.augmentation.blur=0", "data.augmentation.strength=0.5"] if size < SMALL else []
    return load_config("in1k_simclr", [*words, *small, f"data.root={folder}"])


def train_ours(*arguments: Any) -> Iterator[None]:
    """Train by this project on `config_of(*arguments)`; yield after each step."""
    bench, stream = StepBench.open(config_of(*arguments), HERE)
    step = bench.ours(stream)
    while True:
        step()
        yield


def train_lightly(*arguments: Any) -> Iterator[None]:
    """Train by lightly on `config_of(*arguments)`; yield after each step."""
    from lightly.loss import NTXentLoss
    from lightly.transforms import SimCLRTransform
    from lightly.utils.lars import LARS

    config = config_of(*arguments)
    view, m, rule = config.data.augmentation, config.model, config.optimization
    transform = SimCLRTransform(
        view.size, cj_strength=view.strength, gaussian_blur=view.blur, sigmas=view.blur_sigma, normalize=None
    )
    loader = data_loader(str(config.data.root), transform, config.criterion.unsupervised_batch_size)
    model = build_model(m.name, m.stem, *m.head).train()
    loss = NTXentLoss(config.criterion.temperature)
    optimizer = LARS(model.parameters(), 1e-3, rule.momentum, weight_decay=rule.weight_decay)
    for first, second in loader:
        loss(model(first), model(second)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def measure(options: Namespace, report: harness.Report) -> dict[str, Any]:
    """Time both, each in a process of its own. Raises FastSuncetError without lightly."""
    rounds, steps = (2, 2) if options.quick else (options.rounds, options.steps)
    try:
        import lightly.transforms  # noqa: F401
    except ImportError as error:
        raise FastSuncetError(f"lightly cannot be imported ({error}): pip install -e '.[bench]'") from error
    asked = (str(options.folder.resolve()), options.size, options.network, options.batch)
    config_of(*asked)  # so that a wrong value is reported here, and not by a process
    sources = {OURS: (train_ours, asked), LIGHTLY: (train_lightly, asked)}
    turns = time_batches_in_turns(sources, steps, rounds, discarded=max(1, min(6, steps // 2)))
    views = 2 * options.batch * steps
    points: list[dict[str, Any]] = [{"name": name, **rates(found, views)} for name, found in turns.items()]
    ours, peer = points
    for figure in ("per_second", "cpu_ms", "memory"):
        ours[f"{figure}_to_peer"] = ratios(ours[figure], peer[figure])
    size = f"{options.batch} images of two views of {options.size} pixels"
    title = f"SimCLR, {options.network}, {size}, from files"
    notes = [
        "our views by the view operator" if kept() else f"our views by DALI's operators: {unavailable()}",
        target("processor time a view, times lightly's", ours["cpu_ms_to_peer"], 0.65, at_least=False),
        target("views/s, times lightly's", ours["per_second_to_peer"], 1, at_least=True),
    ]
    tables = [harness.table(title, points, harness.spread_columns(COLUMNS))]
    return {"tables": tables, "points": points, "notes": notes}


def add_arguments(add: Callable) -> None:
    add("folder", type=Path, help="a tree of images")
    add("--size", type=int, default=32, help="side of a view in pixels (default: %(default)s)")
    add("--network", default="resnet_tiny", help="by its name in model.name (default: %(default)s)")
    add("--batch", type=int, default=128, help="images of two views (default: %(default)s)")
    add("--steps", type=int, default=16, help="in a turn (default: %(default)s)")


CASE = harness.Case(measure, rounds=5, quick="two turns of two steps", add_arguments=add_arguments)
