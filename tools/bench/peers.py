"""Train SimCLR end to end by this project and by lightly, in turns: the same network, files, views and batch.

FOLDER is any tree of images. Both train a network of the same weights on a CPU in float32, from files, with one thread
for the network and two threads or workers for the pixels. lightly makes views with its SimCLRTransform (torchvision
on PIL images) in a DataLoader, and trains with its NTXentLoss and LARS, as its examples do. Views are SimCLR's; below
64 pixels without blur and with half the color strength, as SimCLR has them for CIFAR-10.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from fastsuncet.config import Config, load_config
from fastsuncet.distributed.place import Place
from fastsuncet.errors import FastSuncetError
from fastsuncet.models.resnet import build_model
from pipelines.dali.view_operator.build import kept, unavailable
from tools.bench import harness
from tools.bench.harness import ratios, spread
from tools.bench.pixels import WORKERS, data_loader
from tools.bench.step import StepBench

ROUNDS = 5
OURS, LIGHTLY = "fastsuncet", "lightly, DataLoader"
SMALL = 64


def config_of(folder: str, size: int, network: str, batch: int) -> Config:
    """Return SimCLR's config on all images below `folder`."""
    words = f"""
        data.kind=images data.validation=null data.augmentation.size={size} data.decode_threads={WORKERS}
        model.name={network} model.stem={"cifar" if size < SMALL else "imagenet"}
        criterion.unsupervised_batch_size={batch} evaluation.knn_every_epochs=null meta.device=cpu meta.precision=fp32
    """.split()
    small = ["data.augmentation.blur=0", "data.augmentation.strength=0.5"] if size < SMALL else []
    return load_config("in1k_simclr", [*words, *small, f"data.root={folder}"])


def train_lightly(config: Config) -> Iterator[None]:
    """Train by lightly; yield after each step. Raises FastSuncetError without lightly."""
    try:
        from lightly.loss import NTXentLoss
        from lightly.transforms import SimCLRTransform
        from lightly.utils.lars import LARS
    except ImportError as error:
        raise FastSuncetError(f"lightly cannot be imported ({error}): pip install -e '.[bench]'") from error
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


def measure(options: Namespace) -> int:
    """Time both."""
    torch.set_num_threads(1)
    rounds, steps = (2, 2) if options.quick else (options.rounds, options.steps)
    config = config_of(str(options.folder.resolve()), options.size, options.network, options.batch)
    # Its workers are forked before ours have threads.
    theirs = partial(next, train_lightly(config))
    theirs()
    bench, stream = StepBench.open(config, Place(0, 1, torch.device("cpu")))
    calls, views = {OURS: bench.ours(stream), LIGHTLY: theirs}, 2 * options.batch * steps
    wall, cpu = harness.wall_and_cpu_in_turns(calls, steps, rounds, discarded=max(1, min(6, steps // 2)))
    stream.close()
    rows = []
    for name in calls:
        speed = spread([views / each for each in wall[name]])
        rows.append({"": name, "views/s": speed, "CPU ms/view": spread(cpu[name], 1e3 / views)})
    size = f"{options.batch} images of two views of {options.size} pixels"
    harness.show(f"SimCLR, {options.network}, {size}, from files", rows)
    print(f"Our views are made by {'the view operator' if kept() else f'DALI: {unavailable()}'}.\n")
    cost, faster = ratios(cpu[OURS], cpu[LIGHTLY]), ratios(wall[LIGHTLY], wall[OURS])
    harness.show_target("processor time a view, times lightly's", cost, 0.65, at_least=False)
    harness.show_target("views/s, times lightly's", faster, 1, at_least=True)
    return 0


def add_arguments(add: Callable) -> None:
    add("folder", type=Path, help="a tree of images")
    add("--size", type=int, default=32, help="side of a view in pixels (default: %(default)s)")
    add("--network", default="resnet_tiny", help="by its name in model.name (default: %(default)s)")
    add("--batch", type=int, default=128, help="images of two views (default: %(default)s)")
    add("--steps", type=int, default=16, help="in a turn (default: %(default)s)")
