"""Colour in a DALI graph: "exact" is torchvision's jitter, "fast" is one linear twist that is not quite it.

Exact colour has a second way that makes the same pixels on a CPU, `one_operator`: see `pipelines.dali.plugin`.

Every function takes and returns a node of uint8 HWC RGB images and runs where its image is. The order of
the four factors is fixed: brightness, contrast, saturation, hue. (torchvision draws it for every image, which
a graph over batches could only do by computing all orders. Two orders differ by some 9 grey levels.)

Mean absolute difference to torchvision (uint8 tensors, same order) in grey levels of 255, on 32 ImageNet
crops of 224, where crop and resize alone account for 0.16:

                         exact         fast
    brightness .4, 1.6   0.39, 0.44    0.39, 0.44
    contrast .3, 1.7     0.88, 0.30    16.9, 11.7
    saturation .3, 1.7   0.88, 0.40    0.88, 0.40
    hue .05, .1, .2      0.24 to 0.27  5.3, 8.4, 8.4   (to do nothing: 3.5, 7.0, 14.0)
    grey                 0.58          0.58
    all, as drawn        1.2 to 1.5    9.5 to 12

So "fast" is another augmentation of about the same strength, in a quarter of the time that DALI's own operators
take for exact colour on a CPU.
"""

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.math as dmath
import nvidia.dali.types as types


def jitter(image, augmentation, view):
    """Applies the four colour factors that `view` holds as nodes (see `pipelines.dali.graphs.view_inputs`).

    Images that are not to be jittered come with neutral numbers, which leave every pixel as it is: cheaper
    than to sort them out and back in.
    """
    if augmentation.color == "fast":
        return twist(image, augmentation, view)
    if augmentation.brightness:
        image = fn.brightness(image, brightness=view.brightness)
    if augmentation.contrast:
        image = contrast(image, view.contrast)
    if augmentation.saturation:
        image = fn.saturation(image, saturation=view.saturation)
    if augmentation.hue:
        image = hue_of_chosen(image, view.rotated, view.hue)
    return image


def one_operator(image, augmentation, view):
    """`jitter`, and `grey` where the augmentation has it, by our plug-in operator: on a CPU to the bit, in a tenth of
    the time.

    The plug-in must have been loaded (`pipelines.dali.plugin.use`). On a GPU it makes the CPU's bits as well, where DALI's
    operators round otherwise than on a CPU; it has not been run on one yet.
    """
    names = ("brightness", "contrast", "saturation", "hue")
    factors = {name: getattr(view, name) for name in names if getattr(augmentation, name)}
    if augmentation.grey:
        factors["grey"] = view.grey  # int32 here, 0 or 1
    operators = fn.fastsuncet
    if image.device == "gpu":
        return operators.color_jitter_gpu(image, **factors)
    return operators.color_jitter(image, **factors)


def twist(image, augmentation, view):
    """The four factors as one 3x3 matrix and an offset, rounded and clipped once instead of four times.

    Three things are not torchvision's: contrast turns about a fixed 128, hue is a rotation about the grey
    axis of YIQ (it keeps luma where HSV keeps value), and saturation and hue come first.
    """
    names = ("brightness", "contrast", "saturation", "hue")
    factors = {name: getattr(view, name) for name in names if getattr(augmentation, name)}
    return fn.color_twist(image, **factors)


def contrast(image, factor):
    """Blends each image with the mean of its grey version: mean + factor * (image - mean)."""
    mean = fn.reductions.mean(fn.color_space_conversion(image, image_type=types.RGB, output_type=types.GRAY))
    if image.device == "gpu":
        # An operator's argument must lie on the CPU, and to fetch the mean would stall every batch.
        return about(mean, beside(image, factor), image)
    # The same maths as one operator: the same bits in a twentieth of the expression's time on a CPU.
    return fn.brightness_contrast(image, contrast=factor, contrast_center=mean)


def about(mean, factor, image):
    """Contrast as an expression, rounded and clipped to uint8."""
    return fn.cast(mean + factor * (image - mean), dtype=types.UINT8)


def hue_of_chosen(image, chosen, turns):
    """`hue` of the chosen images only. The one colour operator long enough to be worth a condition."""
    if chosen:
        image = hue(image, turns)
    else:
        image = image  # both branches must name the result
    return image


def hue(image, turns):
    """Rotates the hue of each image by `turns` of the colour circle in HSV, keeping saturation and value.

    With value V, chroma C and hue H in sixths of a turn, channel n of (5, 3, 1) is
    V - C * clamp(min(k, 4 - k), 0, 1) where k = (n + H) mod 6: HSV to RGB without a case for each sextant.
    """
    red, green, blue = (image[:, :, channel : channel + 1] for channel in range(3))
    value = dmath.max(red, dmath.max(green, blue))
    # Which channel is the largest, the first on a tie: masks as numbers, as a graph has no branch per pixel.
    red_max = fn.cast(red == value, dtype=types.FLOAT)
    green_max = fn.cast(green == value, dtype=types.FLOAT) * (1 - red_max)
    blue_max = (1 - red_max) * (1 - green_max)
    chroma = fn.cast(value - dmath.min(red, dmath.min(green, blue)), dtype=types.FLOAT)
    red, green, blue = (fn.cast(channel, dtype=types.FLOAT) for channel in (red, green, blue))
    difference = red_max * (green - blue) + green_max * (blue - red) + blue_max * (red - green)
    # A grey pixel has no hue, and with chroma 0 any will do; the floor of 1 only keeps the division finite.
    sixths = difference / dmath.max(chroma, 1.0) + 2 * green_max + 4 * blue_max + 6 * beside(image, turns)
    k = sixths + types.Constant(np.float32([5, 3, 1]), device=image.device)  # (H, W, 1) + (3,)
    k = k - 6 * dmath.floor(k / 6)
    return fn.cast(value - chroma * dmath.clamp(dmath.min(k, 4 - k), 0.0, 1.0), dtype=types.UINT8)


def grey(image, chosen):
    """The chosen images in three equal channels of luma."""
    if chosen:
        luma = fn.color_space_conversion(image, image_type=types.RGB, output_type=types.GRAY)
        image = fn.color_space_conversion(luma, image_type=types.GRAY, output_type=types.RGB)
    else:
        image = image
    return image


def beside(image, number):
    """A per-image number for arithmetic with `image`: an expression does not mix CPU and GPU operands."""
    return number.gpu() if image.device == "gpu" else number
