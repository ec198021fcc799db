"""Compare the plug-in with DALI's own operators: every pixel of the same images and factors, to the bit."""

# DALI's stubs lack operators, constants and the arguments of its decorator.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportPrivateImportUsage=false

import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import nvidia.dali.fn as fn
from nvidia.dali import pipeline_def

from pipelines.backend import require_gpu
from pipelines.dali import color
from pipelines.dali.color import FACTORS
from pipelines.dali.plugin.use import load
from pipelines.data_errors import DataError
from pipelines.sampling.augmentation import Augmentation

EXACT = Augmentation()
INPUTS = (*FACTORS, "grey")  # names of `pipelines.dali.graphs.view_inputs`

Images = list[np.ndarray]  # each uint8 (H, W, 3)
Inputs = dict[str, np.ndarray]  # one number for each image, by the names of INPUTS


def require_equal(library: Path, device: str = "cpu") -> None:
    """Load the plug-in and compare it with DALI's CPU operators, also on a GPU, where DALI's own round differently.

    Raises DataError where one value differs, or where there is no GPU to run the GPU's plug-in on.
    """
    if device == "gpu":
        require_gpu()
    load(library, device)
    different = total = 0
    for images, inputs in (random_batch(seed=0), *([rounding_batch()] if device == "cpu" else [])):
        graph, plugin = both(images, inputs, device=device)
        different += sum(int((one != other).sum()) for one, other in zip(graph, plugin))
        total += sum(image.size for image in images)
    if different:
        raise DataError(
            f"the color operator differs from DALI's own in {different:,} of {total:,} values on this machine: "
            "it is not kept"
        )


def both(
    images: Sequence[np.ndarray], inputs: Inputs, augmentation: Augmentation = EXACT, device: str = "cpu"
) -> tuple[Images, Images]:
    """Return `images` after jitter and gray: by DALI's own operators on a CPU, and by the plug-in on `device`."""
    arrays = [list(images), *[np.asarray(inputs[name]) for name in INPUTS]]

    @pipeline_def(
        batch_size=len(images),
        num_threads=2,
        prefetch_queue_depth=1,
        device_id=0 if device == "gpu" else None,
        exec_dynamic=True,
        enable_conditionals=True,
    )
    def side_by_side():
        layouts = ["HWC"] + [""] * len(INPUTS)
        image, *nodes = fn.external_source(lambda: arrays, num_outputs=len(arrays), layout=layouts)
        view = SimpleNamespace(**dict(zip(INPUTS, nodes)))
        graph = color.gray(color.jitter(image, augmentation, view), view.grey)
        return graph, color.plugin_jitter(image.gpu() if device == "gpu" else image, augmentation, view)

    with warnings.catch_warnings():
        # DALI warns about the inputs of factors that `augmentation` leaves out.
        warnings.filterwarnings("ignore", message="The external source node")
        graph, plugin = side_by_side().run()
    plugin = plugin.as_cpu()
    count = range(len(images))
    return [np.asarray(graph[i]) for i in count], [np.asarray(plugin[i]) for i in count]


def random_batch(seed: int, count: int = 24) -> tuple[Images, Inputs]:
    """Draw images of ragged sizes and of many kinds, and factors beyond what training draws."""
    rng = np.random.default_rng(seed)
    images = [_picture(rng) for _ in range(count)]
    inputs = {name: rng.uniform(0, 2.5, count) for name in FACTORS}
    inputs["hue"] = rng.uniform(-0.5, 0.5, count)
    for name, neutral in zip(FACTORS, (1, 1, 1, 0)):
        inputs[name][rng.random(count) < 0.3] = neutral
    factors = {name: values.astype(np.float32) for name, values in inputs.items()}
    return images, {**factors, "grey": (rng.random(count) < 0.2).astype(np.int32)}


def rounding_batch() -> tuple[Images, Inputs]:
    """Return a batch where another rounding shows: a product just below a half, and means whose last bit matters.

    Above 65,793 white pixels the sum of the gray levels exceeds 2^24 and the order of its parts counts. A contrast of
    30,000 turns the last bit of the mean into half a level. A GPU rounds the sum once, so this is for a CPU only.
    """
    rng = np.random.default_rng(1)
    # Many of a kind, because most sums and quotients come out the same when computed in another way.
    images = [rng.integers(199, 202, (*rng.integers(300, 600, 2), 3), np.uint8) for _ in range(12)]
    images.append(rng.integers(0, 256, (64, 64, 3), np.uint8))
    count = len(images)
    inputs: Inputs = {name: np.ones(count, np.float32) for name in FACTORS}
    inputs["hue"][:] = 0
    inputs["contrast"][:-1] = 30_000
    inputs["brightness"][-1] = np.nextafter(np.float32(0.5), np.float32(0))
    return images, {**inputs, "grey": np.zeros(count, np.int32)}


def _picture(rng: np.random.Generator) -> np.ndarray:
    """Draw (H, W, 3) uint8 of one of four kinds: any colors, few levels (ties of channels), grays, dark."""
    shape = (*rng.integers(1, 120, 2), 3)
    kind = rng.integers(4)
    if kind == 0:
        return rng.integers(0, 256, shape, np.uint8)
    if kind == 1:
        return rng.choice(np.array([0, 1, 127, 128, 254, 255], np.uint8), shape)
    if kind == 2:
        return np.repeat(rng.integers(0, 256, (*shape[:2], 1), np.uint8), 3, axis=2)
    return rng.integers(0, 16, shape, np.uint8)
