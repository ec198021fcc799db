"""Holds the plug-in operator against DALI's own: every pixel of the same images and factors, to the bit."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.types as types
from nvidia.dali import pipeline_def

from pipelines.backend import require_gpu
from pipelines.dali import color
from pipelines.dali.plugin.use import load
from pipelines.data_errors import DataError
from pipelines.sampling.augmentation import Augmentation

EXACT = Augmentation()
FACTORS = ("brightness", "contrast", "saturation", "hue")
NUMBERS = (
    *FACTORS,
    "rotated",
    "grey",
)  # of `pipelines.dali.graphs.view_inputs`, as `one_operator` and `jitter` take them


def prove(path: Path, device: str = "cpu") -> None:
    """Loads the plug-in at `path`. Raises DataError where one value is not that of DALI's own operators on a CPU, or
    where there is no GPU to prove a GPU's on.

    On a GPU, too, it is held against DALI's CPU operators: DALI's GPU ones round otherwise.
    """
    if device == "gpu":
        require_gpu()
    load(path, device)
    different = total = 0
    for images, numbers in (examples(seed=0), *([edges()] if device == "cpu" else [])):
        graph, plugin = both(images, numbers, device=device)
        different += sum(int((one != other).sum()) for one, other in zip(graph, plugin))
        total += sum(image.size for image in images)
    if different:
        raise DataError(
            f"the color operator differs from DALI's own in {different:,} of {total:,} values on this machine: "
            "it is not kept, and DALI's own stay"
        )


def both(
    images: Sequence[np.ndarray],
    numbers: dict[str, np.ndarray],
    augmentation: Augmentation = EXACT,
    device: str = "cpu",
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """`images`, uint8 (H, W, 3), by DALI's own operators on a CPU and by the plug-in on `device`: jitter, then grey."""
    arrays = [list(images), *[np.asarray(numbers[name]) for name in NUMBERS]]

    @pipeline_def(
        batch_size=len(images),
        num_threads=2,
        prefetch_queue_depth=1,
        device_id=0 if device == "gpu" else None,
        exec_dynamic=True,
        enable_conditionals=True,
    )
    def side_by_side():
        image, *given = fn.external_source(
            lambda: arrays, num_outputs=len(arrays), layout=["HWC"] + [""] * len(NUMBERS)
        )
        view = SimpleNamespace(**dict(zip(NUMBERS, given)))
        graph = color.grey(color.jitter(image, augmentation, view), view.grey)
        view.grey = fn.cast(view.grey, dtype=types.INT32)
        return graph, color.one_operator(image.gpu() if device == "gpu" else image, augmentation, view)

    with warnings.catch_warnings():
        # DALI warns of arrays that a graph has no use for: those of the factors that `augmentation` leaves out.
        warnings.filterwarnings("ignore", message="The external source node")
        graph, plugin = side_by_side().run()
    plugin = plugin.as_cpu()
    return ([np.asarray(of[i]) for i in range(len(images))] for of in (graph, plugin))


def examples(seed: int, count: int = 24) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Images of many colours, greys and ties among them, in ragged sizes; factors beyond what training draws."""
    rng = np.random.default_rng(seed)
    images = [picture(rng) for _ in range(count)]
    numbers = {name: rng.uniform(0, 2.5, count) for name in FACTORS}
    numbers["hue"] = rng.uniform(-0.5, 0.5, count)
    for name, neutral in zip(FACTORS, (1, 1, 1, 0)):
        numbers[name][rng.random(count) < 0.3] = neutral
        numbers[name] = numbers[name].astype(np.float32)
    return images, {**numbers, "rotated": numbers["hue"] != 0, "grey": rng.random(count) < 0.2}


def edges() -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """What chance seldom draws: products just below a half, and a mean whose last bit is seen.

    From 65,793 white pixels on the sum of the greys is above 2^24, and the order of its parts counts; a contrast of
    30,000 makes half a level of the mean's last bit. On a GPU the sum is rounded once: its mean is a CPU's only below.
    """
    rng = np.random.default_rng(1)
    # More than one of a kind: most sums and most quotients come out the same by another way.
    images = [rng.integers(199, 202, (*rng.integers(300, 600, 2), 3), np.uint8) for _ in range(12)]
    images.append(rng.integers(0, 256, (64, 64, 3), np.uint8))
    count = len(images)
    numbers = {name: np.ones(count, np.float32) for name in FACTORS}
    numbers["hue"][:] = 0
    numbers["contrast"][:-1] = 30_000
    numbers["brightness"][-1] = np.nextafter(np.float32(0.5), np.float32(0))
    return images, {**numbers, "rotated": np.zeros(count, bool), "grey": np.zeros(count, bool)}


def picture(rng: np.random.Generator) -> np.ndarray:
    """(H, W, 3) uint8 of one of four kinds: any colours, few levels (ties of channels), greys, dark."""
    shape = (*rng.integers(1, 120, 2), 3)
    kind = rng.integers(4)
    if kind == 0:
        return rng.integers(0, 256, shape, np.uint8)
    if kind == 1:
        return rng.choice(np.array([0, 1, 127, 128, 254, 255], np.uint8), shape)
    if kind == 2:
        return np.repeat(rng.integers(0, 256, (*shape[:2], 1), np.uint8), 3, axis=2)
    return rng.integers(0, 16, shape, np.uint8)
