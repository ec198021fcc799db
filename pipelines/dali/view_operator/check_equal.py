"""Compare the view operator with DALI's own operators: every value of the same images and numbers, to the bit."""

# DALI's stubs lack operators, constants and the arguments of its decorator.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportPrivateImportUsage=false

import warnings
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import nvidia.dali.fn as fn
from nvidia.dali import pipeline_def

from pipelines.dali import graphs
from pipelines.dali.graphs import BITS, FACTORS
from pipelines.data_errors import DataError
from pipelines.sampling.augmentation import ORDERS, Augmentation

# One number for each image, by the names of `pipelines.dali.graphs.view_inputs`.
Inputs = dict[str, np.ndarray]
INPUTS = graphs.OF_VIEW_OPERATOR
# Normalized, because a wrong order of the channels would not show otherwise.
EXACT = Augmentation(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), color_order="random")


def require_equal(device: str = "cpu") -> None:
    """Compare the view operator with DALI's CPU operators; on a GPU with itself on the CPU, which was compared so.

    DALI's own operators round differently on a GPU, and on the CPU they are much slower than the view operator. Raises
    DataError where one value differs.
    """
    # In one batch: to build the graph takes longer than to run it.
    (images, inputs), (more, others) = random_batch(0), (full_batch if device == "gpu" else rounding_batch)()
    joined = {name: np.concatenate([inputs[name], others[name]]) for name in INPUTS}
    expected, made = both(images + more, joined, device=device)
    different = sum(int((one != other).sum()) for one, other in zip(expected, made))
    total = sum(image.size for image in made)
    if different:
        raise DataError(
            f"the view operator differs from DALI's own in {different:,} of {total:,} values on this machine: "
            "it is not used"
        )


def both(
    images: Sequence[np.ndarray],
    inputs: Inputs,
    augmentation: Augmentation = EXACT,
    device: str = "cpu",
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the views of `images`: those to compare with, made on the CPU, and the view operator's on `device`."""
    arrays = [list(images), *[np.asarray(inputs[name]) for name in INPUTS]]
    device_id = None
    if device == "gpu":
        import torch

        device_id = torch.cuda.current_device()

    @pipeline_def(
        batch_size=len(images),
        num_threads=2,
        prefetch_queue_depth=1,
        device_id=device_id,
        exec_dynamic=True,
        enable_conditionals=True,
    )
    def side_by_side():
        layouts = ["HWC"] + [""] * len(INPUTS)
        image, *nodes = fn.external_source(lambda: arrays, num_outputs=len(arrays), layout=layouts)
        view = SimpleNamespace(**dict(zip(INPUTS, nodes)))
        twin = graphs.by_view_operator if device == "gpu" else graphs.by_operators
        expected = twin(image, augmentation, view)
        return expected, graphs.by_view_operator(
            image.gpu() if device == "gpu" else image, augmentation, view
        )

    with warnings.catch_warnings():
        # DALI warns about the inputs that `augmentation` leaves out.
        warnings.filterwarnings("ignore", message="The external source node")
        expected, made = side_by_side().run()
    made = made.as_cpu()
    count = range(len(images))
    return [np.asarray(expected[i]) for i in count], [np.asarray(made[i]) for i in count]


def random_batch(seed: int, count: int = 24) -> tuple[list[np.ndarray], Inputs]:
    """Draw images of ragged sizes and of many kinds, and factors beyond what training draws."""
    rng = np.random.default_rng(seed)
    images = [_picture(rng) for _ in range(count)]
    inputs = {name: rng.uniform(0, 2.5, count) for name in FACTORS}
    inputs["hue"] = rng.uniform(-0.5, 0.5, count)
    for name, neutral in zip(FACTORS, (1, 1, 1, 0)):
        inputs[name][rng.random(count) < 0.3] = neutral
    sides = np.array([min(image.shape[:2]) for image in images])
    inputs["sigma"] = rng.uniform(0.1, 2, count)
    # The border is mirrored once, so an image must be wider than half of the kernel.
    inputs["sigma"][(rng.random(count) < 0.3) | (np.ceil(3 * inputs["sigma"]) >= sides)] = 0
    numbers: Inputs = {name: values.astype(np.float32) for name, values in inputs.items()}
    numbers["order"] = (ORDERS @ BITS)[rng.integers(len(ORDERS), size=count)]
    for name, chance in (("gray", 0.2), ("flip", 0.5)):
        numbers[name] = (rng.random(count) < chance).astype(np.int32)
    return images, numbers


def full_batch() -> tuple[list[np.ndarray], Inputs]:
    """Return a batch as large as training's, of images of training's size, for a GPU: 256 of 224 pixels, one larger.

    The larger one has more than 65,536 pixels, and no contrast, whose mean a GPU rounds otherwise there.
    """
    rng = np.random.default_rng(2)
    _, inputs = random_batch(seed=2, count=256)
    inputs["sigma"] = np.where(rng.random(256) < 0.5, rng.uniform(0.1, 2, 256), 0).astype(np.float32)
    inputs["contrast"][-1] = 1
    images = list(rng.integers(0, 256, (255, 224, 224, 3), np.uint8))
    return [*images, rng.integers(0, 256, (400, 300, 3), np.uint8)], inputs


def rounding_batch() -> tuple[list[np.ndarray], Inputs]:
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
    inputs["sigma"] = np.zeros(count, np.float32)
    inputs["order"] = np.full(count, ORDERS[0] @ BITS)
    inputs["gray"] = inputs["flip"] = np.zeros(count, np.int32)
    return images, inputs


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
