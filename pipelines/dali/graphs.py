"""The DALI graphs of training views and of the evaluation view: each a list of verbs one can read aloud.

One definition serves both devices. `decode` is "cpu" or "mixed" (JPEG bytes in, pixels on the GPU out). Every other
operator runs where its input is, and its per-image numbers always come from the CPU. No operator here draws anything: a
graph is a pure function of the arrays that `pipelines.sampling.step_plan` gives it.
"""

# DALI's stubs lack operators, constants and the options of decorated graphs.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false, reportOperatorIssue=false

from collections.abc import Callable, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.math as dmath
import nvidia.dali.types as types
from nvidia.dali import Pipeline, pipeline_def
from nvidia.dali.pipeline import do_not_convert

from pipelines.dali.view_operator.build import kernels
from pipelines.sampling.augmentation import Augmentation, Center, CenterParams, ViewParams

FACTORS = ("brightness", "contrast", "saturation", "hue")
# An order of the factors as one number: two bits for each position, the first in the lowest.
BITS = np.array([1, 4, 16, 64], np.int32)
# The inputs of a view: of its crop, and those of the view operator.
OF_CROP, OF_VIEW_OPERATOR = ("corner", "extent"), (*FACTORS, "order", "gray", "sigma", "flip")


@pipeline_def(enable_conditionals=True, exec_dynamic=True)
def views(
    images: Callable,  # iteration -> the names of "files", encoded "bytes" or "pixels" (H, W, 3)
    arrays: Callable,  # iteration -> the arrays of `view_arrays`, all views one after the other
    augmentations: Sequence[Augmentation | Center],
    *,
    decode: str,
    stored: str,  # which of them
    upright: bool = False,  # whether images are turned as their EXIF tag says
    view_operator: bool = False,  # whether it, loaded, makes all of a view after its resize
    hw_decoder_share: float = 0.0,  # of a batch, for a GPU's hardware JPEG decoder
):
    """One decode, then one view for each augmentation: nodes of (size, size, 3) float images.

    Without augmentations, the images as they are decoded. Of "files" the last output is their lengths in bytes,
    (1,) int64.
    """
    lengths = None
    if stored == "pixels":
        image = fn.external_source(images, layout="HWC")
        if decode == "mixed":
            image = image.gpu()
    else:
        # Bytes come in memory of DALI's own (`engine.PackedImages`).
        encoded = fn.external_source(images, no_copy=stored == "bytes")
        if stored == "files":
            # Mapped, files open one at a time: DALI's list of maps has one lock. A file that is cut short meanwhile
            # would end the process by SIGBUS, without a message.
            encoded = fn.io.file.read(encoded, dont_use_mmap=True)
            lengths = encoded.shape()
        image = fn.decoders.image(
            encoded,
            device=decode,
            output_type=types.RGB,
            adjust_orientation=upright,
            # libjpeg does it, and without it the GPU's hybrid decoder gives other colors at edges.
            jpeg_fancy_upsampling=True,
            hw_decoder_load=hw_decoder_share,
        )
    if not augmentations:
        return image if lengths is None else (image, lengths)
    names = [list(view_inputs(augmentation)) for augmentation in augmentations]
    nodes = iter(fn.external_source(arrays, num_outputs=sum(map(len, names))))
    made = tuple(
        one_view(
            image, augmentation, SimpleNamespace(**{name: next(nodes) for name in of_view}), view_operator
        )
        for augmentation, of_view in zip(augmentations, names)
    )
    return made if lengths is None else (*made, lengths)


def one_view(image, augmentation: Augmentation | Center, view: SimpleNamespace, view_operator: bool = False):
    """One view of the image. `view` holds the nodes of its numbers by the names of `view_inputs`."""
    square = (augmentation.size, augmentation.size)
    if isinstance(augmentation, Center):
        image = fn.slice(resize(image, view.resized), start=view.corner, shape=square, axes=(0, 1))
        return normalize(image, augmentation)
    # Slicing before resizing stays within 1 gray level of torchvision except in the outermost rows and columns (photos:
    # up to 15 at size 224, 22 at 32; the kernel's overhang sees the edge repeated, where torchvision drops it). A
    # region of interest of the resize operator reads beyond the crop and is off by up to 40 there.
    image = resize(fn.slice(image, start=view.corner, shape=view.extent, axes=(0, 1)), square)
    return (by_view_operator if view_operator else by_operators)(image, augmentation, view)


def by_operators(image, augmentation: Augmentation, view: SimpleNamespace):
    """The resized image in color, gray, blurred, flipped and normalized by DALI's own operators."""
    if augmentation.recolors:
        image = jitter(image, augmentation, view)
    if augmentation.gray:
        image = gray(image, view.gray)
    if augmentation.blur:
        image = blur(image, view.sigma, augmentation.blur_window)
    # The normalization flips at no cost, and a flip commutes with everything before it. torchvision_engine.py flips
    # first: what does not commute with it, such as a rotation, has to be mirrored here.
    return normalize(image, augmentation, mirror=view.flip if augmentation.flip else 0)


def by_view_operator(image, augmentation: Augmentation, view: SimpleNamespace):
    """The same by the view operator's one operator. It makes the pixels of DALI's CPU operators, on a GPU too."""
    given = {name: getattr(view, name) for name in view_inputs(augmentation) if name not in OF_CROP}
    if augmentation.blur:
        given["window"] = 0 if augmentation.blur_window == "auto" else augmentation.blur_window
    if image.device == "gpu":
        given["kernels"] = kernels(augmentation.widest_blur, Pipeline.current().device_id).hex()
    return fn.fastsuncet.view(image, **given, **normalization(augmentation))


def resize(image, size):
    """The image resized to `size`, antialiased as in torchvision."""
    # Without antialiasing evaluation views differ by 5.8 gray levels on average.
    return fn.resize(image, size=size, interp_type=types.INTERP_LINEAR, antialias=True)


def blur(image, sigma, window: int | Literal["auto"]):
    """The images whose `sigma` is above 0, blurred by a Gaussian."""
    if sigma > 0:
        # With 0 the operator sizes the kernel by sigma. A fixed 23 takes twice the time for < 0.03 levels.
        image = fn.gaussian_blur(image, sigma=sigma, window_size=0 if window == "auto" else window)
    else:
        image = image  # both branches must name the result
    return image


def normalize(image, augmentation: Augmentation | Center, mirror=0):
    """uint8 to float in [0, 1], then (x - mean) / std. HWC becomes channels-last when torch permutes it."""
    return fn.crop_mirror_normalize(image, mirror=mirror, output_layout="HWC", **normalization(augmentation))


def normalization(augmentation: Augmentation | Center) -> dict[str, list[float]]:
    """Return the arguments of a normalization of levels from 0 to 255."""
    return {name: [255 * value for value in getattr(augmentation, name)] for name in ("mean", "std")}


@do_not_convert  # it has no condition of a graph: to look for one takes 0.4 s
def view_inputs(augmentation: Augmentation | Center) -> dict[str, Callable[[Any], np.ndarray]]:
    """Return the arrays that one view's graph takes: name -> how to get it from ViewParams or CenterParams.

    Only those that the strengths need: an operator that can never do anything is not in the graph.
    """
    if isinstance(augmentation, Center):
        # resize takes sizes as floats, slice takes corners as whole numbers; each refuses the other's type.
        return {"resized": lambda view: view.resized.astype(np.float32), "corner": attrgetter("corner")}
    inputs: dict[str, Callable[[Any], np.ndarray]] = {
        "corner": lambda view: view.box[:, :2],
        "extent": lambda view: view.box[:, 2:],
    }
    if augmentation.recolors:
        inputs |= {name: attrgetter(name) for name in FACTORS if getattr(augmentation, name)}
        if augmentation.color_order == "random":
            inputs["order"] = lambda view: view.order @ BITS
    # DALI takes no bool as an operator's argument.
    if augmentation.gray:
        inputs["gray"] = lambda view: view.gray.astype(np.int32)
    if augmentation.blur:
        inputs["sigma"] = attrgetter("sigma")
    if augmentation.flip:
        inputs["flip"] = lambda view: view.flip.astype(np.int32)
    return inputs


def view_arrays(
    augmentations: Sequence[Augmentation | Center], views: Sequence[ViewParams | CenterParams]
) -> list[np.ndarray]:
    """Return what `views` is fed for one step: every view's arrays, in the order of `view_inputs`."""
    return [
        np.ascontiguousarray(array_of(view))
        for augmentation, view in zip(augmentations, views)
        for array_of in view_inputs(augmentation).values()
    ]


# -------------------------------------------------------------------------------------------------------------- color
# torchvision's color jitter in DALI's own operators and arithmetic. `pipelines.dali.view_operator` computes it, and all
# that follows it, in one operator: the same pixels, faster. Every function takes and returns a node of uint8 HWC RGB
# images and runs on its image's device. Two orders of the four factors differ by about 9 gray levels.
#
# Mean absolute difference from torchvision (uint8 tensors, same order) on 32 ImageNet crops of 224: 0.2 to 0.9 gray
# levels of 255 for one factor, 0.58 for gray, 1.2 to 1.5 for all as drawn. Crop and resize alone account for 0.16.
#
# DALI's `color_twist`, one linear map, is not used: its contrast is about a fixed 128 (12 to 17 levels from
# torchvision's), and its hue turns a plane beside luma (5 to 8).


def jitter(image, augmentation, view):
    """Apply the four color factors that `view` holds as nodes (see `view_inputs`).

    The fixed order is brightness, contrast, saturation, hue. Images that are not to be jittered come with neutral
    factors, which change no pixel. That is cheaper than sorting these images out and back in.
    """
    if augmentation.color_order == "fixed":
        for name in FACTORS:
            if getattr(augmentation, name):
                image = adjusted(image, view, name)
        return image
    # Every image takes one branch of four, four times: a batch is split by factor and merged again.
    for position in range(len(FACTORS)):
        factor = (view.order // int(BITS[position])) & 3
        for i, name in enumerate(FACTORS):
            if getattr(augmentation, name):
                if factor == i:
                    image = adjusted(image, view, name)
                else:
                    image = image  # DALI requires that both branches assign the result
    return image


def adjusted(image, view, name: str):
    """Apply one factor."""
    if name == "brightness":
        return fn.brightness(image, brightness=view.brightness)
    if name == "contrast":
        return contrast(image, view.contrast)
    if name == "saturation":
        return fn.saturation(image, saturation=view.saturation)
    if view.hue != 0:  # the one operator slow enough to be worth a condition
        image = hue(image, view.hue)
    else:
        image = image
    return image


def contrast(image, factor):
    """Blend each image with the mean of its gray version: mean + factor * (image - mean)."""
    mean = fn.reductions.mean(fn.color_space_conversion(image, image_type=types.RGB, output_type=types.GRAY))
    if image.device == "gpu":
        # An operator's argument must be on the CPU, and copying the mean there would stall every batch.
        return contrast_expression(mean, on_device_of(image, factor), image)
    # The same bits as the expression, in a twentieth of its time on a CPU.
    return fn.brightness_contrast(image, contrast=factor, contrast_center=mean)


def contrast_expression(mean, factor, image):
    """Compute contrast as an expression, rounded and clipped to uint8."""
    return fn.cast(mean + factor * (image - mean), dtype=types.UINT8)


def hue(image, turns):
    """Rotate the hue of each image by `turns` of the color circle in HSV, keeping saturation and value.

    With value V, chroma C and hue H in sixths of a turn, channel n of (5, 3, 1) is
    V - C * clamp(min(k, 4 - k), 0, 1) where k = (n + H) mod 6: HSV to RGB without a case for each sextant.
    """
    red, green, blue = (image[:, :, channel : channel + 1] for channel in range(3))
    value = dmath.max(red, dmath.max(green, blue))
    # Masks of the largest channel, the first on a tie. They are numbers because a graph has no branch for a pixel.
    red_max = fn.cast(red == value, dtype=types.FLOAT)
    green_max = fn.cast(green == value, dtype=types.FLOAT) * (1 - red_max)
    blue_max = (1 - red_max) * (1 - green_max)
    chroma = fn.cast(value - dmath.min(red, dmath.min(green, blue)), dtype=types.FLOAT)
    red, green, blue = (fn.cast(channel, dtype=types.FLOAT) for channel in (red, green, blue))
    difference = red_max * (green - blue) + green_max * (blue - red) + blue_max * (red - green)
    # A gray pixel has chroma 0, which makes its hue irrelevant; the floor of 1 only keeps the division finite.
    sixths = (
        difference / dmath.max(chroma, 1.0) + 2 * green_max + 4 * blue_max + 6 * on_device_of(image, turns)
    )
    k = sixths + types.Constant(np.float32([5, 3, 1]), device=image.device)  # (H, W, 1) + (3,)
    k = k - 6 * dmath.floor(k / 6)
    return fn.cast(value - chroma * dmath.clamp(dmath.min(k, 4 - k), 0.0, 1.0), dtype=types.UINT8)


def gray(image, chosen):
    """Replace the images whose `chosen` is not 0 by three equal channels of luma."""
    if chosen != 0:
        luma = fn.color_space_conversion(image, image_type=types.RGB, output_type=types.GRAY)
        image = fn.color_space_conversion(luma, image_type=types.GRAY, output_type=types.RGB)
    else:
        image = image
    return image


def on_device_of(image, number):
    """Return a per-image number on the image's device: an expression cannot mix CPU and GPU operands."""
    return number.gpu() if image.device == "gpu" else number
