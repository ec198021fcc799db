"""The DALI graphs: training views and the evaluation view, each a list of verbs one can read aloud.

One definition serves both devices. `decode` is "cpu" or "mixed" (JPEG bytes in, pixels on the GPU out); every
other operator follows its input, while its per-image numbers always come from the CPU. No operator here draws
anything: a graph is a pure function of the arrays `pipelines.sampling.step_plan` gives it.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.types as types
from nvidia.dali import pipeline_def

from pipelines.dali import color
from pipelines.sampling.augmentation import Augmentation, Center, CenterParams, ViewParams

# The share of a GPU batch that the hardware JPEG decoder takes. DALI's default, 0.65, splits a batch by
# position between two decoders, whose pixels need not agree to the bit: an image's pixels would depend on
# its row in this rank's batch, and two ranks would no longer see what one sees. The price is the hardware
# decoder's throughput (on an A100 6,000 images/s without, 7,000 with 0.75: NVIDIA/DALI issue 5362); no GPU
# was at hand to measure it for these graphs, which is why it is a setting (data.hw_decoder_share), and why
# `tools/gpu/suite.py` looks whether an image's pixels follow its row at each share.
ONE_DECODER = 0.0

DTYPES = {"float32": types.FLOAT, "float16": types.FLOAT16}


@pipeline_def(enable_conditionals=True, exec_dynamic=True)
def views(
    images: Callable,  # iteration -> what `resident_images` or `decoded_images` reads
    arrays: Callable,  # iteration -> the arrays of `view_arrays`, all views one after the other
    augmentations: Sequence[Augmentation | Center],
    *,
    decode: str,
    resident: bool,
    packed: bool = False,
    plugin: bool = False,  # exact colour by our own operator, which must have been loaded
    dtype: str,
    images_stream: Any = None,  # the CUDA stream on which `images` writes resident pixels; None on the CPU
    hw_decoder_load: float = ONE_DECODER,
    buffers: Mapping[str, int] = MappingProxyType({}),  # of the GPU's decoders: their options by name
):
    """One decode, then one view per augmentation: nodes of (size, size, 3) float images."""
    if resident:
        image = resident_images(images, decode, images_stream)
    else:
        image = decoded_images(images, decode, hw_decoder_load, packed, buffers)
    names = [list(view_inputs(augmentation, plugin)) for augmentation in augmentations]
    nodes = iter(fn.external_source(arrays, num_outputs=sum(map(len, names))))
    return tuple(
        one_view(
            image, augmentation, SimpleNamespace(**{name: next(nodes) for name in of_view}), dtype, plugin
        )
        for augmentation, of_view in zip(augmentations, names)
    )


@pipeline_def(exec_dynamic=True)
def decoded(images: Callable, *, decode: str, packed: bool = False, hw_decoder_load: float = ONE_DECODER):
    """The images alone, as they are decoded for training: for looking into a step that failed."""
    return decoded_images(images, decode, hw_decoder_load, packed)


def one_view(
    image, augmentation: Augmentation | Center, view: SimpleNamespace, dtype: str, plugin: bool = False
):
    """`view` holds the nodes of this view's numbers, by the names of `view_inputs`."""
    if isinstance(augmentation, Center):
        image = centred(image, view, augmentation.size)
        return normalise(image, augmentation, dtype)
    image = augmented(image, augmentation, view, plugin)
    # The flip waits for the normalisation, which does it for nothing; it commutes with all that came before.
    return normalise(image, augmentation, dtype, mirror=view.flip if augmentation.flip else 0)


def augmented(image, augmentation: Augmentation, view: SimpleNamespace, plugin: bool):
    """SimCLR's list: crop and resize, colour, grey, blur. (Flip and normalise come last, in `normalise`.)"""
    image = crop_resize(image, view.corner, view.extent, augmentation.size)
    if plugin and plugged(augmentation):
        image = color.one_operator(image, augmentation, view)
    else:
        if augmentation.recolors:
            image = color.jitter(image, augmentation, view)
        if augmentation.grey:
            image = color.grey(image, view.grey)
    if augmentation.blur:
        image = blur(image, view.blurred, view.sigma, augmentation.blur_window)
    return image


def centred(image, view: SimpleNamespace, size: int):
    """torchvision's `Resize` and `CenterCrop(size)`."""
    image = resize(image, view.resized)
    return fn.slice(image, start=view.corner, shape=(size, size), axes=(0, 1))


def resident_images(images: Callable, decode: str, stream: Any):
    """Images as they are stored, uint8 HWC RGB, from memory; DALI copies those on a GPU on `stream`."""
    device = "gpu" if decode == "mixed" else "cpu"
    return fn.external_source(images, device=device, layout="HWC", cuda_stream=stream)


def decoded_images(
    images: Callable,
    decode: str,
    hw_decoder_load: float,
    packed: bool,
    buffers: Mapping[str, int] = MappingProxyType({}),
):
    """Images as they are stored, uint8 HWC RGB, decoded from the files that `images` names or, packed, holds."""
    encoded = fn.external_source(images)
    if not packed:
        encoded = fn.io.file.read(encoded)
    # adjust_orientation: torchvision's folders ignore EXIF, and the index holds the sizes as stored. Fancy
    # up-sampling: libjpeg does it, and without it the GPU's hybrid decoder gives other colours at edges.
    return fn.decoders.image(
        encoded,
        device=decode,
        output_type=types.RGB,
        adjust_orientation=False,
        jpeg_fancy_upsampling=True,
        hw_decoder_load=hw_decoder_load,
        **buffers,
    )


def crop_resize(image, corner, extent, size: int):
    # Slicing first and resizing the piece stays within 1 grey level of torchvision, but for the outermost
    # rows and columns (up to 11: the kernel's overhang sees the edge repeated, where torchvision drops it).
    # A region of interest inside the resize operator reads across the crop's border: off by up to 40 there.
    crop = fn.slice(image, start=corner, shape=extent, axes=(0, 1))
    return resize(crop, (size, size))


def resize(image, size):
    # Antialiased as in torchvision: without it, evaluation views are 5.8 grey levels away on average.
    return fn.resize(image, size=size, interp_type=types.INTERP_LINEAR, antialias=True)


def blur(image, chosen, sigma, window: int | Literal["auto"]):
    if chosen:
        # 0 lets the operator size the kernel by sigma; a fixed 23 takes twice the time for < 0.03 levels.
        image = fn.gaussian_blur(image, sigma=sigma, window_size=0 if window == "auto" else window)
    else:
        image = image
    return image


def normalise(image, augmentation: Augmentation | Center, dtype: str, mirror=0):
    """uint8 to float: [0, 1], then (x - mean) / std. HWC is channels-last once torch permutes it."""
    return fn.crop_mirror_normalize(
        image,
        mirror=mirror,
        mean=[255 * value for value in augmentation.mean],
        std=[255 * value for value in augmentation.std],
        dtype=DTYPES[dtype],
        output_layout="HWC",
    )


def plugged(augmentation: Augmentation | Center) -> bool:
    """Whether our own operator, where it is there, makes the colours of this view."""
    return isinstance(augmentation, Augmentation) and augmentation.recolors and augmentation.color == "exact"


def view_inputs(
    augmentation: Augmentation | Center, plugin: bool = False
) -> dict[str, Callable[[Any], np.ndarray]]:
    """The arrays that one view's graph takes, by name, and how to get each from the view's parameters.

    Only those that the strengths call for: an operator that can never do anything is not in the graph at all.
    """
    if isinstance(augmentation, Center):
        # resize takes sizes as floats, slice its corners as whole numbers: either refuses the other's type.
        return {"resized": lambda view: view.resized.astype(np.float32), "corner": attrgetter("corner")}
    inputs = {"corner": lambda view: view.box[:, :2], "extent": lambda view: view.box[:, 2:]}
    if augmentation.recolors:
        for name in ("brightness", "contrast", "saturation"):
            if getattr(augmentation, name):
                inputs[name] = attrgetter(name)
        if augmentation.hue and augmentation.color == "fast":
            inputs["hue"] = lambda view: 360 * view.hue
        elif augmentation.hue:
            if not plugin:
                inputs["rotated"] = lambda view: view.hue != 0
            inputs["hue"] = attrgetter("hue")
    if augmentation.grey and plugin and plugged(augmentation):
        inputs["grey"] = lambda view: view.grey.astype(np.int32)  # DALI takes no bool as an argument
    elif augmentation.grey:
        inputs["grey"] = attrgetter("grey")
    if augmentation.blur:
        inputs["blurred"] = lambda view: view.sigma > 0
        inputs["sigma"] = attrgetter("sigma")
    if augmentation.flip:
        inputs["flip"] = lambda view: view.flip.astype(np.int32)
    return inputs


def view_arrays(
    augmentations: Sequence[Augmentation | Center],
    views: Sequence[ViewParams | CenterParams],
    plugin: bool = False,
) -> list[np.ndarray]:
    """What `views` is fed for one step: every view's arrays, in the order of `view_inputs`."""
    return [
        np.ascontiguousarray(array_of(view))
        for augmentation, view in zip(augmentations, views)
        for array_of in view_inputs(augmentation, plugin).values()
    ]
