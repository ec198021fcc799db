"""What the speed parts of `gpu_suite.py` share, and those that time one piece: the losses.

Those of LARS and BatchNorm are in `gpu_pieces.py`, over the bench tools of theirs, the loader's in `gpu_loader.py`.
"""

import importlib.util
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastsuncet.losses import nt_xent, suncet
from fastsuncet.losses.tf32 import products
from tools.bench import bench_step
from tools.bench.common import spread, told
from tools.bench.device_clock import turns
from tools.gpu.drawn_digits import draw_digits

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CLASSES = 20
Found = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What every part is told."""

    device: str
    small: bool
    pictures: Path  # a folder of JPEGs by class, or where to make one
    scratch: Path  # an empty folder of the part's own
    keep: Callable[[Found], None] = lambda found: None  # what there is so far, should the part's time run out


def table(title: str, head: list[str], rows: list[list[Any]]) -> Found:
    """A part that found one table."""
    return {"tables": [{"title": title, "head": head, "rows": rows}]}


def pictures(options: Options) -> Path:
    """JPEGs of ImageNet's usual size in CLASSES folders; written once, by the first part that asks."""
    folder = options.pictures
    if not folder.exists():
        from tools.bench.bench_pipeline import write_pictures

        partial_folder = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(partial_folder, ignore_errors=True)  # of a part whose time ran out
        each = 2 if options.small else 26
        height, width = (60, 80) if options.small else (375, 500)
        places = [partial_folder / f"class_{number:02}" for number in range(CLASSES)]
        for place in places:
            place.mkdir(parents=True)
        with ProcessPoolExecutor() as pool:
            list(pool.map(partial(write_pictures, count=each, height=height, width=width), places))
        partial_folder.rename(folder)
    return folder


def small_images(options: Options) -> tuple[str, list[str]]:
    """What the small runs learn from, in words, and the settings that say so over a config of the demo's digits."""
    if importlib.util.find_spec("sklearn") is not None:
        return "the demo's digits", []
    folder = draw_digits(options.pictures.with_name("digits"))
    return "drawn digits (no scikit-learn here)", ["data.kind=cifar10", f"data.root={folder}"]


def peak_mb(call: Callable[[], Any], device: str) -> str:
    """Memory of the device above what is held before the call; empty on a CPU."""
    if device == "cpu":
        return ""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return f"{(torch.cuda.max_memory_allocated() - before) / 1e6:.0f}"


def in_tf32(call: Callable[[], None]) -> Callable[[], None]:
    """As a bf16 run has it; on a CPU, which has no TF32, the same again."""

    def faster() -> None:
        with products(tf32=True):
            call()

    return faster


def losses(options: Options) -> Found:
    """Forward and backward of both losses, and of tutorials' dense NT-Xent, at one number of rows."""
    rows_of, device = (256, options.device) if options.small else (8192, options.device)
    z = torch.randn(rows_of, 128, device=device, requires_grad=True)
    labels = torch.arange(rows_of, device=device) // 8

    def both(loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def call() -> None:
            z.grad = None
            loss().backward()

        return call

    calls = {"suncet": both(lambda: suncet(z, labels, 0.1)), "nt_xent": both(lambda: nt_xent(z, 0.1))}
    for chunk in (512, 1024, 2048):
        calls[f"nt_xent, {chunk} rows a chunk"] = both(lambda chunk=chunk: nt_xent(z, 0.1, chunk_size=chunk))
    for name in ("suncet", "nt_xent"):
        calls[f"{name}, TF32 products"] = in_tf32(calls[name])
    calls["dense NT-Xent"] = both(lambda: bench_step.dense_nt_xent(*z.chunk(2), 0.1))
    found = turns(calls, device, 2 if options.small else 7, 1 if options.small else 10)
    rows = [
        [name, told(spread([1e3 * each for each in times])), peak_mb(calls[name], device)]
        for name, times in found.items()
    ]
    return table(f"{rows_of} rows of 128, forward and backward", ["", "ms", "MB"], rows) | {"seconds": found}
