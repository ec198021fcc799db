"""The loader's part of `gpu_suite.py`: pictures a second by threads, read-ahead and decoder, and one pipeline or two.

`tools/tune_loader.py` measures the same settings over the images of a config, and says what to write there.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tools.bench import bench_streams
from tools.bench.device_clock import settled
from tools.gpu.speed import Found, Options, pictures, table

HEAD = ["", "threads", "prefetch", "decoder share", "pictures/s", "an image's pixels in another row"]
SHARES = (0.0, 0.25, 0.5, 0.65, 0.8, 0.9, 1.0)


def loader(options: Options) -> Found:
    """Two views by threads and prefetch; decoding alone by the hardware decoder's share; one pipeline or two."""
    rows: list[list[Any]] = []
    for row in settings(options):
        rows.append(row)
        options.keep(table("pictures a second", HEAD, rows))
    found = table("pictures a second", HEAD, rows)
    small = {"unlabeled": 4, "classes": 2, "size": 32, "threads": 2}
    setting = bench_streams.Setting(
        str(pictures(options)),
        options.device,
        **(small if options.small else {"unlabeled": 256, "classes": 40, "threads": 8}),
    )
    points = bench_streams.measure(setting, *((1, 2) if options.small else (8, 5)))
    labeled = setting.classes * setting.each
    title = f"{setting.unlabeled} images of two views and {labeled} of one, {setting.color} color"
    streams = table(title, bench_streams.HEAD, bench_streams.rows_of(points))
    return {"tables": found["tables"] + streams["tables"], "streams": points}


def settings(options: Options) -> Iterator[list[Any]]:
    """The first table's rows, one by one."""
    from pipelines.datasets.folders import image_folder
    from pipelines.loader import open_loader
    from pipelines.sampling.augmentation import Augmentation
    from pipelines.sampling.samplers import UnlabeledSampler
    from pipelines.sampling.step_plan import Plan

    index = image_folder(pictures(options))
    device = "gpu" if options.device == "cuda" else "cpu"
    batch, count = (8, 2) if options.small else (min(256, len(index)), 12)
    sampler = UnlabeledSampler(len(index), batch, 1, 0)

    def speed(run: Callable[[int], Any]) -> str:
        for step in range(4):
            run(step)
        start = settled(options.device)
        for step in range(4, 4 + count):
            run(step)
        return f"{count * batch / (settled(options.device) - start):.0f}"

    paces = [(2, 2)] if options.small else [(4, 2), (8, 2), (12, 2), (16, 2), (12, 3), (12, 5)]
    for color, (threads, prefetch) in itertools.product(("fast", "exact"), paces):
        views = (Augmentation(size=64 if options.small else 224, color=color),) * 2
        plan = Plan(index, sampler, views, seed=0, role="suite")
        pace = {"threads": threads, "prefetch": prefetch}
        opened = open_loader(index, plan, device=device, backend="dali", **pace)
        try:
            yield [f"two views, {color}", threads, prefetch, "", speed(opened), ""]
        finally:
            opened.close()
    threads = paces[-1][0]
    for share in SHARES[:1] if options.small or device == "cpu" else SHARES:
        pipeline = decoding(index, lambda step: sampler.rows(step, 0), device, share, threads, batch)
        pictures_a_second = speed(lambda step, pipeline=pipeline: pipeline.run())
        moved = another_row(index, sampler.rows(0, 0), device, share, threads)
        yield ["decoding alone", threads, 2, share, pictures_a_second, moved]


def decoding(
    index: Any, rows: Callable[[int], np.ndarray], device: str, share: float, threads: int, batch: int
) -> Any:
    """A pipeline that decodes the images `rows(step)` and does nothing with them."""
    from pipelines.dali import graphs
    from pipelines.dali.engine import FilePaths, placement

    stored = FilePaths(index)
    return graphs.decoded(
        lambda step: stored(rows(step)),
        stored=stored.stored,
        decoder={"hw_decoder_load": share},
        batch_size=batch,
        num_threads=threads,
        prefetch_queue_depth=2,
        **placement(device, 0),
    )


def another_row(index: Any, rows: np.ndarray, device: str, share: float, threads: int) -> str:
    """Whether images decode to the same bits in a batch and in that batch turned round, in words.

    It is what lets two ranks see the pixels one would (`graphs.ONE_DECODER`).
    """
    orders = (rows, rows[::-1].copy())
    pipeline = decoding(index, lambda step: orders[step % 2], device, share, threads, len(rows))
    one, other = ([torch.as_tensor(image) for image in host(pipeline.run())] for _ in orders)
    far = [int((a.int() - b.int()).abs().max()) for a, b in zip(one, reversed(other), strict=True)]
    return (
        f"{sum(map(bool, far))} of {len(far)} differ, by up to {max(far)}" if any(far) else "equal to the bit"
    )


def host(outputs: Any) -> Iterator[np.ndarray]:
    """The images of a pipeline's only output, in the host's memory."""
    (images,) = outputs
    images = images.as_cpu()
    return (np.array(images.at(row)) for row in range(len(images)))
