"""The DALI graphs of training views and of the evaluation view: each a list of verbs one can read aloud.

One definition serves both devices. `decode` is "cpu" or "mixed" (JPEG bytes in, pixels on the GPU out). Every other
operator runs where its input is, and its per-image numbers always come from the CPU. No operator here draws anything: a
graph is a pure function of the arrays that `pipelines.sampling.step_plan` gives it.
"""

# DALI's stubs lack operators, constants and the options of decorated graphs.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.types as types
from nvidia.dali import Pipeline, pipeline_def

from pipelines.backend import LoaderOptions
from pipelines.dali import color
from pipelines.dali.view_operator.gpu_code import kernels
from pipelines.sampling.augmentation import Augmentation, Center, CenterParams, ViewParams

# The inputs of a view: of its crop, and those of the view operator.
OF_CROP, OF_VIEW_OPERATOR = ("corner", "extent"), (*color.FACTORS, "order", "gray", "sigma", "flip")

DTYPES = {"float32": types.FLOAT, "float16": types.FLOAT16}


@pipeline_def(enable_conditionals=True, exec_dynamic=True)
def views(
    images: Callable,  # iteration -> what `stored_images` reads
    arrays: Callable,  # iteration -> the arrays of `view_arrays`, all views one after the other
    augmentations: Sequence[Augmentation | Center],
    *,
    decode: str,
    stored: str,  # "files", "bytes" or "pixels": see `stored_images`
    upright: bool = False,  # whether images are turned as their EXIF tag says
    view_operator: bool = False,  # whether it, loaded, makes all of a view after its resize
    images_stream: Any = None,  # the CUDA stream on which `images` writes pixels in GPU memory
    decoder: Mapping[str, Any] | None = None,  # more options of DALI's image decoder
):
    """One decode, then one view for each augmentation: nodes of (size, size, 3) float images.

    Of "files" the last output is their lengths in bytes, (1,) int64.
    """
    image, lengths = stored_images(images, decode, stored, images_stream, decoder, upright)
    names = [list(view_inputs(augmentation)) for augmentation in augmentations]
    nodes = iter(fn.external_source(arrays, num_outputs=sum(map(len, names))))
    made = tuple(
        one_view(
            image,
            augmentation,
            SimpleNamespace(**{name: next(nodes) for name in of_view}),
            view_operator,
        )
        for augmentation, of_view in zip(augmentations, names)
    )
    return made if lengths is None else (*made, lengths)


@pipeline_def(exec_dynamic=True)
def decoded(images: Callable, *, decode: str, stored: str):
    """The images alone, decoded as for training: to find the file behind a failed step, and to check all files."""
    return stored_images(images, decode, stored)[0]


def one_view(image, augmentation: Augmentation | Center, view: SimpleNamespace, view_operator: bool = False):
    """One view of the image. `view` holds the nodes of its numbers by the names of `view_inputs`."""
    square = (augmentation.size, augmentation.size)
    if isinstance(augmentation, Center):
        image = fn.slice(resize(image, view.resized), start=view.corner, shape=square, axes=(0, 1))
        return normalize(image, augmentation)
    # Slicing before resizing stays within 1 gray level of torchvision except in the outermost rows and columns (up to
    # 11: the kernel's overhang sees the edge repeated, where torchvision drops it). A region of interest of the resize
    # operator reads beyond the crop and is off by up to 40 there.
    image = resize(fn.slice(image, start=view.corner, shape=view.extent, axes=(0, 1)), square)
    return (by_view_operator if view_operator else by_operators)(image, augmentation, view)


def by_operators(image, augmentation: Augmentation, view: SimpleNamespace, dtype: str = "float32"):
    """The resized image in color, gray, blurred, flipped and normalized by DALI's own operators."""
    if augmentation.recolors:
        image = color.jitter(image, augmentation, view)
    if augmentation.gray:
        image = color.gray(image, view.gray)
    if augmentation.blur:
        image = blur(image, view.sigma, augmentation.blur_window)
    # The normalization flips at no cost, and a flip commutes with everything before it.
    return normalize(image, augmentation, dtype, mirror=view.flip if augmentation.flip else 0)


def by_view_operator(image, augmentation: Augmentation, view: SimpleNamespace, dtype: str = "float32"):
    """The same by the view operator's one operator. It makes the pixels of DALI's CPU operators, on a GPU too."""
    given = {name: getattr(view, name) for name in view_inputs(augmentation) if name not in OF_CROP}
    if augmentation.blur:
        given["window"] = 0 if augmentation.blur_window == "auto" else augmentation.blur_window
    if image.device == "gpu":
        given["kernels"] = kernels(
            augmentation.widest_blur if augmentation.blur else 0, Pipeline.current().device_id
        ).hex()
    return fn.fastsuncet.view(image, **given, **normalization(augmentation, dtype))


def stored_images(
    images: Callable,
    decode: str,
    stored: str,
    stream: Any = None,
    decoder: Mapping[str, Any] | None = None,
    upright: bool = False,
):
    """The images, uint8 HWC RGB: read from named "files", from encoded "bytes", or given as "pixels".

    Decoded images are as stored, or turned as their EXIF tag says with `upright`. The second node is the length of each
    of the files; None of the others.

    DALI copies pixels in GPU memory on the CUDA stream `stream`.
    """
    if stored == "pixels":
        device = "gpu" if decode == "mixed" else "cpu"
        return fn.external_source(images, device=device, layout="HWC", cuda_stream=stream), None
    # Bytes come in memory of DALI's own (`engine.tensor_list`).
    encoded = fn.external_source(images, no_copy=stored == "bytes")
    if stored == "files":
        # Mapped, files open one at a time: DALI's list of maps has one lock. A file that is cut short meanwhile would
        # end the process by SIGBUS, without a message.
        encoded = fn.io.file.read(encoded, dont_use_mmap=True)
    # Fancy upsampling: libjpeg does it, and without it the GPU's hybrid decoder gives other colors at edges.
    options = {"hw_decoder_load": LoaderOptions.hw_decoder_share, **(decoder or {})}
    image = fn.decoders.image(
        encoded,
        device=decode,
        output_type=types.RGB,
        adjust_orientation=upright,
        jpeg_fancy_upsampling=True,
        **options,
    )
    return image, encoded.shape() if stored == "files" else None


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


def normalize(image, augmentation: Augmentation | Center, dtype: str = "float32", mirror=0):
    """uint8 to float in [0, 1], then (x - mean) / std. HWC becomes channels-last when torch permutes it."""
    return fn.crop_mirror_normalize(
        image, mirror=mirror, output_layout="HWC", **normalization(augmentation, dtype)
    )


def normalization(augmentation: Augmentation | Center, dtype: str) -> dict[str, Any]:
    """Return the arguments of a normalization of levels from 0 to 255."""
    scaled = {name: [255 * value for value in getattr(augmentation, name)] for name in ("mean", "std")}
    return {**scaled, "dtype": DTYPES[dtype]}


def fits_view_operator(augmentations: Sequence[Augmentation | Center]) -> bool:
    """Return whether there are random views, and the view operator knows all that they ask for."""
    random = [each for each in augmentations if isinstance(each, Augmentation)]
    known = {*OF_CROP, *OF_VIEW_OPERATOR}
    return bool(random) and all(view_inputs(each).keys() <= known for each in random)


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
        inputs |= {name: attrgetter(name) for name in color.FACTORS if getattr(augmentation, name)}
        if augmentation.color_order == "random":
            inputs["order"] = lambda view: view.order @ color.BITS
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
